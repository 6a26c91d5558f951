"""What a verify run will do: flags as text in, a checked list of configurations out. Nothing here loads or computes.

Flags, lists and defaults are those of ``profile_plan``, but for what llama-perplexity has and llama-bench has not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggml_async.errors import UsageError
from ggml_async.profile_plan import (
    FLASH_ATTN,
    MAX_TESTS,
    DeviceLike,
    LoadKey,
    ModelLike,
    Override,
    cpu_moe_overrides,
    default_threads,
    parse_devices,
    parse_ints,
    parse_overrides,
    parse_words,
)

#: Small: a software device gets through the demo model in minutes. llama-perplexity's own are 512 and all chunks.
DEFAULT_CTX = "128"
DEFAULT_CHUNKS = 2
DEFAULT_PROMPTS = "1-64*2"
DEFAULT_NO_OP_OFFLOAD = "1"


@dataclass(frozen=True)
class Config:
    """One configuration: one row of the report."""

    n_ctx: int  #: tokens of one chunk
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_gpu_layers: int
    n_cpu_moe: int
    overrides: tuple[Override, ...]  #: the user's own (-ot), without those that -ncmoe stands for
    devices: tuple[str, ...]
    flash_attn: str
    no_op_offload: bool

    @property
    def n_seq(self) -> int:
        """Chunks that one decode takes, each as a sequence of its own: as many as fit a batch, as llama-perplexity."""
        return max(1, self.n_batch // self.n_ctx)

    @property
    def label(self) -> str:
        """Names the configuration among others in messages."""
        return f"-ncmoe {self.n_cpu_moe}, -c {self.n_ctx}, -ub {self.n_ubatch}, -t {self.n_threads}"

    def load_key(self) -> LoadKey:
        """The load that it needs: the user's overrides first, so that they win over -ncmoe."""
        return LoadKey(self.n_gpu_layers, self.overrides + cpu_moe_overrides(self.n_cpu_moe), self.devices)


@dataclass(frozen=True)
class Options:
    """The flags as given: text where they take lists, empty where not given."""

    ctx_size: Sequence[str] = ()
    n_batch: Sequence[str] = ()
    n_ubatch: Sequence[str] = ()
    threads: Sequence[str] = ()
    n_gpu_layers: Sequence[str] = ()
    n_cpu_moe: Sequence[str] = ()
    overrides: Sequence[str] = ()
    devices: Sequence[str] = ()
    flash_attn: Sequence[str] = ()
    no_op_offload: Sequence[str] = ()
    chunks: int = DEFAULT_CHUNKS
    prompts: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """Checked: every configuration in it can be tried."""

    configs: tuple[Config, ...]
    chunks: int  #: of text for each; -1: all there are
    prompts: tuple[int, ...]  #: lengths, the longest first
    varied: frozenset[str] = field(default_factory=frozenset)  #: names of Config fields the user set


class _AnyModel:
    """Stands in for a model that was not read yet: nothing is beyond its layers."""

    n_layer = None

    def expert_layers(self) -> list[int]:
        return []


def check_options(options: Options, model: ModelLike | None = None) -> None:
    """All of `make_plan` that needs no device, and without `model` no model: for errors before anything loads."""
    _make(options, model or _AnyModel(), None)


def make_plan(options: Options, model: ModelLike, devices: Sequence[DeviceLike]) -> Plan:
    """Every configuration that `options` ask for, checked against the model and the devices.

    Raises UsageError on the first thing that cannot be.
    """
    return _make(options, model, devices)


def parse_prompts(texts: Sequence[str]) -> tuple[int, ...]:
    """--prompts: llama-bench's lists, ``1..128`` for ``1-128``, or none; each length once, the longest first.

    A shader's work memory then never grows while it is in use, which some drivers do not survive.
    """
    if [t.strip().lower() for t in texts] == ["none"]:
        return ()
    lengths = parse_ints("--prompts", [t.replace("..", "-") for t in texts or [DEFAULT_PROMPTS]], lowest=1)
    return tuple(sorted(set(lengths), reverse=True))


def _make(options: Options, model: ModelLike, devices: Sequence[DeviceLike] | None) -> Plan:
    if options.chunks < -1:
        raise UsageError(f"--chunks: {options.chunks} is no number of chunks", "give 1 or more, -1 for all, 0 for none")
    prompts = parse_prompts(options.prompts)
    if not options.chunks and not prompts:
        raise UsageError("nothing to compare: --chunks 0 and no --prompts", "leave one of them out")
    buffers = None if devices is None else ["CPU", *(d.name for d in devices if d.type != "cpu")]
    product = itertools.product(
        [()] if devices is None else parse_devices("-dev", options.devices or ["auto"], devices),
        parse_ints("-ngl", options.n_gpu_layers or ["all"], words={"all": -1, "-1": -1}),
        _cpu_moe(options, model),
        parse_overrides("-ot", options.overrides, buffers) or [()],
        parse_words("-fa", options.flash_attn or ["auto"], FLASH_ATTN, {"1": "on", "0": "off", "-1": "auto"}),
        parse_words("-nopo", options.no_op_offload or [DEFAULT_NO_OP_OFFLOAD], ("0", "1"), {}),
        parse_ints("-c", options.ctx_size or [DEFAULT_CTX], lowest=4),
        parse_ints("-b", options.n_batch or ["2048"], lowest=1),
        parse_ints("-ub", options.n_ubatch or ["512"], lowest=1),
        parse_ints("-t", options.threads or [str(default_threads())], lowest=1),
    )
    configs: list[Config] = []
    for dev, ngl, moe, ot, fa, nopo, c, b, ub, t in product:
        configs.append(
            Config(
                n_ctx=c, n_batch=b, n_ubatch=min(ub, b), n_threads=t, n_gpu_layers=ngl, n_cpu_moe=moe, overrides=ot,
                devices=dev, flash_attn=fa, no_op_offload=nopo == "1",
            )
        )  # fmt: skip
        if len(configs) > MAX_TESTS:
            raise UsageError(f"these lists give more than {MAX_TESTS} configurations", "shorten one of them")
    return Plan(tuple(configs), options.chunks, prompts, _varied(options))


def _cpu_moe(options: Options, model: ModelLike) -> list[int]:
    layers = model.expert_layers()
    every = layers[-1] + 1 if layers else 0
    half = layers[len(layers) // 2 - 1] + 1 if len(layers) >= 2 else 0
    # -ot alone says where the experts go: adding all of them to it would hide what the user asked for.
    default = "0" if options.overrides else "all"
    words = {"all": every, "half": half, "-1": every}
    counts = parse_ints("-ncmoe", options.n_cpu_moe or [default], words=words)
    for count in counts:
        if model.n_layer is not None and count > model.n_layer:
            message = f"-ncmoe: {count} is beyond the model's {model.n_layer} layers"
            raise UsageError(message, f"give 0 to {model.n_layer}, or all")
    return counts


def _varied(options: Options) -> frozenset[str]:
    given = {
        "n_ctx": options.ctx_size, "n_batch": options.n_batch, "n_ubatch": options.n_ubatch,
        "n_threads": options.threads, "n_gpu_layers": options.n_gpu_layers, "overrides": options.overrides,
        "flash_attn": options.flash_attn, "no_op_offload": options.no_op_offload,
    }  # fmt: skip
    return frozenset(name for name, value in given.items() if value)
