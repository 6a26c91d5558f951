"""What a profile run will do: flags as text in, a checked list of tests out. Nothing here loads or measures.

Lists, ranges and the product of them follow llama-bench: prompt tests (-p), generation tests (-n) and combined ones
(-pg) are separate tests, every other flag multiplies them.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import psutil

from ggml_async.errors import UsageError

#: Arms in the order in which reports show them. `off` is there to price the recording itself.
ARMS = ("stock", "async", "off")
DEFAULT_SEED = 42
DEFAULT_N_GEN = "32"
DEFAULT_N_PROMPT = "0"
DEFAULT_REPETITIONS = 5
FLASH_ATTN = ("auto", "on", "off")
FORMATS = ("md", "csv", "json", "jsonl", "sql")
#: A list of tests longer than this is a slip of the keyboard (1-1000000), not a plan.
MAX_TESTS = 10_000
MAX_REPETITIONS = 100_000
_INT_MAX = 2**31 - 1

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?\Z")

Override = tuple[str, str]  #: (tensor name pattern, buffer type: "CPU" or a device's name)
T = TypeVar("T")


class ModelLike(Protocol):
    """What a plan must know of the model file; ``gguf_file.GgufFile`` has it."""

    @property
    def n_layer(self) -> int | None:
        """Layers, None where the file does not say."""

    def expert_layers(self) -> list[int]:
        """Layers that hold expert tensors, ascending."""


class DeviceLike(Protocol):
    """What a plan must know of a device; ``llama.Device`` has it."""

    @property
    def name(self) -> str:
        """As in -dev and -ot: Vulkan0, CUDA0, CPU."""

    @property
    def description(self) -> str:
        """The product's name."""

    @property
    def type(self) -> str:
        """cpu, gpu, igpu, accel or meta."""


@dataclass(frozen=True)
class LoadKey:
    """What needs the model to be loaded anew when it changes."""

    n_gpu_layers: int  #: -1: all
    overrides: tuple[Override, ...]  #: first match wins
    devices: tuple[str, ...]  #: names; empty: no GPU


@dataclass(frozen=True)
class Config:
    """One test: one row of the report."""

    n_prompt: int
    n_gen: int
    n_depth: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_ctx: int
    n_gpu_layers: int
    n_cpu_moe: int
    overrides: tuple[Override, ...]  #: the user's own (-ot), without those that -ncmoe stands for
    devices: tuple[str, ...]
    flash_attn: str
    repetitions: int
    seed: int

    @property
    def test(self) -> str:
        """llama-bench's name of the test: pp512, tg32, pp512+tg32, with @ d512 after it."""
        parts = [f"{kind}{n}" for kind, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def label(self) -> str:
        """Names the test among others in messages."""
        return f"{self.test}, -ncmoe {self.n_cpu_moe}, -t {self.n_threads}"

    @property
    def n_tokens(self) -> int:
        """Timed tokens of one repetition."""
        return self.n_prompt + self.n_gen

    def load_key(self) -> LoadKey:
        """The load that this test needs: the user's overrides first, so that they win over -ncmoe."""
        return LoadKey(self.n_gpu_layers, self.overrides + cpu_moe_overrides(self.n_cpu_moe), self.devices)


@dataclass(frozen=True)
class Options:
    """The flags as given: text where llama-bench takes lists, None or empty where not given."""

    n_prompt: Sequence[str] = ()
    n_gen: Sequence[str] = ()
    n_pg: Sequence[str] = ()
    n_depth: Sequence[str] = ()
    n_batch: Sequence[str] = ()
    n_ubatch: Sequence[str] = ()
    threads: Sequence[str] = ()
    ctx_size: Sequence[str] = ()
    n_gpu_layers: Sequence[str] = ()
    n_cpu_moe: Sequence[str] = ()
    overrides: Sequence[str] = ()
    devices: Sequence[str] = ()
    flash_attn: Sequence[str] = ()
    repetitions: int = DEFAULT_REPETITIONS
    seed: int = DEFAULT_SEED
    arms: str = "stock,async"
    warmup: bool = True


@dataclass(frozen=True)
class Plan:
    """Checked: every test in it can be tried."""

    configs: tuple[Config, ...]
    arms: tuple[str, ...]
    warmup: bool
    varied: frozenset[str] = field(default_factory=frozenset)  #: names of Config fields the user set or varied


def default_threads() -> int:
    """Physical cores that this process may use, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def parse_ints(flag: str, texts: Iterable[str], *, lowest: int = 0, words: dict[str, int] | None = None) -> list[int]:
    """Integers from llama-bench's lists: ``1,2``, ``1-4``, ``0-32+8``, ``1-64*2``, repeats of the flag, and `words`.

    Raises UsageError naming `flag` and the part that is wrong.
    """
    words = words or {}
    found: list[int] = []
    for part in itertools.chain.from_iterable(text.split(",") for text in texts):
        item = part.strip()
        if item.lower() in words:
            found.append(words[item.lower()])
            continue
        match = _RANGE.match(item)
        if not match:
            named = "".join(f", {w}" for w in words)
            raise UsageError(
                f"{flag}: '{item}' is no number, list or range",
                f"use 8 or 4,8 or 1-4 or 0-32+8 or 1-64*2{named}",
            )
        found.extend(_expand(flag, item, match))
        if len(found) > MAX_TESTS:
            raise UsageError(f"{flag}: '{item}' gives more than {MAX_TESTS} values", "use a larger step")
    for value in found:
        if value < lowest and value not in words.values():
            raise UsageError(f"{flag}: {value} is below {lowest}", f"give {lowest} or more")
        if value > _INT_MAX:
            raise UsageError(f"{flag}: {value} is too large", "llama.cpp takes 31 bits")
    return found


def _expand(flag: str, item: str, match: re.Match[str]) -> list[int]:
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    step = int(match[4]) if match[4] else 1
    multiply = match[3] == "*"
    if last < first:
        raise UsageError(f"{flag}: the range '{item}' ends before it starts", f"write {last}-{first}")
    values: list[int] = []
    value = first
    while value <= last and len(values) <= MAX_TESTS:
        values.append(value)
        following = value * step if multiply else value + step
        if following <= value:
            raise UsageError(f"{flag}: the range '{item}' never ends", "use a step that makes the value grow")
        value = following
    return values


def parse_pairs(flag: str, texts: Iterable[str]) -> list[tuple[int, int]]:
    """-pg: ``512,128`` a pair of prompt and generated tokens, one pair a flag."""
    pairs: list[tuple[int, int]] = []
    for text in texts:
        match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text)
        if not match:
            raise UsageError(f"{flag}: '{text}' is no pair", "use 512,128: prompt tokens, generated tokens")
        pairs.append((int(match[1]), int(match[2])))
    return pairs


def parse_overrides(flag: str, texts: Iterable[str], buffer_types: Sequence[str] | None) -> list[tuple[Override, ...]]:
    """-ot: ``pattern=BUFT;pattern=BUFT`` is one test's overrides; a comma or another flag starts the next test's.

    An empty group means no overrides. A comma inside a pattern ("{1,2}") does not split.
    Raises UsageError for a missing "=", a pattern that is no regular expression, or an unknown buffer type (with
    `buffer_types` None, any is known).
    """
    groups: list[tuple[Override, ...]] = []
    for text in texts:
        pending = ""
        for piece in text.split(","):
            group = f"{pending},{piece}" if pending else piece
            if group and "=" not in group:
                pending = group
                continue
            pending = ""
            groups.append(tuple(_override(flag, one, buffer_types) for one in group.split(";") if one.strip()))
        if pending:
            raise UsageError(f"{flag}: '{pending}' has no '='", "use PATTERN=BUFFER, as in exps=CPU")
    return groups


def _override(flag: str, text: str, buffer_types: Sequence[str] | None) -> Override:
    pattern, equals, buft = text.strip().rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"{flag}: '{text}' has no '=' behind a pattern", "use PATTERN=BUFFER, as in exps=CPU")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{flag}: '{pattern}' is no regular expression: {error}", r"as in blk\.[0-9]+\.ffn_.*_exps=CPU"
        ) from None
    if buffer_types is not None and buft not in buffer_types:
        raise UsageError(f"{flag}: there is no buffer type '{buft}'", f"there are: {', '.join(buffer_types)}")
    return pattern, buft


def parse_devices(flag: str, texts: Iterable[str], devices: Sequence[DeviceLike]) -> list[tuple[str, ...]]:
    """-dev: ``A/B`` is one test's devices, a comma starts the next test's; ``none``: CPU only; ``auto``: first GPU."""
    known = {d.name.lower(): d.name for d in devices if d.type != "cpu"}
    groups: list[tuple[str, ...]] = []
    for group in itertools.chain.from_iterable(text.split(",") for text in texts):
        word = group.strip().lower()
        if word in ("none", "auto"):
            groups.append(() if word == "none" else default_devices(devices))
            continue
        names: list[str] = []
        for name in group.split("/"):
            if name.strip().lower() not in known:
                there = ", ".join(known.values()) or "none but the CPU"
                raise UsageError(f"{flag}: there is no device '{name.strip()}'", f"there are: {there}")
            names.append(known[name.strip().lower()])
        if len(set(names)) < len(names):
            raise UsageError(f"{flag}: '{group}' names a device twice", "name each once")
        groups.append(tuple(names))
    return groups


def default_devices(devices: Sequence[DeviceLike]) -> tuple[str, ...]:
    """The first GPU, else the first integrated one, else none."""
    for kind in ("gpu", "igpu"):
        for device in devices:
            if device.type == kind:
                return (device.name,)
    return ()


def parse_words(flag: str, texts: Iterable[str], known: Sequence[str], aliases: dict[str, str]) -> list[str]:
    """A list of words, each one of `known` or an alias of one."""
    found: list[str] = []
    for part in itertools.chain.from_iterable(text.split(",") for text in texts):
        word = aliases.get(part.strip().lower(), part.strip().lower())
        if word not in known:
            raise UsageError(f"{flag}: there is no '{part.strip()}'", f"use one of: {', '.join(known)}")
        found.append(word)
    return found


def parse_arms(text: str) -> tuple[str, ...]:
    """--arms: which of stock, async and off to measure, each once."""
    arms = parse_words("--arms", [text], ARMS, {})
    if len(set(arms)) < len(arms):
        raise UsageError(f"--arms: '{text}' names an arm twice", "for a control run use --arms stock -r 10")
    return tuple(a for a in ARMS if a in arms)


def cpu_moe_overrides(n_cpu_moe: int) -> tuple[Override, ...]:
    """What -ncmoe N stands for, as llama.cpp has it: the expert tensors of the first N layers in CPU memory."""
    return tuple((rf"blk\.{i}\.ffn_(up|down|gate|gate_up)_(ch|)exps", "CPU") for i in range(n_cpu_moe))


def cpu_expert_layers(config: Config, expert_layers: Sequence[int], n_layer: int) -> list[int]:
    """Layers that compute on a GPU but have experts in CPU memory: each has readbacks.

    `expert_layers` are the model's. The last -ngl layers (plus the output) are the GPU's, as in llama.cpp.
    """
    if not config.devices or config.n_gpu_layers == 0:
        return []
    first = 0 if config.n_gpu_layers < 0 else max(n_layer + 1 - config.n_gpu_layers, 0)
    overrides = config.load_key().overrides

    def on_cpu(layer: int) -> bool:
        for kind in ("up", "down", "gate", "gate_up"):
            for chunked in ("", "ch"):
                name = f"blk.{layer}.ffn_{kind}_{chunked}exps.weight"
                target = next((buft for pattern, buft in overrides if re.search(pattern, name)), "")
                if target == "CPU":
                    return True
        return False

    return [layer for layer in expert_layers if layer >= first and on_cpu(layer)]


class _AnyModel:
    """Stands in for a model that was not read yet: nothing is beyond its layers."""

    n_layer = None

    def expert_layers(self) -> list[int]:
        return []


def check_options(options: Options, model: ModelLike | None = None) -> None:
    """All of `make_plan` that needs no device, and without `model` no model: for errors before anything loads."""
    _make(options, model or _AnyModel(), None)


def make_plan(options: Options, model: ModelLike, devices: Sequence[DeviceLike]) -> Plan:
    """Every test that `options` ask for, checked against the model and the devices.

    Raises UsageError on the first thing that cannot be.
    """
    return _make(options, model, devices)


def _make(options: Options, model: ModelLike, devices: Sequence[DeviceLike] | None) -> Plan:
    if not 1 <= options.repetitions <= MAX_REPETITIONS:
        raise UsageError(f"-r: {options.repetitions} repetitions measure nothing", f"give 1 to {MAX_REPETITIONS}")
    if not 0 <= options.seed < 2**63:
        raise UsageError(f"--seed: {options.seed} is out of range", "give 0 to 2^63 - 1")
    arms = parse_arms(options.arms)
    buffers = None if devices is None else ["CPU", *(d.name for d in devices if d.type != "cpu")]
    groups = [()] if devices is None else parse_devices("-dev", options.devices or ["auto"], devices)
    rest = itertools.product(
        groups,
        parse_ints("-ngl", options.n_gpu_layers or ["all"], words={"all": -1, "-1": -1}),
        _cpu_moe(options, model),
        parse_overrides("-ot", options.overrides, buffers) or [()],
        parse_words("-fa", options.flash_attn or ["auto"], FLASH_ATTN, {"1": "on", "0": "off", "-1": "auto"}),
        parse_ints("-b", options.n_batch or ["2048"], lowest=1),
        parse_ints("-ub", options.n_ubatch or ["512"], lowest=1),
        parse_ints("-t", options.threads or [str(default_threads())], lowest=1),
        parse_ints("-d", options.n_depth or ["0"]),
        parse_ints("-c", options.ctx_size or ["0"]),
    )
    configs: list[Config] = []
    for (dev, ngl, moe, ot, fa, b, ub, t, d, c), (p, n) in itertools.product(rest, _sizes(options)):
        configs.append(
            Config(
                n_prompt=p, n_gen=n, n_depth=d, n_batch=b, n_ubatch=min(ub, b), n_threads=t,
                n_ctx=_context(c, p + n + d), n_gpu_layers=ngl, n_cpu_moe=moe, overrides=ot, devices=dev,
                flash_attn=fa, repetitions=options.repetitions, seed=options.seed,
            )
        )  # fmt: skip
        if len(configs) > MAX_TESTS:
            raise UsageError(f"these lists give more than {MAX_TESTS} tests", "shorten one of them")
    return Plan(tuple(configs), arms, options.warmup, _varied(options))


def _sizes(options: Options) -> list[tuple[int, int]]:
    """(prompt, generated) tokens of every test, in llama-bench's order; those of no tokens are dropped."""
    prompts = parse_ints("-p", options.n_prompt or [DEFAULT_N_PROMPT])
    # As in llama-bench a flag for one kind of test does not switch the other kind off.
    gens = parse_ints("-n", options.n_gen or [DEFAULT_N_GEN])
    pairs = parse_pairs("-pg", options.n_pg)
    sizes = [(p, 0) for p in prompts] + [(0, n) for n in gens] + pairs
    sizes = [s for s in sizes if sum(s)]
    if not sizes:
        raise UsageError("0 tokens to measure", "give -n 32, or -p 512, or -pg 512,32")
    return sizes


def _cpu_moe(options: Options, model: ModelLike) -> list[int]:
    layers = model.expert_layers()
    every = layers[-1] + 1 if layers else 0
    half = layers[len(layers) // 2 - 1] + 1 if len(layers) >= 2 else 0
    words = {"all": every, "half": half, "-1": every}
    # -ot alone says where the experts go: adding all of them to it would hide what the user asked for.
    default = "0" if options.overrides else "all"
    counts = parse_ints("-ncmoe", options.n_cpu_moe or [default], words=words)
    n_layer = model.n_layer
    for count in counts:
        if n_layer is not None and count > n_layer:
            raise UsageError(f"-ncmoe: {count} is beyond the model's {n_layer} layers", f"give 0 to {n_layer}, or all")
    return counts


def _context(given: int, needed: int) -> int:
    if given and given < needed:
        message = f"-c: a context of {given} is too small for {needed} tokens (-p + -n + -d)"
        raise UsageError(message, f"give -c {needed} or leave it out")
    if needed > _INT_MAX:
        raise UsageError(f"{needed} tokens (-p + -n + -d) are more than llama.cpp can take", "give fewer")
    return given or needed


def _varied(options: Options) -> frozenset[str]:
    given = {
        "n_threads": options.threads, "n_ctx": options.ctx_size, "n_batch": options.n_batch,
        "n_ubatch": options.n_ubatch, "n_gpu_layers": options.n_gpu_layers, "overrides": options.overrides,
        "flash_attn": options.flash_attn,
    }  # fmt: skip
    return frozenset(name for name, value in given.items() if value)


def order_of_runs(config: Config, arms: Sequence[str], index: int) -> list[tuple[int, str]]:
    """(repetition, arm) in the order to run: every repetition has each arm once, in an order drawn anew from the seed.

    `index` is the test's place in the plan, so that tests differ while the whole run repeats exactly.
    """
    rng = random.Random(f"{config.seed}/{index}")
    order: list[tuple[int, str]] = []
    for repetition in range(config.repetitions):
        shuffled = list(arms)
        rng.shuffle(shuffled)
        order.extend((repetition, arm) for arm in shuffled)
    return order


def grouped(configs: Sequence[T], key: Callable[[T], object]) -> list[T]:
    """`configs` with equal keys next to each other, groups and members in their first order: each load happens once."""
    groups: dict[object, list[T]] = {}
    for config in configs:
        groups.setdefault(key(config), []).append(config)
    return [config for group in groups.values() for config in group]
