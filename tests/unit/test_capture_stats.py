"""Which evaluation an event belongs to, which evaluations count, and what a wait is: on hand-made captures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from capture_writer import ASYNC, STOCK, Writer

from ggml_async import capture, capture_stats, capture_tables, stats
from ggml_async.capture_tokens import Analysis

US = 1_000


class Example:
    """A plug-in and a layer in one process; evaluations at the times that a test says, in µs."""

    def __init__(self, *, layer: bool = True, plugin: bool = True) -> None:
        self.out = bytearray()
        self.plugin = Writer(1, out=self.out)
        self.layer = Writer(2, component=2, out=self.out)
        if plugin:
            self.plugin.hello()
            self.plugin.host()
            self.plugin.mode(0, STOCK)
        if layer:
            self.layer.hello()

    def token(self, start: int, duration: int, *, rows: int = 1, mode: int = STOCK, thread: int = 1) -> None:
        self.plugin.event("token", start * US, duration * US, mode=mode, rows=rows, thread=thread, wait_ns=10 * US)

    def stage(self, start: int, duration: int, *, rows: int = 1, mode: int = STOCK, name: str = "x-0") -> None:
        self.plugin.event("stage", start * US, duration * US, mode=mode, rows=rows, name=name, n_readbacks=2, layer=0)

    def wait(self, start: int, duration: int, *, flags: int = 0, cause: str = "readback", thread: int = 1) -> None:
        self.layer.event("wait", start * US, duration * US, flags=flags, cause=cause, thread=thread)

    def submit(self, start: int, *, cause: str = "compute", path: int = 0) -> None:
        self.layer.event("submit", start * US, US, cause=cause, path=path, n_readbacks=3)

    def analysis(self, folder: Path, skip: int = 0) -> Analysis:
        self.plugin.flush()
        self.layer.flush()
        path = folder / "c.capture"
        path.write_bytes(self.out)
        return capture_stats.analyse(capture.read([path]), skip)


@pytest.fixture
def example() -> Example:
    return Example()


def figures(analysis: Analysis, arm: str = "stock", test: str = "decode") -> dict[str, object]:
    unit = analysis.unit(arm, test)
    assert unit is not None
    return unit.figures


def test_joined_calls_are_one_wait_and_a_timed_out_call_belongs_to_the_next(example: Example, tmp_path: Path) -> None:
    joined, timeout = capture.FLAG_JOINED, capture.FLAG_TIMEOUT
    example.wait(10, 5)
    example.wait(20, 2, flags=joined)
    example.wait(30, 1, flags=timeout)
    example.wait(40, 4)
    example.wait(50, 1, flags=timeout)  # nothing follows in its thread: no wait
    example.wait(45, 7, thread=2, flags=joined)  # joined to nothing that is known: a wait
    found = example.analysis(tmp_path).waits
    assert found.start.tolist() == [10 * US, 40 * US, 45 * US]
    assert found.duration.tolist() == [7 * US, 5 * US, 7 * US]
    assert found.calls.tolist() == [2, 2, 1]


def test_speed_is_from_end_to_end_and_the_first_has_none_before_it(example: Example, tmp_path: Path) -> None:
    for i in range(4):
        example.token(1000 + 100 * i, 80)  # 20 between them
    found = figures(example.analysis(tmp_path))
    assert found["evaluations"] == 4
    assert found["tok_s"] == pytest.approx(1e6 / 100)


def test_idle_time_is_no_part_of_the_speed(example: Example, tmp_path: Path) -> None:
    for start in (0, 100, 200, 300, 9_000, 9_100):
        example.token(start, 80)
    assert figures(example.analysis(tmp_path))["tok_s"] == pytest.approx(1e6 / 100)


def test_one_evaluation_counts_by_its_own_duration(example: Example, tmp_path: Path) -> None:
    example.token(0, 50)
    found = figures(example.analysis(tmp_path))
    assert found["tok_s"] == pytest.approx(1e6 / 50)
    assert found["tok_s_ci95"] is None


def test_warm_up_is_left_out_of_every_process_that_has_more(example: Example, tmp_path: Path) -> None:
    for start, duration in ((0, 5000), (6000, 80), (6100, 80)):
        example.token(start, duration)
    found = example.analysis(tmp_path, skip=1)
    assert found.tokens.warm_up.tolist() == [True, False, False]
    assert figures(found)["evaluations"] == 2
    kept = example.analysis(tmp_path, skip=3)
    assert not kept.tokens.warm_up.any()
    assert kept.notes == ["pid 1000 has 3 evaluations: none was left out as warm-up"]


def test_an_evaluation_that_a_switch_fell_into_is_left_out(example: Example, tmp_path: Path) -> None:
    example.token(0, 80)
    example.token(100, 80)
    example.plugin.mode(150 * US, ASYNC)
    for start in (200, 300):
        example.token(start, 80, mode=ASYNC)
    found = example.analysis(tmp_path)
    assert found.tokens.straddles.tolist() == [False, True, False, False]
    # neither is it a step of work for the one behind it
    assert found.tokens.period.tolist() == [-1, -1, -1, 100 * US]


def test_the_same_mode_again_is_no_switch(example: Example, tmp_path: Path) -> None:
    example.token(0, 80)
    example.plugin.mode(50 * US, STOCK)
    assert not example.analysis(tmp_path).tokens.straddles.any()


def test_an_evaluation_with_a_stage_of_another_mode_is_left_out(example: Example, tmp_path: Path) -> None:
    example.token(0, 80)
    example.stage(10, 5, mode=ASYNC)
    assert example.analysis(tmp_path).tokens.straddles.tolist() == [True]


def test_a_prompt_in_several_graphs_whose_last_layer_has_one_row_has_all_its_rows(
    example: Example, tmp_path: Path
) -> None:
    example.token(0, 1000, rows=1)
    for graph in range(2):
        for layer in range(3):
            rows = 1 if layer == 2 else 512
            example.stage(100 * graph + 10 * layer, 5, rows=rows, name=f"ffn_norm-{layer}")
    example.token(2000, 80)
    for layer in range(3):
        example.stage(2000 + 10 * layer, 5, name=f"ffn_norm-{layer}")
    found = example.analysis(tmp_path).tokens
    assert found.rows.tolist() == [1024, 1]
    assert found.test.tolist() == [1, 0]


def test_waits_and_submits_from_the_last_evaluations_end_on_are_counted(example: Example, tmp_path: Path) -> None:
    for start in (0, 100, 200):
        example.submit(start - 10, cause="upload")  # inputs, before the first thing that the plug-in sees
        example.wait(start - 5, 1, cause="upload")
        example.token(start, 80)
        example.wait(start + 70, 5, cause="token")
        example.submit(start + 20)
        example.submit(start + 30, path=2)  # sparse binding is no queue submit
    example.wait(5_000, 1)  # after the last one
    found = figures(example.analysis(tmp_path))
    assert found["fence_waits_per_token"] == 2
    assert found["fence_waits_by_cause"] == {"token": 1, "upload": 1}
    assert found["queue_submits_by_cause"] == {"upload": 1, "compute": 1}
    assert found["submit_infos_per_token"] == 6
    assert found["fence_wait_us"]["mean"] == 3  # type: ignore[index]


def test_other_threads_events_do_not_mix(example: Example, tmp_path: Path) -> None:
    for thread, length in ((1, 80), (2, 40)):
        for start in (0, 100):
            example.token(start, length, thread=thread)
    example.wait(110, 1, thread=2)
    found = example.analysis(tmp_path)
    key = found.tokens.key[found.wait_token[0]]
    assert key & 0xFFFFFFFF == 2
    rows = capture_tables.processes(found)
    assert [(r["thread"], r["evaluations"], round(r["tok_s"])) for r in rows] == [(1, 2, 10_000), (2, 2, 10_000)]


def test_beyond_the_layers_limit_nothing_is_counted_as_zero(example: Example, tmp_path: Path) -> None:
    for start in (0, 100, 200, 300):
        example.token(start, 80)
        if start < 200:
            example.wait(start + 10, 1)
    example.layer.limit(190 * US, 1 << 20)
    assert figures(example.analysis(tmp_path))["fence_waits_per_token"] == 1


def test_without_a_layer_or_a_plug_in_figures_are_null(tmp_path: Path) -> None:
    alone = Example(layer=False)
    alone.token(0, 80)
    found = figures(alone.analysis(tmp_path))
    assert found["fence_waits_per_token"] is None and found["fence_waits"] is None and found["fence_wait_us"] is None
    only = Example(plugin=False)
    only.wait(0, 4)
    only.submit(2)
    found = figures(only.analysis(tmp_path), "none", "any")
    assert (found["fence_waits"], found["queue_submits"]) == (1, 1)
    assert found["fence_waits_per_token"] is None and found["tok_s"] is None and found["readbacks_per_token"] is None


def test_readback_cost_takes_stocks_device_wait_off_both_arms(example: Example, tmp_path: Path) -> None:
    def evaluation(start: int, mode: int, length: int, device_wait: int) -> None:
        example.token(start, 500, mode=mode)
        example.plugin.event(
            "stage", (start + 10) * US, length * US, mode=mode, rows=1, name="x-0", n_readbacks=2,
            device_wait_ns=device_wait * US if device_wait else -1,
        )  # fmt: skip

    for i in range(3):
        evaluation(1000 * i, STOCK, 160, 60)
    example.plugin.mode(2_900 * US, ASYNC)
    for i in range(3, 6):
        evaluation(1000 * i, ASYNC, 66, 0)
    found = example.analysis(tmp_path)
    assert figures(found)["readback_cost_us"] == {"mean": 50.0, "ci95": [50.0, 50.0]}
    assert figures(found, "async")["readback_cost_us"] == {"mean": 3.0, "ci95": [3.0, 3.0]}
    stage = next(r for r in capture_stats.speedups(found) if r["figure"] == "stage_us")
    assert stage["ratio"] == pytest.approx(66 / 160)


def test_grouped_summaries_are_those_of_each_group() -> None:
    random = np.random.default_rng(7)
    groups, values = random.integers(0, 5, 400), random.integers(0, 10_000, 400)
    groups[groups == 3] = 4  # a group without any
    found = capture_tables.grouped(groups, values, 5)
    for number in range(5):
        own = stats.summary(values[groups == number].tolist())
        assert found[number] == (own if own is None else pytest.approx(own))


def test_four_lines_say_what_was_in_and_what_it_did(example: Example, tmp_path: Path) -> None:
    for start in (0, 100):
        example.token(start, 80)
        example.wait(start + 70, 5, cause="token")
    lines = capture_stats.summary_lines(example.analysis(tmp_path).capture, skip=0)
    assert len(lines) == 4 and all("\n" not in line for line in lines)
    assert "plug-in 0.1.0" in lines[0] and "Vulkan layer 0.1.0" in lines[0]
    assert "10000.00 t/s" in lines[1]
    nothing = Example(plugin=False, layer=False)
    nothing.layer.put(99, b"")
    assert len(capture_stats.summary_lines(nothing.analysis(tmp_path).capture)) == 4
