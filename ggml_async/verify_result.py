"""From what was compared to the figures of ``ggml-async/verify/1``. Pure: no clock, no library, no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ggml_async.verify_plan import Config
from ggml_async.verify_text import Score, pooled

SCHEMA = "ggml-async/verify/1"
ARMS = ("stock", "async")
#: How a read was queued (counters of the plug-in); `stock` is ggml's own path.
QUEUED = ("direct", "bounce", "empty")

Place = tuple[int, int]  #: (chunk or prompt length, position)


class TestResult:
    """Of one configuration, as it grows.

    Attributes:
        difference: where the arms part, None while they are equal.
        positions: logits rows compared.
        different: of these, not bitwise equal.
        finite: whether all of them are finite.
    """

    __test__ = False  # no pytest class

    def __init__(self, config: Config, count: int, prompts: Sequence[int]) -> None:
        self.config = config
        self.count_asked = count
        self.prompts_asked = tuple(prompts)
        self.positions = 0
        self.different = 0
        self.finite = True
        self.difference: dict[str, Any] | None = None
        self.prompts: dict[int, bool] = {}
        self.chunks: dict[int, dict[str, Score]] = {}
        self._counters: dict[str, Counter[str]] = {arm: Counter() for arm in ARMS}

    def count(self, arm: str, counters: Mapping[str, int]) -> None:
        """What the plug-in's counters grew by in one arm."""
        self._counters[arm].update(counters)

    def compared(self, what: str, places: Collection[Place], different: Collection[Place], *, finite: bool) -> None:
        """One group of chunks, or one prompt, went through both arms."""
        self.positions += len(places)
        self.different += len(different)
        self.finite = self.finite and finite
        if what == "prompt":
            self.prompts[next(iter(places))[0]] = not different

    def scored(self, chunk: int, scores: dict[str, Score]) -> None:
        """A chunk's sums by arm."""
        self.chunks[chunk] = scores

    def readbacks(self, arm: str) -> int:
        """All that the plug-in saw in an arm."""
        return self._counters[arm]["readbacks"]

    def queued(self) -> dict[str, int]:
        """Asynchronous reads of the async arm by path."""
        return {path: self._counters["async"][path] for path in QUEUED}

    def declined(self) -> dict[str, int]:
        """Reads of the async arm left to ggml, by reason."""
        prefix = "declined_"
        found = self._counters["async"].items()
        return {name.removeprefix(prefix): n for name, n in found if name.startswith(prefix) and n}


def test_result(result: TestResult, reference: Score | None, *, time: str, interrupted: bool) -> dict[str, Any]:
    """One element of the document's ``tests``."""
    config = result.config
    queued = result.queued()
    total = {arm: pooled([scores[arm] for scores in result.chunks.values()]) for arm in ARMS}
    different = sorted(length for length, same in result.prompts.items() if not same)
    return {
        "config": {
            "devices": list(config.devices),
            "n_gpu_layers": config.n_gpu_layers,
            "n_cpu_moe": config.n_cpu_moe,
            "overrides": [f"{pattern}={buft}" for pattern, buft in config.overrides],
            "n_ctx": config.n_ctx,
            "n_batch": config.n_batch,
            "n_ubatch": config.n_ubatch,
            "n_seq": min(config.n_seq, max(result.count_asked, 1)),
            "threads": config.n_threads,
            "flash_attn": config.flash_attn,
            "no_op_offload": config.no_op_offload,
        },
        "time": time,
        "identical": not result.different,
        "positions": result.positions,
        "positions_different": result.different,
        "finite": result.finite,
        "readbacks": sum(queued.values()),
        "readbacks_by_path": queued,
        "readbacks_stock": result.readbacks("stock"),
        "declined": result.declined(),
        "chunks": len(result.chunks),
        "chunks_asked": result.count_asked,
        "perplexity": {arm: total[arm].as_dict() for arm in ARMS},
        "by_chunk": _by_chunk(result),
        "reference": _reference(total["stock"], reference),
        "prompts": len(result.prompts),
        "prompts_asked": len(result.prompts_asked),
        "prompts_identical": len(result.prompts) - len(different),
        "prompts_different": different,
        "difference": result.difference,
        "interrupted": interrupted,
    }


test_result.__test__ = False  # type: ignore[attr-defined]  # no pytest function


def _by_chunk(result: TestResult) -> list[dict[str, Any]]:
    """Each chunk's own perplexity, and that of all chunks so far, which llama-perplexity prints."""
    rows = []
    so_far = Score()
    for chunk, scores in sorted(result.chunks.items()):
        so_far += scores["stock"]
        rows.append(
            {
                "chunk": chunk,
                **{arm: scores[arm].as_dict() for arm in ARMS},
                "so_far": so_far.as_dict(),
            }
        )
    return rows


def _reference(stock: Score, reference: Score | None) -> dict[str, Any] | None:
    """The dense model's perplexity over the same predictions, and how many times it ours is."""
    if reference is None:
        return None
    ours, theirs = stock.perplexity(), reference.perplexity()
    return {**reference.as_dict(), "ratio": ours / theirs if ours is not None and theirs else None}
