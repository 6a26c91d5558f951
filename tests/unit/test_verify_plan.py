"""From flags to configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from ggml_async.errors import UsageError
from ggml_async.verify_plan import Options, check_options, make_plan, parse_prompts


class Model:
    n_layer = 6

    def expert_layers(self) -> list[int]:
        return [1, 2, 3, 4, 5]


class Device(NamedTuple):
    name: str
    description: str
    type: str


DEVICES = [Device("Vulkan0", "a GPU", "gpu"), Device("CPU", "a CPU", "cpu")]


def plan(**options: Any) -> Any:
    return make_plan(Options(**options), Model(), DEVICES)


def test_the_default_is_one_configuration_with_all_experts_on_the_cpu_and_their_products_there_too() -> None:
    (config,) = plan().configs
    assert (config.n_ctx, config.n_batch, config.n_ubatch, config.n_cpu_moe) == (128, 2048, 512, 6)
    assert config.devices == ("Vulkan0",) and config.no_op_offload and config.n_seq == 16
    assert plan().chunks == 2 and plan().prompts == (64, 32, 16, 8, 4, 2, 1)
    assert plan().varied == frozenset()


def test_lists_multiply_and_what_was_given_is_shown() -> None:
    found = plan(n_cpu_moe=["0,half,all"], n_ubatch=["32,512"], threads=["1-2"], no_op_offload=["0,1"], n_batch=["64"])
    assert len(found.configs) == 3 * 2 * 2 * 2
    assert {c.n_cpu_moe for c in found.configs} == {0, 3, 6}
    assert {c.n_ubatch for c in found.configs} == {32, 64}, "never more than a batch"
    assert found.varied == {"n_ubatch", "n_threads", "no_op_offload", "n_batch"}


def test_overrides_alone_say_where_experts_go() -> None:
    (config,) = plan(overrides=["exps=CPU"]).configs
    assert config.n_cpu_moe == 0
    assert config.load_key().overrides == (("exps", "CPU"),)


@pytest.mark.parametrize(
    ("texts", "lengths"),
    [
        (["1..4"], (4, 3, 2, 1)),
        (["1-4", "3,9"], (9, 4, 3, 2, 1)),
        (["1..128"], tuple(range(128, 0, -1))),
        (["none"], ()),
        ([], (64, 32, 16, 8, 4, 2, 1)),
    ],
)
def test_prompt_lengths_come_once_each_from_the_longest_down(texts: Sequence[str], lengths: tuple[int, ...]) -> None:
    assert parse_prompts(texts) == lengths


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunks": -2}, "--chunks: -2"),
        ({"chunks": 0, "prompts": ["none"]}, "nothing to compare"),
        ({"prompts": ["0"]}, "--prompts: 0 is below 1"),
        ({"prompts": ["a"]}, "--prompts: 'a'"),
        ({"ctx_size": ["3"]}, "-c: 3 is below 4"),
        ({"n_batch": ["0"]}, "-b: 0"),
        ({"no_op_offload": ["2"]}, "-nopo"),
        ({"n_cpu_moe": ["7"]}, "beyond the model's 6 layers"),
        ({"threads": ["1-20000"]}, "-t"),
        ({"threads": ["1-200"], "n_ubatch": ["1-200"]}, "configurations"),
    ],
)
def test_what_cannot_be_is_one_usage_error_before_anything_loads(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as error:
        check_options(Options(**options), Model())
    assert words in error.value.message
    assert error.value.hint


def test_an_unknown_device_or_buffer_is_a_usage_error_once_devices_are_known() -> None:
    for options in ({"devices": ["Vulkan7"]}, {"overrides": ["exps=Vulkan7"]}):
        check_options(Options(**options))
        with pytest.raises(UsageError, match="Vulkan7"):
            plan(**options)
