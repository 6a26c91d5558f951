"""The engine of ``ggml-async verify``: the same text through stock and async, compared bit by bit.

It drives an Executor, which does the work: the real one is in ``verify_exec.py``, tests bring their own. Each arm has a
context of its own, and async always goes first: a read that nobody waited for never finds what stock left in its place.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ggml_async import __version__, stats
from ggml_async.errors import ExitCode, GgmlAsyncError
from ggml_async.profile_plan import LoadKey, grouped
from ggml_async.profile_result import Fingerprint, Warn
from ggml_async.verify_plan import Config, Plan
from ggml_async.verify_result import ARMS, SCHEMA, TestResult, test_result
from ggml_async.verify_text import (
    Batch,
    Floats,
    Score,
    Text,
    Tokens,
    Vocab,
    fingerprint,
    groups,
    n_chunks,
    nll,
    pooled,
    prompt,
    random_tokens,
    scored,
)

#: Perplexities of one text further apart than this factor call for a warning. A CPU and a GPU differ by a few
#: thousandths.
FLAT = 1.05

_NOT_OURS = "stock has it too, so it is not the plug-in's: look at the model, the driver or llama.cpp"

Traced = tuple[str, bytes]  #: name of a tensor, digest of its data


@dataclass(frozen=True)
class Shape:
    """Of a context: sizes in tokens, n_ctx of all sequences together."""

    config: Config
    n_ctx: int
    n_seq: int


class Session(Protocol):
    """A context for each arm, on the loaded model."""

    def clear(self, arm: str) -> None:
        """Forget everything; the arm's next decode starts at position 0."""

    def decode(self, arm: str, batch: Batch) -> Iterator[Floats]:
        """Decode in this arm; the logits of every token, each good until the next is asked for."""

    def counters(self) -> dict[str, int]:
        """The plug-in's counters as they are now."""

    def close(self) -> None:
        """Free the contexts."""


class Executor(Protocol):
    """A loaded llama.cpp with the plug-in attached."""

    def utc(self) -> datetime.datetime:
        """The time of day, in UTC."""

    def load(self, key: LoadKey) -> None:
        """Make this the loaded model; nothing to do when it is already."""

    def load_dense(self) -> None:
        """Make the dense model the loaded one, on the CPU alone."""

    def vocab(self) -> Vocab:
        """Of the loaded model."""

    def tokenize(self, text: bytes) -> Tokens:
        """Tokens of the text, with the loaded model's special ones where it wants them."""

    def open(self, shape: Shape, arms: Sequence[str]) -> Session:
        """Contexts on the loaded model."""

    def trace(self, shape: Shape, arm: str, batches: Sequence[Batch], only: str | None) -> list[Traced]:
        """Decode in a fresh context that stops at every tensor (whose name begins with `only`), and hash each."""

    def describe(self) -> dict[str, Any]:
        """``model``, ``host``, ``devices`` and ``build`` of the result document."""


class Observer(Protocol):
    """Who wants to know how far it is."""

    def test_started(self, index: int, total: int, config: Config) -> None:
        """Configuration `index` (from 1) of `total` begins."""

    def advanced(self, done: int, total: int, what: str) -> None:
        """`done` of `total` tokens of this configuration are through both arms."""

    def test_finished(self, document: Mapping[str, Any], test: Mapping[str, Any]) -> None:
        """A configuration's figures are final; `document` has those of the ones before it too."""


@dataclass
class Outcome:
    """What is left at the end, however it came."""

    document: dict[str, Any]
    warnings: list[Warn] = field(default_factory=list)
    error: GgmlAsyncError | None = None
    exit_code: ExitCode = ExitCode.OK


class _Stop(Exception):
    """SIGINT was seen between two decodes."""


_LAYER = re.compile(r"(?P<tensor>.+?)-(?P<layer>\d+)\b.*")
_UNNAMED = re.compile(r"(node|leaf)_\d+")


def tensor_and_layer(name: str, following: Iterable[str] = ()) -> tuple[str, int | None]:
    """llama.cpp's names end in the layer: ``ffn_moe_topk-12``.

    A tensor that it gave no name (``node_78``) belongs to the layer of the next one in the graph that has one.
    """
    match = _LAYER.fullmatch(name)
    if match:
        return match["tensor"], int(match["layer"])
    if _UNNAMED.fullmatch(name):
        layers = (tensor_and_layer(other)[1] for other in following)
        return name, next((layer for layer in layers if layer is not None), None)
    return name, None


class _Test:
    """Runs one configuration on the loaded model."""

    def __init__(self, verifier: Verifier, config: Config, tokens: Tokens, vocab: Vocab) -> None:
        self.verifier = verifier
        self.executor = verifier.executor
        self.config = config
        self.tokens = tokens
        self.vocab = vocab
        plan = verifier.plan
        self.count = n_chunks(len(tokens), config.n_ctx, plan.chunks)
        self.result = TestResult(config, self.count, plan.prompts)
        self.total = self.count * config.n_ctx + sum(n + 1 for n in plan.prompts)
        self.done = 0

    def text_shape(self) -> Shape:
        """Of the contexts for chunks."""
        n_seq = min(self.config.n_seq, max(self.count, 1))
        return Shape(self.config, self.config.n_ctx * n_seq, n_seq)

    def run(self) -> None:
        """Everything; what is done so far is in `result` when this raises."""
        config, bos = self.config, self.vocab.bos
        if self.count:
            with _closing(self.executor.open(self.text_shape(), ARMS)) as session:
                for batches in groups(self.tokens, self.count, config.n_ctx, config.n_batch, bos):
                    self._compare(session, batches, self.text_shape(), "chunk")
        prompts = self.verifier.plan.prompts
        if prompts:
            shape = Shape(config, max(prompts) + 1, 1)
            with _closing(self.executor.open(shape, ARMS)) as session:
                for length in prompts:
                    self._compare(session, prompt(self.tokens, length, config.n_batch, bos), shape, "prompt")

    def _compare(self, session: Session, batches: list[Batch], shape: Shape, what: str) -> None:
        prints: dict[str, list[Fingerprint]] = {}
        scores: dict[str, dict[int, Score]] = {}
        for arm in reversed(ARMS):
            before = session.counters()
            prints[arm], scores[arm] = self.through(session, arm, batches, what)
            self.result.count(arm, {name: value - before.get(name, 0) for name, value in session.counters().items()})
        places = [(int(c), int(p)) for b in batches for c, p in zip(b.chunks, b.positions, strict=True)]
        different = [
            place for place, a, b in zip(places, prints["stock"], prints["async"], strict=True) if a.digest != b.digest
        ]
        self.result.compared(what, places, different, finite=all(p.finite for p in prints["stock"]))
        for chunk in scores["stock"] if what == "chunk" else ():
            self.result.scored(chunk, {arm: scores[arm][chunk] for arm in ARMS})
        if different and self.result.difference is None:
            self.result.difference = self._locate(batches, shape, what, min(different), prints["stock"])
        self.done += len(places)
        self.verifier.observer.advanced(self.done, self.total, f"{what} {places[-1][0]}")

    def through(
        self, session: Session, arm: str, batches: Iterable[Batch], what: str
    ) -> tuple[list[Fingerprint], dict[int, Score]]:
        """Decode from an empty context in one arm: of every position the fingerprint, of every chunk the score."""
        prints: list[Fingerprint] = []
        scores: dict[int, Score] = {}
        session.clear(arm)
        for batch in batches:
            self.verifier.check()
            for i, row in enumerate(session.decode(arm, batch)):
                prints.append(fingerprint(row))
                chunk, position = int(batch.chunks[i]), int(batch.positions[i])
                if what == "chunk":
                    score = scores.setdefault(chunk, Score())
                    if scored(position, self.config.n_ctx):
                        score.add(nll(row, int(self.tokens[chunk * self.config.n_ctx + position + 1])))
        return prints, scores

    def _locate(
        self, batches: list[Batch], shape: Shape, what: str, place: tuple[int, int], stock: list[Fingerprint]
    ) -> dict[str, Any]:
        """Where the arms part: decode the same again in both, looking at tensors; and whether stock repeats itself.

        A callback at every tensor waits for the device at each, which can hide a missing wait: a second look stops at
        the layers' outputs only.
        """
        found: dict[str, Any] = {"chunk": None, "prompt": None, "position": place[1], "layer": None, "tensor": None}
        found[what] = place[0]
        with _closing(self.executor.open(shape, ["stock"])) as session:
            again, _ = self.through(session, "stock", batches, what)
        found["stock_repeats"] = [p.digest for p in again] == [p.digest for p in stock]
        for only in (None, "l_out"):
            self.verifier.check()
            a, b = (self.executor.trace(shape, arm, batches, only) for arm in reversed(ARMS))
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if at is not None:
                found["tensor"], found["layer"] = tensor_and_layer(a[at][0], (name for name, _ in a[at + 1 :]))
                break
        return found


class _closing:
    """contextlib.closing for a Session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __enter__(self) -> Session:
        return self.session

    def __exit__(self, *_: object) -> None:
        self.session.close()


class Verifier:
    """One verify run: `plan` on `executor`, told to `observer`."""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        observer: Observer,
        text: Text,
        *,
        own_text: bool = False,
        dense: str | None = None,
        command: Sequence[str] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plan = plan
        self.executor = executor
        self.observer = observer
        self.text = text
        self.own_text = own_text
        self.dense = dense
        self.command = list(command)
        self.should_stop = should_stop
        self.outcome = Outcome({})
        self._references: dict[int, Score] = {}
        self._queued = 0
        self._silent: list[Warn] = []  # worth saying only where nothing was read anywhere

    def check(self) -> None:
        """Raises between two decodes once SIGINT was seen."""
        if self.should_stop():
            raise _Stop

    def execute(self) -> Outcome:
        """Run every configuration. Never raises for what one does: what was finished before is kept."""
        outcome = self.outcome
        about = stats.finite(self.executor.describe())
        outcome.document = {
            "schema": SCHEMA,
            "time": _rfc3339(self.executor.utc()),
            "build": {"ggml_async": __version__, **about.get("build", {})},
            "command": self.command,
            "model": about["model"],
            "host": about["host"],
            "devices": about["devices"],
            "text": {"name": self.text.name, "bytes": len(self.text.data), "tokens": None},
            "dense": self.dense,
            "interrupted": False,
            "warnings": [],
            "tests": [],
        }
        where = "the dense model"
        try:
            if self.dense and self.plan.chunks:
                self._reference()
            for index, config in enumerate(grouped(self.plan.configs, Config.load_key), start=1):
                where = f"configuration {index} ({config.label})"
                self._test(index, config)
        except (KeyboardInterrupt, _Stop):
            outcome.exit_code = ExitCode.INTERRUPTED
            outcome.document["interrupted"] = True
            self._warn(Warn("interrupted", "interrupted: only what was finished is reported", "run it again"))
        except GgmlAsyncError as error:
            outcome.error, outcome.exit_code = error, error.exit_code
            self._warn(Warn("failed", f"{where}: {error.message}", error.hint))
        self._finish()
        return outcome

    def _tokens(self) -> tuple[Tokens, Vocab]:
        """The text in the loaded model's tokens."""
        vocab = self.executor.vocab()
        if vocab.tokenizer:
            tokens = self.executor.tokenize(self.text.data)
        elif self.own_text:
            raise GgmlAsyncError(
                "-f: the model has no tokenizer", "leave -f out: random tokens are used", ExitCode.USAGE
            )
        else:
            tokens = random_tokens(vocab.n_vocab)
            self.outcome.document["text"]["name"] = "random tokens"
            self._warn(Warn("no_tokenizer", "the model has no tokenizer: random tokens instead of text", ""))
        self.outcome.document["text"]["tokens"] = len(tokens)
        for config in self.plan.configs:  # a text too short for the last one is said before the first one runs
            n_chunks(len(tokens), config.n_ctx, self.plan.chunks)
        return tokens, vocab

    def _reference(self) -> None:
        """The dense model's perplexity, on the CPU alone, for every size of chunk."""
        self.executor.load_dense()
        tokens, vocab = self._tokens()
        for config in self.plan.configs:
            if config.n_ctx in self._references:
                continue
            test = _Test(self, config, tokens, vocab)
            found = Score()
            with _closing(self.executor.open(test.text_shape(), ["stock"])) as session:
                for batches in groups(tokens, test.count, config.n_ctx, config.n_batch, vocab.bos):
                    found += pooled(list(test.through(session, "stock", batches, "chunk")[1].values()))
            self._references[config.n_ctx] = found

    def _test(self, index: int, config: Config) -> None:
        self.observer.test_started(index, len(self.plan.configs), config)
        time = _rfc3339(self.executor.utc())
        self.executor.load(config.load_key())
        self.outcome.document["model"] = stats.finite(self.executor.describe()["model"])
        tokens, vocab = self._tokens()
        test = _Test(self, config, tokens, vocab)
        stopped = True
        try:
            test.run()
            stopped = False
        finally:
            if test.result.positions:
                self._keep(test.result, time, interrupted=stopped)

    def _keep(self, result: TestResult, time: str, *, interrupted: bool) -> None:
        complete = not interrupted and result.count_asked > 0
        reference = self._references.get(result.config.n_ctx) if complete else None
        test = stats.finite(test_result(result, reference, time=time, interrupted=interrupted))
        self._queued += test["readbacks"]
        label = result.config.label
        if result.difference is not None:
            self._worsen(ExitCode.FAILED)
            self._warn(_difference_warning(result.difference, label))
        if not result.finite:
            message = "some logits are not finite: equal bits would mean little"
            self._warn(Warn("not_finite", message, "try another model or llama.cpp", label))
        if not test["readbacks"]:
            warn, expected = self._nothing_read(result.config, test)
            if expected:
                self._silent.append(warn)
            else:
                self._warn(warn)
        ratio = (test["reference"] or {}).get("ratio")
        if ratio and not 1 / FLAT < ratio < FLAT:
            message = f"perplexity is {ratio:.3f} times the dense model's"
            self._warn(Warn("reference_far", message, _NOT_OURS, label))
        self.outcome.document["tests"].append(test)
        self.observer.test_finished(self.outcome.document, test)

    @staticmethod
    def _nothing_read(config: Config, test: Mapping[str, Any]) -> tuple[Warn, bool]:
        """Why, and whether that was to be expected."""
        expected = False
        if not config.devices or config.n_gpu_layers == 0:
            why, hint, expected = "no GPU in use", "ggml-async doctor lists the devices it sees", True
        elif test["declined"]:
            why, hint = f"all declined ({', '.join(test['declined'])})", "docs/contract.md has the reasons"
        elif test["readbacks_stock"]:
            why, hint = "the plug-in saw readbacks in stock only", "run ggml-async doctor"
        elif not config.no_op_offload:
            why, hint = "llama.cpp computes large batches on the GPU", "give -nopo 1, or a -ub below 32"
        else:
            why, hint, expected = "no experts on the CPU", "put some there: -ncmoe N, or -ot", True
        message = f"nothing was read back asynchronously, so nothing is proved: {why}"
        return Warn("nothing_read", message, hint, config.label), expected

    def _warn(self, warn: Warn) -> None:
        if warn in self.outcome.warnings:
            return
        self.outcome.warnings.append(warn)
        self.outcome.document["warnings"].append(warn.as_dict())

    def _worsen(self, code: ExitCode) -> None:
        if self.outcome.exit_code is ExitCode.OK:
            self.outcome.exit_code = code

    def _finish(self) -> None:
        tests = self.outcome.document["tests"]
        if tests and not self._queued:
            self._worsen(ExitCode.NOT_INSTRUMENTED)
            for warn in self._silent:
                self._warn(warn)
        by_ctx: dict[int, list[float]] = {}
        for test in tests:
            value = test["perplexity"]["stock"]["value"]
            if value is not None and not test["interrupted"]:
                by_ctx.setdefault(test["config"]["n_ctx"], []).append(value)
        spreads = [max(values) / min(values) for values in by_ctx.values() if len(values) > 1]
        self.outcome.document["perplexity_spread"] = max(spreads, default=None)
        if spreads and max(spreads) > FLAT:
            message = f"perplexity is not flat: the highest is {max(spreads):.3f} times the lowest"
            self._warn(Warn("not_flat", message, _NOT_OURS))


def _difference_warning(found: Mapping[str, Any], label: str) -> Warn:
    where = f"chunk {found['chunk']}" if found["chunk"] is not None else f"prompt of {found['prompt']} tokens"
    place = f"{where}, position {found['position']}"
    if found["tensor"] is None:
        place += "; with a callback at each tensor it goes away, so no tensor can be named"
    else:
        place += f", tensor {found['tensor']}"
        place += f" of layer {found['layer']}" if found["layer"] is not None else ""
    if found["stock_repeats"]:
        return Warn("different", f"async logits differ from stock's: {place}", "please report this with -o json", label)
    message = f"logits differ, and stock does not repeat itself either: {place}"
    return Warn("different", message, "try another driver, or -t 1", label)


def _rfc3339(time: datetime.datetime) -> str:
    return time.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
