"""``ggml-async verify`` from end to end, as a user runs it, and its parts on a real llama.cpp."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ggml_async import fetch, gguf_file, models
from ggml_async.errors import ExitCode
from ggml_async.llama import Context, LlamaLibrary, Model
from ggml_async.native import Host
from ggml_async.profile_exec import LlamaExecutor
from ggml_async.verify import Outcome, Shape, Verifier
from ggml_async.verify_exec import VerifyExecutor
from ggml_async.verify_plan import Options, make_plan
from ggml_async.verify_text import Text, read_text

from .conftest import CHILD_TIMEOUT
from .worded import TOKENS, make_worded
from .workload import LAYERS, SHAPE

COMMAND = (sys.executable, "-m", "ggml_async.cli.main", "verify")


def start(*arguments: str | Path, llama: LlamaLibrary, cwd: Path) -> subprocess.Popen[str]:
    root = Path(models.__file__).parents[1]
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments), "-t", "1", "--llama", str(llama.dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def run(*arguments: str | Path, llama: LlamaLibrary, cwd: Path) -> tuple[int, str, str]:
    process = start(*arguments, llama=llama, cwd=cwd)
    out, err = process.communicate(timeout=CHILD_TIMEOUT)
    assert "Traceback" not in err
    return process.returncode, out, err


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_worded(tmp_path_factory.mktemp("models") / "worded.gguf")


def test_text_is_bitwise_equal_and_perplexity_flat_over_n_cpu_moe_16945(
    llama: LlamaLibrary, worded: Path, tmp_path: Path
) -> None:
    """In the report perplexity grew with every layer whose experts were put on the CPU."""
    sweep = ",".join(map(str, range(LAYERS + 1)))
    arguments = ("-ncmoe", sweep, "-c", "32", "--chunks", "2", "--prompts", "3", "-o", "json")
    code, out, err = run(worded, *arguments, llama=llama, cwd=tmp_path)
    assert code == 0, err
    document = json.loads(out)
    assert document["schema"] == "ggml-async/verify/1"
    assert document["text"]["tokens"] > 5000
    tests = document["tests"]
    assert [t["config"]["n_cpu_moe"] for t in tests] == list(range(LAYERS + 1))
    for n, test in enumerate(tests):
        assert test["identical"] is True and test["finite"] is True
        assert (test["chunks"], test["prompts_identical"], test["positions"]) == (2, 1, 2 * 32 + 4)
        # both chunks in one decode, a prompt, a token behind it: two reads a layer of each
        assert test["readbacks"] == test["readbacks_stock"] == 2 * n * 3
    values = [t["perplexity"]["stock"]["value"] for t in tests]
    assert max(values) / min(values) == document["perplexity_spread"] < 1.001
    assert len(set(values)) > 1, "the CPU and the device round otherwise: the experts really moved"
    assert min(values) > len(TOKENS) / 2, "a random model knows nothing"


def test_small_ubatches_and_offloaded_products_are_equal_too_and_the_table_says_what_was_read(
    llama: LlamaLibrary, worded: Path, tmp_path: Path
) -> None:
    arguments = ("-ub", "8,32", "-nopo", "0,1", "-c", "32", "-b", "32", "--chunks", "1", "--prompts", "none")
    code, out, err = run(worded, *arguments, llama=llama, cwd=tmp_path)
    assert code == 0, err
    verdicts = [line.split("|")[-2].strip() for line in out.splitlines() if line.startswith("| Vulkan")]
    # llama.cpp offloads batches of 32 and more: there is nothing to read then, and that is said
    assert verdicts == ["yes", "yes, nothing read", "yes", "yes"]
    assert "llama.cpp computes large batches on the GPU" in err
    assert "bitwise equal in stock and async, in 4 configurations" in out


def test_perplexity_is_what_llama_perplexity_prints_for_the_same_model_and_text(
    llama: LlamaLibrary, tmp_path: Path
) -> None:
    """llama-perplexity of llama.cpp v0.5.0 on the CPU: -c 128 --chunks 2 prints [1]40.7390,[2]30.9149.

    Tolerance 1 %: other CPUs round otherwise.
    """
    arguments = ("-dev", "none", "-c", "128", "--chunks", "2", "--prompts", "none", "-o", "json")
    code, out, err = run(fetch.ensure_smollm2(), *arguments, llama=llama, cwd=tmp_path)
    assert code == ExitCode.NOT_INSTRUMENTED, err
    assert "no GPU in use" in err
    (test,) = json.loads(out)["tests"]
    so_far = [chunk["so_far"]["value"] for chunk in test["by_chunk"]]
    assert so_far == pytest.approx([40.7390, 30.9149], rel=0.01)


def test_the_demo_model_has_the_perplexity_of_the_dense_model_it_was_unfolded_from(
    llama: LlamaLibrary, tmp_path: Path
) -> None:
    """Both on the CPU alone here, which is quick. Other experts, scales or routers move it by far more than 2 %."""
    arguments = ("--dense", fetch.ensure_smollm2(), "-dev", "none", "-c", "64", "--prompts", "none", "-o", "json")
    code, out, err = run(fetch.ensure_demo_model(), *arguments, llama=llama, cwd=tmp_path)
    assert code == ExitCode.NOT_INSTRUMENTED, err
    document = json.loads(out)
    (test,) = document["tests"]
    assert test["reference"]["scored"] == test["perplexity"]["stock"]["scored"] == 2 * 31
    assert test["reference"]["ratio"] == pytest.approx(1, abs=0.02)
    assert not [w for w in document["warnings"] if w["code"] == "reference_far"]


def test_an_interrupt_keeps_what_was_compared_and_marks_it(llama: LlamaLibrary, worded: Path, tmp_path: Path) -> None:
    arguments = ("-c", "32", "-b", "32", "--chunks", "-1", "-o", "json", "--progress")
    process = start(worded, *arguments, llama=llama, cwd=tmp_path)
    assert process.stderr is not None
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if "chunk 1:" in process.stderr.readline():
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, err
    document = json.loads(out)
    (test,) = document["tests"]
    assert document["interrupted"] is True and test["interrupted"] is True
    assert test["identical"] is True and 2 <= test["chunks"] < test["chunks_asked"]


# --- a difference, made by an async arm on another model ------------------------------------------------------------


def spoiled(model: Path, tensor: str, into: Path) -> Path:
    """A copy in which one weight of `tensor` is another number."""
    data = bytearray(model.read_bytes())
    info = gguf_file.read(model).tensors[tensor]
    data[info.offset + 3] ^= 0x40  # the exponent of the first float
    into.write_bytes(data)
    return into


class TwoModels(VerifyExecutor):
    """The async arm has a model of its own: what a wrong read does, without one."""

    other: Model

    def _model(self, arm: str = "") -> Model:
        return self.other if arm == "async" else super()._model(arm)


class Silent:
    def test_started(self, *_: Any) -> None: ...

    def advanced(self, *_: Any) -> None: ...

    def test_finished(self, *_: Any) -> None: ...


def verify_two(llama: LlamaLibrary, path: Path, other: Path, text: Text, **options: Any) -> Outcome:
    file = gguf_file.read(path)
    executor = TwoModels(LlamaExecutor(llama, file, lambda: False, use_layer=False), None)
    try:
        plan = make_plan(Options(threads=["1"], **options), file, executor.devices())
        executor.other = llama.load_model(other, overrides=plan.configs[0].load_key().overrides)
        with executor.other:
            return Verifier(plan, executor, Silent(), text).execute()
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("tensor", "layer", "expected"),
    [
        ("blk.2.ffn_gate_inp.weight", 2, "ffn_moe_logits"),
        ("blk.1.attn_output.weight", 1, "node_"),  # llama.cpp gives it no name
        ("output.weight", None, "result_output"),
    ],
)
def test_the_first_tensor_that_differs_is_named(
    host: Host, llama: LlamaLibrary, worded: Path, tmp_path: Path, tensor: str, layer: int | None, expected: str
) -> None:
    other = spoiled(worded, tensor, tmp_path / "other.gguf")
    options: dict[str, Sequence[str]] = {"ctx_size": ["16"], "n_batch": ["16"], "prompts": ["2"]}
    outcome = verify_two(llama, worded, other, read_text(None), **options)
    assert outcome.exit_code is ExitCode.FAILED
    (test,) = outcome.document["tests"]
    found = test["difference"]
    assert (found["chunk"], found["prompt"], found["stock_repeats"]) == (0, None, True)
    assert found["layer"] == layer and found["tensor"].startswith(expected)
    assert outcome.warnings[0].message.startswith("async logits differ from stock's: chunk 0, position ")


def test_two_arms_on_two_equal_models_are_equal(host: Host, llama: LlamaLibrary, worded: Path, tmp_path: Path) -> None:
    """So what the test above finds is the spoiled weight, not the second model."""
    other = tmp_path / "same.gguf"
    other.write_bytes(worded.read_bytes())
    outcome = verify_two(llama, worded, other, read_text(None), ctx_size=["16"], prompts=["2"])
    assert outcome.exit_code is ExitCode.OK
    assert outcome.document["tests"][0]["identical"] is True


def test_tokens_are_a_bos_and_then_the_texts_own(
    host: Host, llama: LlamaLibrary, worded: Path, model_path: Path
) -> None:
    file = gguf_file.read(worded)
    executor = VerifyExecutor(LlamaExecutor(llama, file, lambda: False, use_layer=False), None)
    try:
        executor.load(make_plan(Options(), file, executor.devices()).configs[0].load_key())
        assert executor.vocab().bos == TOKENS.index("<s>") and executor.vocab().tokenizer
        tokens = executor.tokenize(b"So it is.\n" * 50)
        assert len(tokens) == 1 + 10 * 50
        assert [TOKENS[i] for i in tokens[:6]] == ["<s>", "S", "o", "\u2581", "i", "t"]
    finally:
        executor.close()
    with llama.load_model(model_path, n_gpu_layers=0, devices=[]) as mute:
        vocab = executor._functions.vocab(mute)
        assert (vocab.tokenizer, vocab.bos, vocab.n_vocab) == (False, None, SHAPE["n_vocab"])


def test_a_context_that_cannot_be_made_leaves_no_other_behind(host: Host, llama: LlamaLibrary, worded: Path) -> None:
    file = gguf_file.read(worded)
    executor = VerifyExecutor(LlamaExecutor(llama, file, lambda: False, use_layer=False), None)
    made: list[Context] = []
    whole = executor._context

    def second_fails(shape: Shape, arm: str, **more: Any) -> Context:
        if made:
            raise MemoryError
        made.append(whole(shape, arm, **more))
        return made[0]

    executor._context = second_fails  # type: ignore[method-assign]
    try:
        (config,) = make_plan(Options(threads=["1"]), file, executor.devices()).configs
        executor.load(config.load_key())
        with pytest.raises(MemoryError):
            executor.open(Shape(config, 64, 1), ["stock", "async"])
        assert not made[0]._finalizer.alive
    finally:
        executor.close()
