"""The engine of profile, driven by a mock executor with a programmed clock."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from mock_executor import COMPUTE, GPU, MockExecutor, MockSession

from ggml_async.errors import ExitCode, GgmlAsyncError, UsageError
from ggml_async.profile import Outcome, Profiler
from ggml_async.profile_plan import (
    Options,
    check_options,
    cpu_expert_layers,
    default_devices,
    make_plan,
    parse_devices,
    parse_ints,
    parse_overrides,
)
from ggml_async.profile_result import Warn


class Watcher:
    def __init__(self) -> None:
        self.events: list[str] = []

    def test_started(self, index: int, total: int, config: Any) -> None:
        self.events.append(f"test {index}/{total} {config.test}")

    def run_started(self, done: int, total: int, arm: str) -> None:
        pass

    def run_finished(self, done: int, total: int, run: Any) -> None:
        self.events.append(f"{done}/{total} {run.arm}")

    def test_finished(self, document: Any, test: Any) -> None:
        self.events.append("finished")


def model_of(executor: MockExecutor) -> Any:
    return SimpleNamespace(n_layer=executor.n_layer, expert_layers=lambda: executor.expert_layers)


def profile(executor: MockExecutor, watcher: Watcher | None = None, **options: Any) -> Outcome:
    options = {"n_gen": ["3"], "threads": ["2"], "repetitions": 4, **options}
    plan = make_plan(Options(**options), model_of(executor), executor.devices())
    return Profiler(
        plan, executor, watcher or Watcher(), expert_layers=executor.expert_layers, n_layer=executor.n_layer,
        should_stop=executor.should_stop,
    ).execute()  # fmt: skip


def codes(outcome: Outcome) -> list[str]:
    return [w["code"] for w in outcome.document["warnings"]]


def only(outcome: Outcome) -> Any:
    (test,) = outcome.document["tests"]
    return test


# --- figures -----------------------------------------------------------------------------------------------------


def test_figures_of_both_arms_follow_from_the_clock_exactly() -> None:
    outcome = profile(MockExecutor())
    test = only(outcome)
    stock, queued = test["arms"]["stock"], test["arms"]["async"]
    assert outcome.exit_code is ExitCode.OK
    assert codes(outcome) == []
    assert stock["tokens"] == queued["tokens"] == 4 * 3
    assert stock["readbacks_per_token"] == queued["readbacks_per_token"] == 8
    assert (stock["cpu_splits_per_token"], stock["bytes_per_token"], stock["uploads_per_token"]) == (4, 4 * 4160, 4)
    assert (stock["synchronizes_per_token"], queued["synchronizes_per_token"]) == (16, 4)
    assert (stock["stage_us"]["mean"], queued["stage_us"]["p99"]) == (100, 64)
    assert (stock["stage_per_readback_us"]["mean"], queued["stage_per_readback_us"]["mean"]) == (50, 32)
    assert stock["device_wait_us"]["mean"] == 60
    assert queued["device_wait_us"] is None
    assert stock["readback_cost_us"] == {"mean": 20, "ci95": [20, 20]}
    assert queued["readback_cost_us"]["mean"] == 2
    assert stock["issue_us"] is None
    assert queued["issue_us"]["max"] == 2
    assert stock["stage_share"] == pytest.approx(400 / 1400)
    assert stock["tok_s"]["mean"] == pytest.approx(1e6 / 1400)
    assert queued["by_device"][GPU]["readbacks_per_token"] == 8
    assert queued["by_device"][GPU]["bytes_per_token"] == 4 * 4160
    assert test["speedup"]["tok_s"]["ratio"] == pytest.approx(1400 / 1256)
    assert test["speedup"]["stage_us"]["ratio"] == pytest.approx(0.64)
    assert test["identical_logits"] is True


def test_fence_waits_and_submits_are_of_the_timed_part_of_each_arm_by_cause() -> None:
    for options in ({}, {"n_depth": ["5"]}):  # the prefill is not counted
        test = only(profile(MockExecutor(), arms="stock,async,off", **options))
        stock, queued, off = (test["arms"][arm] for arm in ("stock", "async", "off"))
        assert stock["fence_waits_per_token"] == off["fence_waits_per_token"] == 4 * 2 + 1
        assert queued["fence_waits_per_token"] == 4 + 1
        assert queued["fence_waits_by_cause"] == {"readback": 4, "token": 1}
        assert stock["fence_waits_by_cause"] == {"readback": 8, "token": 1}
        assert stock["fence_wait_us"] == {"mean": 10, "p50": None, "p95": None, "p99": None, "max": None}
        assert stock["wait_calls_per_token"] == 3 * 9
        assert stock["queue_submits_per_token"] == queued["queue_submits_per_token"] == 4 * 2 + 5
        assert queued["queue_submits_by_cause"] == {"readback": 8, "token": 5}


VULKAN = (
    "fence_waits_per_token", "fence_wait_us", "fence_waits_by_cause", "wait_calls_per_token", "queue_submits_per_token",
    "queue_submits_by_cause",
)  # fmt: skip


def test_without_the_layer_its_figures_are_null_and_one_warning_says_why() -> None:
    executor = MockExecutor()
    executor.no_layer = Warn("no_layer", "fence waits are not measured: no headers", "install them")
    outcome = profile(executor, n_cpu_moe=["2,4"], repetitions=2)
    assert [[arm[key] for key in VULKAN] for t in outcome.document["tests"] for arm in t["arms"].values()] == [
        [None] * len(VULKAN)
    ] * 4
    assert codes(outcome) == ["no_layer"]
    assert outcome.exit_code is ExitCode.OK


def test_a_layer_that_saw_no_submit_has_no_figures_and_says_so() -> None:
    executor = MockExecutor()
    executor.layer_blind = True
    outcome = profile(executor)
    assert [only(outcome)["arms"]["stock"][key] for key in VULKAN] == [None] * len(VULKAN)
    assert codes(outcome) == ["layer_saw_nothing"]
    assert "doctor" in outcome.warnings[0].hint


def test_only_decode_is_timed_and_prefill_is_not_counted() -> None:
    executor = MockExecutor()
    plain = only(profile(MockExecutor()))["arms"]["stock"]
    deep = only(profile(executor, n_depth=["5"], n_batch=["2"]))["arms"]["stock"]
    assert deep["tokens"] == plain["tokens"]
    assert deep["readbacks_per_token"] == plain["readbacks_per_token"]
    assert deep["tok_s"] == plain["tok_s"]
    assert deep["stage_share"] == plain["stage_share"]
    assert ("decode", "stock", 2) in executor.calls  # the prefill, in pieces of n_batch


def test_prompt_is_one_decode_and_counts_all_its_tokens() -> None:
    test = only(profile(MockExecutor(), n_prompt=["10"], n_gen=["0"]))
    assert test["config"]["test"] == "pp10"
    assert test["arms"]["stock"]["tokens"] == 4 * 10
    assert test["arms"]["stock"]["readbacks_per_token"] == 0.8
    assert test["arms"]["stock"]["tok_s"]["mean"] == pytest.approx(10e6 / 1400)


def test_of_the_off_arm_the_plug_in_knows_nothing() -> None:
    test = only(profile(MockExecutor(), arms="off,stock"))
    off = test["arms"]["off"]
    assert off["tok_s"]["mean"] > 0
    assert off["readbacks_per_token"] is None
    assert off["declined"] is None
    assert test["speedup"] == {"tok_s": None, "stage_us": None}


def test_async_alone_has_no_readback_cost_as_stock_gives_the_device_wait() -> None:
    test = only(profile(MockExecutor(), arms="async"))
    assert list(test["arms"]) == ["async"]
    assert test["arms"]["async"]["readback_cost_us"] is None


# --- order, warm-up ----------------------------------------------------------------------------------------------


def test_every_repetition_has_each_arm_once_in_a_random_order_that_the_seed_repeats() -> None:
    orders: dict[int, list[str]] = {}
    for seed in (1, 1, 2):
        order = only(profile(MockExecutor(), repetitions=20, seed=seed, n_gen=["1"]))["config"]["order"]
        pairs = [tuple(order[i : i + 2]) for i in range(0, 40, 2)]
        assert set(pairs) == {("stock", "async"), ("async", "stock")}
        assert orders.setdefault(seed, order) == order
    assert orders[1] != orders[2]


def test_warm_up_runs_every_arm_and_is_thrown_away() -> None:
    executor = MockExecutor()
    slow_start = 1_000_000_000
    executor.noise = lambda arm, n: slow_start if n <= 4 else 0
    outcome = profile(executor)
    modes = [c[1] for c in executor.calls if c[0] == "mode"]
    assert modes[:2] == ["stock", "async"]
    assert len(modes) == 2 + 8
    assert only(outcome)["arms"]["stock"]["tok_s"]["min"] == pytest.approx(1e6 / 1400)
    assert "outliers" not in codes(outcome)


def test_without_warm_up_the_first_run_is_timed() -> None:
    executor = MockExecutor()
    profile(executor, warmup=False)
    assert len([c for c in executor.calls if c[0] == "mode"]) == 8


def test_both_arms_decode_the_same_tokens() -> None:
    executor = MockExecutor()
    seen: list[tuple[int, ...]] = []

    def spy(session: MockSession, n: int) -> None:
        if len(session.history) == 2:
            seen.append(tuple(session.history))

    executor.fault = spy
    profile(executor, warmup=False)
    assert len(seen) == 8
    assert len(set(seen)) == 1


def test_the_model_is_loaded_once_for_all_tests_that_can_share_it() -> None:
    executor = MockExecutor()
    outcome = profile(executor, n_cpu_moe=["2,4"], threads=["1,2"], repetitions=1)
    assert len(executor.loads) == 2
    assert [(t["config"]["n_cpu_moe"], t["config"]["threads"]) for t in outcome.document["tests"]] == [
        (2, 1), (2, 2), (4, 1), (4, 2),
    ]  # fmt: skip
    assert outcome.document["tests"][0]["arms"]["stock"]["readbacks_per_token"] == 4


def test_the_observer_hears_of_every_run() -> None:
    watcher = Watcher()
    profile(MockExecutor(), watcher, repetitions=1, n_prompt=["4"])
    assert watcher.events[0] == "test 1/2 pp4"
    assert [e.split()[0] for e in watcher.events[1:3]] == ["1/4", "2/4"]
    assert watcher.events[3:5] == ["finished", "test 2/2 tg3"]


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_wrong_token_is_found_and_located() -> None:
    order = only(profile(MockExecutor(), warmup=False, repetitions=1))["config"]["order"]
    executor = MockExecutor()
    executor.wrong_at = ("async", 3 if order[0] == "async" else 6)  # its third and last decode
    outcome = profile(executor, warmup=False, repetitions=1)
    assert only(outcome)["identical_logits"] is False
    assert outcome.exit_code is ExitCode.FAILED
    (warn,) = [w for w in outcome.document["warnings"] if w["code"] == "not_identical"]
    assert "decode 3" in warn["message"]
    assert "repetition 1" in warn["message"]


def test_stock_that_does_not_repeat_itself_is_not_blamed_on_the_plug_in() -> None:
    executor = MockExecutor()
    executor.wrong_at = ("stock", 3)
    outcome = profile(executor, warmup=False, arms="stock")
    assert only(outcome)["identical_logits"] is False
    assert "stock_not_deterministic" in codes(outcome)
    assert outcome.exit_code is ExitCode.OK


def test_one_run_alone_proves_no_identity() -> None:
    assert only(profile(MockExecutor(), arms="stock", repetitions=1))["identical_logits"] is None


def test_failure_midway_keeps_the_tests_before_it() -> None:
    executor = MockExecutor()

    def fail(session: MockSession, n: int) -> None:
        if session.config.n_threads == 2:
            raise GgmlAsyncError("the device is lost", "restart it")

    executor.fault = fail
    outcome = profile(executor, threads=["1-3"])
    assert [t["config"]["threads"] for t in outcome.document["tests"]] == [1]
    assert outcome.error is not None
    assert outcome.error.message == "the device is lost"
    assert outcome.exit_code is ExitCode.FAILED
    assert "failed" in codes(outcome)
    assert executor.calls[-1] == ("close",)


@pytest.mark.parametrize("how", ["keyboard", "flag"])
def test_an_interrupt_keeps_finished_repetitions_and_marks_them(how: str) -> None:
    executor = MockExecutor()
    at = 2 * 3 * 2 + 3 * 3 + 2  # in the middle of a run, whatever the order

    def stop(_session: MockSession, n: int) -> None:
        if n == at and how == "keyboard":
            raise KeyboardInterrupt

    executor.fault = stop
    executor.should_stop = lambda: how == "flag" and executor.decodes >= at
    outcome = profile(executor)
    assert outcome.exit_code is ExitCode.INTERRUPTED
    assert outcome.document["interrupted"] is True
    test = only(outcome)
    assert test["interrupted"] is True
    done = len(test["config"]["order"])
    assert 0 < done < 8
    assert sum(len(a["tok_s"]["samples"]) for a in test["arms"].values()) == done
    assert executor.calls[-1] == ("close",)


def test_an_interrupt_before_the_first_run_leaves_no_test() -> None:
    executor = MockExecutor(should_stop=lambda: True)
    outcome = profile(executor)
    assert outcome.document["tests"] == []
    assert outcome.exit_code is ExitCode.INTERRUPTED


def test_a_blind_plug_in_is_exit_code_3() -> None:
    executor = MockExecutor()
    executor.blind = True
    outcome = profile(executor)
    assert outcome.exit_code is ExitCode.NOT_INSTRUMENTED
    assert "nothing_seen" in codes(outcome)


def test_an_outlier_is_named() -> None:
    executor = MockExecutor()
    executor.noise = lambda arm, n: 50 * COMPUTE if n == 30 else (n * 7919 % 13) * 1000
    outcome = profile(executor, repetitions=6)
    (warn,) = [w for w in outcome.document["warnings"] if w["code"] == "outliers"]
    assert "repetition" in warn["message"]
    assert "noisy" in codes(outcome)


def test_declined_readbacks_are_counted_by_reason_and_warned_of() -> None:
    executor = MockExecutor()
    executor.decline = "unpinned"
    outcome = profile(executor)
    assert only(outcome)["arms"]["async"]["declined"] == {"unpinned": 8 * 12}
    assert only(outcome)["arms"]["stock"]["declined"] == {}
    assert codes(outcome) == ["declined"]


# --- nothing to gain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "options", "code"),
    [
        (MockExecutor(expert_layers=[]), {}, "dense"),
        (MockExecutor(), {"n_cpu_moe": ["0"]}, "no_cpu_experts"),
        (MockExecutor(gpu=None), {}, "no_gpu"),
        (MockExecutor(), {"devices": ["none"]}, "no_gpu"),
        (MockExecutor(), {"n_gpu_layers": ["0"]}, "no_gpu"),
        (MockExecutor(gpu=("Mock GPU", False)), {}, "no_async"),
        (MockExecutor(gpu=("llvmpipe (LLVM 15)", True)), {}, "software_device"),
    ],
)
def test_nothing_to_gain_is_said_with_exit_code_0(executor: MockExecutor, options: Any, code: str) -> None:
    outcome = profile(executor, **options)
    assert codes(outcome) == [code]
    assert outcome.exit_code is ExitCode.OK
    assert outcome.warnings[0].hint


# --- the plan ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [("8", [8]), ("1,2", [1, 2]), ("1-3", [1, 2, 3]), ("0-32+16", [0, 16, 32]), ("1-9*3", [1, 3, 9]), ("2-2", [2])],
)
def test_lists_and_ranges_are_as_in_llama_bench(text: str, values: list[int]) -> None:
    assert parse_ints("-n", [text]) == values


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "1-5+0", "1-5*1", "0-5*2", "1-5/2", "-3", "1.5", "99999999999"])
def test_bad_ranges_are_refused_and_the_flag_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"^-n: ") as caught:
        parse_ints("-n", [text])
    assert caught.value.hint


def test_an_absurd_range_is_refused_before_it_fills_memory() -> None:
    with pytest.raises(UsageError, match="more than"):
        parse_ints("-n", ["1-2000000000"])


def test_prompt_and_generation_are_separate_tests_and_pg_is_combined() -> None:
    executor = MockExecutor()
    options = Options(n_prompt=["512"], n_gen=["8,16"], n_pg=["4,2"], n_depth=["7"])
    plan = make_plan(options, model_of(executor), executor.devices())
    assert [c.test for c in plan.configs] == ["pp512 @ d7", "tg8 @ d7", "tg16 @ d7", "pp4+tg2 @ d7"]
    assert [c.n_ctx for c in plan.configs] == [519, 15, 23, 13]


def test_ncmoe_takes_words_and_defaults_to_all_expert_layers_but_to_none_with_ot() -> None:
    model = SimpleNamespace(n_layer=6, expert_layers=lambda: [2, 3, 4, 5])
    devices = MockExecutor().devices()

    def counts(**options: Any) -> list[int]:
        return [c.n_cpu_moe for c in make_plan(Options(**options), model, devices).configs]

    assert counts() == [6]
    assert counts(n_cpu_moe=["half,all,-1,0"]) == [4, 6, 6, 0]
    assert counts(overrides=["exps=CPU"]) == [0]


def test_override_groups_split_at_commas_but_not_inside_a_pattern() -> None:
    known = ["CPU", "Mock0"]
    assert parse_overrides("-ot", ["a=CPU;b=Mock0,c=CPU"], known) == [(("a", "CPU"), ("b", "Mock0")), (("c", "CPU"),)]
    assert parse_overrides("-ot", [r"blk\.[0-9]{1,2}\.x=CPU"], known) == [((r"blk\.[0-9]{1,2}\.x", "CPU"),)]
    assert parse_overrides("-ot", [",a=CPU"], known) == [(), (("a", "CPU"),)]


@pytest.mark.parametrize("text", ["exps", "(=CPU", "exps=GPU7", "=CPU", "a=CPU,b"])
def test_bad_overrides_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^-ot: "):
        parse_overrides("-ot", [text], ["CPU"])


def test_unknown_devices_are_refused_with_the_known_ones() -> None:
    devices = MockExecutor().devices()
    with pytest.raises(UsageError) as caught:
        parse_devices("-dev", ["Vulkan3"], devices)
    assert GPU in caught.value.hint
    assert parse_devices("-dev", ["mock0,none"], devices) == [(GPU,), ()]
    assert default_devices(devices) == (GPU,)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"repetitions": 0}, "-r"),
        ({"n_gen": ["0"]}, "0 tokens"),
        ({"ctx_size": ["16"]}, "too small"),
        ({"n_cpu_moe": ["5"]}, "beyond"),
        ({"arms": "stock,stock"}, "twice"),
        ({"arms": "fast"}, "fast"),
        ({"seed": -1}, "--seed"),
        ({"flash_attn": ["maybe"]}, "-fa"),
        ({"threads": ["0"]}, "-t"),
        ({"n_gen": ["1-9999"], "threads": ["1-9"]}, "more than"),
        ({"n_gen": ["2000000000"], "n_depth": ["2000000000"]}, "more than"),
    ],
)
def test_impossible_plans_are_usage_errors_that_need_no_device(options: Any, word: str) -> None:
    with pytest.raises(UsageError, match=re.escape(word)) as caught:
        check_options(Options(**options), model_of(MockExecutor()))
    assert caught.value.hint
    assert caught.value.exit_code is ExitCode.USAGE


def test_only_the_gpus_own_layers_have_readbacks() -> None:
    executor = MockExecutor()

    def layers(**options: Any) -> list[int]:
        (config,) = make_plan(Options(**options), model_of(executor), executor.devices()).configs
        return cpu_expert_layers(config, executor.expert_layers, executor.n_layer)

    assert layers() == [0, 1, 2, 3]
    assert layers(n_cpu_moe=["2"]) == [0, 1]
    assert layers(n_gpu_layers=["3"]) == [2, 3]  # the output layer is one of the three
    assert layers(n_gpu_layers=["0"]) == []
    assert layers(overrides=[r"blk\.3\.ffn_up_exps=CPU"]) == [3]
    assert layers(overrides=[rf"blk\.3\..*exps={GPU}"], n_cpu_moe=["all"]) == [0, 1, 2]
