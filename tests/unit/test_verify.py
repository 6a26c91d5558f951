"""The engine of verify on a mock executor: what is compared, what is kept, and what each outcome exits with."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from mock_verifier import BOS, N_LAYER, N_VOCAB, Decode, MockVerifier

from ggml_async.errors import ExitCode, GgmlAsyncError
from ggml_async.verify import Outcome, Verifier, tensor_and_layer
from ggml_async.verify_plan import Options, make_plan
from ggml_async.verify_text import Text

TEXT = Text("some text", random.Random(3).randbytes(200))


class Model:
    n_layer = N_LAYER

    def expert_layers(self) -> list[int]:
        return list(range(N_LAYER))


class Watcher:
    """Records what an Observer is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.on_advance: Callable[[], None] = lambda: None

    def test_started(self, index: int, total: int, config: Any) -> None:
        self.told.append(("started", index, total))

    def advanced(self, done: int, total: int, what: str) -> None:
        self.told.append(("advanced", done, total, what))
        self.on_advance()

    def test_finished(self, document: Any, test: Any) -> None:
        self.told.append(("finished", len(document["tests"])))


def verify(executor: MockVerifier, watcher: Watcher | None = None, **options: Any) -> Outcome:
    settings: dict[str, Any] = {"ctx_size": ["8"], "n_batch": ["16"], "threads": ["1"], "prompts": ["3,1"], **options}
    dense = settings.pop("dense", None)
    own = settings.pop("own_text", False)
    plan = make_plan(Options(**settings), Model(), executor.devices())
    return Verifier(
        plan, executor, watcher or Watcher(), TEXT, dense=dense, own_text=own, should_stop=executor.should_stop
    ).execute()


def only(outcome: Outcome) -> dict[str, Any]:
    (test,) = outcome.document["tests"]
    found: dict[str, Any] = test
    return found


def test_equal_arms_with_readbacks_are_exit_0_and_every_position_was_compared() -> None:
    executor, watcher = MockVerifier(), Watcher()
    outcome = verify(executor, watcher, chunks=5)
    test = only(outcome)
    assert outcome.exit_code is ExitCode.OK and outcome.warnings == []
    assert test["identical"] is True and test["difference"] is None
    assert test["positions"] == 5 * 8 + 4 + 2
    # three groups of chunks, then a decode of a prompt and one of the token behind it, twice; two reads a layer
    assert test["readbacks"] == test["readbacks_stock"] == 2 * N_LAYER * (3 + 4)
    assert test["readbacks_by_path"] == {"direct": 56, "bounce": 0, "empty": 0}
    assert (test["chunks"], test["prompts"], test["prompts_identical"]) == (5, 2, 2)
    assert test["perplexity"]["stock"] == test["perplexity"]["async"]
    assert test["perplexity"]["stock"]["scored"] == 5 * 3
    assert [c["chunk"] for c in test["by_chunk"]] == list(range(5))
    assert test["by_chunk"][-1]["so_far"] == test["perplexity"]["stock"]
    assert watcher.told[0] == ("started", 1, 1)
    assert watcher.told[-2:] == [("advanced", 46, 46, "prompt 1"), ("finished", 1)]


def test_async_goes_first_in_contexts_of_its_own() -> None:
    executor = MockVerifier()
    verify(executor, chunks=2)
    assert [c for c in executor.calls if c[0] in ("open", "decode")] == [
        ("open", 16, 2, ("stock", "async")), ("decode", "async", 16), ("decode", "stock", 16),
        ("open", 4, 1, ("stock", "async")),
        ("decode", "async", 3), ("decode", "async", 1), ("decode", "stock", 3), ("decode", "stock", 1),
        ("decode", "async", 1), ("decode", "async", 1), ("decode", "stock", 1), ("decode", "stock", 1),
    ]  # fmt: skip


def test_perplexity_does_not_depend_on_how_chunks_are_batched() -> None:
    def value(batch: str) -> Any:
        return only(verify(MockVerifier(), n_batch=[batch], chunks=4))["perplexity"]["stock"]["value"]

    assert value("3") == value("8") == pytest.approx(value("64"), rel=1e-12)


def test_one_bit_in_one_row_of_a_chunk_is_found_and_located() -> None:
    executor = MockVerifier()
    # the 7th token of chunk 3: its tokens are those of the text from 3 * 8 on, the first being BOS
    history = (BOS, *(byte % N_VOCAB for byte in TEXT.data[3 * 8 : 3 * 8 + 6]))
    executor.wrong = lambda d: d.arm == "async" and d.history == history
    executor.broken = "ffn_moe_gate-2"
    outcome = verify(executor, chunks=-1)
    test = only(outcome)
    assert outcome.exit_code is ExitCode.FAILED
    assert test["identical"] is False and test["positions_different"] == 1
    assert test["difference"] == {
        "chunk": 3, "prompt": None, "position": 6, "layer": 2, "tensor": "ffn_moe_gate", "stock_repeats": True,
    }  # fmt: skip
    (warning,) = outcome.warnings
    assert warning.message == ("async logits differ from stock's: chunk 3, position 6, tensor ffn_moe_gate of layer 2")
    assert test["chunks"] == 25, "the rest is compared all the same"


def test_a_prompt_that_differs_is_named_and_the_others_are_not() -> None:
    executor = MockVerifier()
    executor.wrong = lambda d: d.arm == "async" and d.number > 2 and len(d.history) == 4
    executor.broken = "result_output"
    outcome = verify(executor, chunks=2)
    test = only(outcome)
    assert outcome.exit_code is ExitCode.FAILED
    assert (test["prompts"], test["prompts_identical"], test["prompts_different"]) == (2, 1, [3])
    assert (test["difference"]["prompt"], test["difference"]["position"]) == (3, 3)
    assert (test["difference"]["tensor"], test["difference"]["layer"]) == ("result_output", None)


def test_a_fault_that_callbacks_hide_is_looked_for_at_the_layers_outputs() -> None:
    executor = MockVerifier()
    executor.wrong = lambda d: d.arm == "async" and len(d.history) == 2
    executor.broken, executor.traceable = "ffn_moe_gate-1", False
    found = only(verify(executor, chunks=2))["difference"]
    assert (found["tensor"], found["layer"]) == ("l_out", 1)
    assert [c for c in executor.calls if c[0] == "trace"] == [
        ("trace", "async", None), ("trace", "stock", None), ("trace", "async", "l_out"), ("trace", "stock", "l_out"),
    ]  # fmt: skip


def test_a_fault_that_goes_away_under_callbacks_has_no_tensor_and_still_fails() -> None:
    executor = MockVerifier()
    executor.wrong = lambda d: d.arm == "async" and len(d.history) == 2
    outcome = verify(executor, chunks=2)
    assert outcome.exit_code is ExitCode.FAILED
    assert only(outcome)["difference"]["tensor"] is None
    assert "no tensor can be named" in outcome.warnings[0].message


def test_a_stock_that_does_not_repeat_itself_is_said_and_fails_too() -> None:
    executor = MockVerifier()
    executor.wrong = lambda d: d.arm == "stock" and d.number == 2
    outcome = verify(executor, chunks=2)
    assert outcome.exit_code is ExitCode.FAILED
    assert only(outcome)["difference"]["stock_repeats"] is False
    assert "stock does not repeat itself" in outcome.warnings[0].message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no experts", "no experts on the CPU"),
        ("no gpu", "no GPU in use"),
        ("declined", "all declined (layout)"),
        ("offload", "computes large batches on the GPU"),
    ],
)
def test_nothing_read_back_in_any_configuration_is_exit_3_with_the_reason(case: str, words: str) -> None:
    executor, options = MockVerifier(), {}
    if case == "no experts":
        options["n_cpu_moe"] = ["0"]
    elif case == "no gpu":
        executor.gpu = False
    elif case == "declined":
        executor.decline = "layout"
    else:
        executor.blind = True
        options["no_op_offload"] = ["0"]
    outcome = verify(executor, **options)
    assert outcome.exit_code is ExitCode.NOT_INSTRUMENTED
    assert only(outcome)["readbacks"] == 0 and only(outcome)["identical"] is True
    (warning,) = outcome.warnings
    assert words in warning.message and warning.hint


def test_nothing_read_back_in_some_configurations_is_no_failure_and_to_be_expected_without_experts() -> None:
    outcome = verify(MockVerifier(), n_cpu_moe=["0,2"])
    assert outcome.exit_code is ExitCode.OK and outcome.warnings == []
    assert [t["readbacks"] > 0 for t in outcome.document["tests"]] == [False, True]
    assert outcome.document["perplexity_spread"] == 1.0


def test_a_difference_outranks_that_nothing_was_read_back() -> None:
    executor = MockVerifier()
    executor.wrong = lambda d: d.arm == "async"
    assert verify(executor, n_cpu_moe=["0"]).exit_code is ExitCode.FAILED


def test_the_dense_model_comes_first_once_for_each_size_of_chunk() -> None:
    executor = MockVerifier()
    outcome = verify(executor, ctx_size=["8,16"], n_cpu_moe=["1,2"], dense="dense.gguf", chunks=2)
    loads = [c for c in executor.calls if c[0] in ("load", "load_dense")]
    assert loads[0] == ("load_dense",) and loads.count(("load_dense",)) == 1
    opened = [c for c in executor.calls if c[0] == "open"]
    assert opened[:2] == [("open", 16, 2, ("stock",)), ("open", 16, 1, ("stock",))]
    assert {arms for *_, arms in opened[2:]} == {("stock", "async")}
    assert len(outcome.document["tests"]) == 4
    for test in outcome.document["tests"]:
        assert test["reference"]["ratio"] == 1.0
        assert test["reference"]["value"] == test["perplexity"]["stock"]["value"]
    assert outcome.warnings == []


def test_a_model_that_is_not_its_dense_original_is_a_warning() -> None:
    executor = MockVerifier()
    executor.shift = 9.0
    outcome = verify(executor, dense="dense.gguf", chunks=4)
    assert outcome.exit_code is ExitCode.OK
    assert [w.code for w in outcome.warnings] == ["reference_far"]
    assert only(outcome)["reference"]["ratio"] > 1.05


def test_perplexity_that_is_not_flat_is_a_warning() -> None:
    executor = MockVerifier()

    class Drifting(MockVerifier):
        def load(self, key: Any) -> None:
            super().load(key)
            self.shift = float(len(key.overrides))

    executor = Drifting()
    outcome = verify(executor, n_cpu_moe=["1,4"], chunks=4)
    assert [w.code for w in outcome.warnings] == ["not_flat"]
    assert outcome.document["perplexity_spread"] > 1.05


def test_logits_that_are_not_finite_are_said_and_give_no_perplexity() -> None:
    executor = MockVerifier()
    executor.shift = float("nan")
    outcome = verify(executor, chunks=2)
    test = only(outcome)
    assert test["identical"] is True and test["finite"] is False
    assert test["perplexity"]["stock"] == {"value": None, "error": None, "scored": 6}
    assert [w.code for w in outcome.warnings] == ["not_finite"]


def test_a_model_without_a_tokenizer_gets_random_tokens_unless_a_text_was_given() -> None:
    executor = MockVerifier()
    executor.tokenizer = False
    outcome = verify(executor)
    assert outcome.exit_code is ExitCode.OK
    assert outcome.document["text"] == {"name": "random tokens", "bytes": 200, "tokens": 4096}
    assert [w.code for w in outcome.warnings] == ["no_tokenizer"]
    outcome = verify(executor, own_text=True)
    assert outcome.exit_code is ExitCode.USAGE
    assert outcome.error is not None and "no tokenizer" in outcome.error.message


def test_a_text_too_short_for_a_chunk_is_a_usage_error() -> None:
    outcome = verify(MockVerifier(), ctx_size=["150"], n_batch=["150"])
    assert outcome.exit_code is ExitCode.USAGE
    assert outcome.error is not None and "at least 300 tokens" in outcome.error.message
    assert outcome.document["tests"] == []


def test_an_interrupt_keeps_what_was_compared_and_marks_it() -> None:
    stop: list[bool] = []
    executor, watcher = MockVerifier(lambda: bool(stop)), Watcher()

    def after_two_groups() -> None:
        if len([t for t in watcher.told if t[0] == "advanced"]) == 2:
            stop.append(True)

    watcher.on_advance = after_two_groups
    outcome = verify(executor, watcher, chunks=-1, n_cpu_moe=["1,2"])
    assert outcome.exit_code is ExitCode.INTERRUPTED
    assert outcome.document["interrupted"] is True
    test = only(outcome)
    assert test["interrupted"] is True and test["identical"] is True
    assert (test["chunks"], test["chunks_asked"], test["positions"], test["prompts"]) == (4, 25, 32, 0)


def test_a_second_interrupt_in_the_middle_of_a_decode_keeps_what_was_compared_too() -> None:
    executor = MockVerifier()

    def interrupt(number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt

    executor.fault = interrupt
    outcome = verify(executor, chunks=-1)
    assert outcome.exit_code is ExitCode.INTERRUPTED
    assert only(outcome)["chunks"] == 4


def test_a_decode_that_fails_keeps_the_configurations_before_it() -> None:
    executor = MockVerifier()

    def fail(number: int) -> None:
        if number > 10:
            raise GgmlAsyncError("llama_decode failed with code -3", "see the log")

    executor.fault = fail
    outcome = verify(executor, chunks=2, n_cpu_moe=["1,2"])
    assert outcome.exit_code is ExitCode.FAILED
    assert outcome.error is not None and outcome.error.message == "llama_decode failed with code -3"
    assert [t["interrupted"] for t in outcome.document["tests"]] == [False]
    assert outcome.warnings[0].message.startswith("configuration 2 (-ncmoe 2")


def test_configurations_that_share_a_load_run_together() -> None:
    executor = MockVerifier()
    outcome = verify(executor, n_cpu_moe=["1,2"], n_ubatch=["4,8"])
    assert [t["config"]["n_cpu_moe"] for t in outcome.document["tests"]] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ffn_moe_topk-12", ("ffn_moe_topk", 12)),
        ("Qcur-3 (reshaped)", ("Qcur", 3)),
        ("result_output", ("result_output", None)),
        ("cache_k_l3 (view)", ("cache_k_l3 (view)", None)),
        ("", ("", None)),
    ],
)
def test_names_of_tensors_end_in_their_layer(name: str, expected: tuple[str, int | None]) -> None:
    assert tensor_and_layer(name) == expected


def test_an_unnamed_tensor_belongs_to_the_layer_of_the_next_named_one() -> None:
    assert tensor_and_layer("node_78", ["node_79", "cache_v_l1", "ffn_inp-1", "l_out-2"]) == ("node_78", 1)
    assert tensor_and_layer("node_90", ["result_output"]) == ("node_90", None)
    assert tensor_and_layer("result_norm", ["l_out-2"]) == ("result_norm", None)


def test_the_mock_sees_the_history_it_was_given() -> None:
    """The faults above rest on it."""
    seen: list[Decode] = []
    executor = MockVerifier()
    executor.wrong = lambda d: bool(seen.append(d))
    verify(executor, chunks=1, prompts=["none"])
    assert [len(d.history) for d in seen] == [*range(1, 9)] * 2
    assert {d.history[0] for d in seen} == {BOS}
