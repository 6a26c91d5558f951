"""Text to batches, and logits to perplexity, as llama-perplexity defines both. Pure: no library, no device.

The text is cut into chunks of n_ctx tokens, each decoded from an empty context, its first token replaced by BOS where
the model wants one. Of a chunk the predictions at positions n_ctx/2 to n_ctx-2 are scored: each has half a context
behind it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_async.errors import UsageError
from ggml_async.profile_result import Fingerprint

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

#: The text that comes with the package, written for it.
SHIPPED = "verify.txt"
#: Tokens drawn for a model without a tokenizer.
RANDOM_TOKENS = 4096
RANDOM_SEED = 42


@dataclass(frozen=True)
class Text:
    """What is decoded. `name` is the file's, or the shipped one's, or says that the tokens are random."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Vocab:
    """What a model says of its tokens. `bos` is None where no chunk begins with one."""

    n_vocab: int
    tokenizer: bool
    bos: int | None


def read_text(path: Path | None) -> Text:
    """The user's text, or the one that is shipped.

    Raises UsageError: it cannot be read, or nothing is in it.
    """
    if path is None:
        return Text(f"{SHIPPED} of ggml-async", (resources.files("ggml_async") / "data" / SHIPPED).read_bytes())
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"-f: cannot read {path}: {error.strerror}", "name a text file") from None
    if not data.strip():
        raise UsageError(f"-f: {path} is empty", "name a text file")
    return Text(str(path), data)


def random_tokens(n_vocab: int) -> Tokens:
    """For models without a tokenizer: the same ids every time."""
    return np.random.default_rng(RANDOM_SEED).integers(0, n_vocab, RANDOM_TOKENS, dtype=np.int32)


@dataclass(frozen=True)
class Batch:
    """One decode: token ids, the sequence of each, and for each where it belongs."""

    tokens: Tokens
    sequences: Tokens
    chunks: Tokens  #: number of the chunk (of the prompt's length for prompts)
    positions: Tokens


def n_chunks(n_tokens: int, n_ctx: int, wanted: int) -> int:
    """Chunks of `n_ctx` to decode, `wanted` at most (-1: all).

    Raises UsageError where llama-perplexity refuses too: the text must have two of them.
    """
    if not wanted:
        return 0
    if n_tokens < 2 * n_ctx:
        raise UsageError(
            f"-c {n_ctx} needs a text of at least {2 * n_ctx} tokens, this one has {n_tokens}",
            "give a longer text (-f) or a smaller -c",
        )
    found = n_tokens // n_ctx
    return found if wanted < 0 else min(wanted, found)


def groups(tokens: Tokens, count: int, n_ctx: int, n_batch: int, bos: int | None) -> Iterator[list[Batch]]:
    """The decodes of the first `count` chunks; before each group the context is to be emptied.

    A group is several chunks in one decode, one a sequence, where a batch has room for them, else one chunk in pieces.
    """
    together = max(1, n_batch // n_ctx)
    for first in range(0, count, together):
        members = range(first, min(first + together, count))
        size = min(n_batch, n_ctx)
        batches = []
        for start in range(0, n_ctx, size):
            positions = np.arange(start, min(start + size, n_ctx), dtype=np.int32)
            parts = [tokens[c * n_ctx + positions] for c in members]
            if bos is not None and start == 0:
                for part in parts:
                    part[0] = bos
            batches.append(
                Batch(
                    np.concatenate(parts),
                    np.repeat(np.arange(len(members), dtype=np.int32), len(positions)),
                    np.repeat(np.array(members, np.int32), len(positions)),
                    np.tile(positions, len(members)),
                )
            )
        yield batches


def prompt(tokens: Tokens, length: int, n_batch: int, bos: int | None) -> list[Batch]:
    """The decodes of a prompt of `length` tokens, in pieces of n_batch, and of one token behind it, alone.

    Each length begins elsewhere in the text: what an earlier prompt left in a buffer is never right by chance.
    """
    start = (length * (length - 1) // 2) % max(1, len(tokens) - length)
    ids = np.resize(tokens[start:], length + 1)
    if bos is not None:
        ids[0] = bos
    edges = [*range(0, length, n_batch), length, length + 1]
    return [
        Batch(
            ids[a:b],
            np.zeros(b - a, np.int32),
            np.full(b - a, length, np.int32),
            np.arange(a, b, dtype=np.int32),
        )
        for a, b in itertools.pairwise(edges)
    ]


def fingerprint(logits: Floats) -> Fingerprint:
    """Of one row: equal fingerprints mean equal bits."""
    digest = hashlib.blake2b(np.ascontiguousarray(logits).data, digest_size=16).digest()
    return Fingerprint(digest, bool(np.isfinite(logits).all()))


def scored(position: int, n_ctx: int) -> bool:
    """Whether the prediction at this position of a chunk counts."""
    return n_ctx // 2 <= position < n_ctx - 1


def nll(logits: Floats, token: int) -> float:
    """Negative log-likelihood of `token`: softmax in float32, its sum in float64, as llama-perplexity has it."""
    with np.errstate(invalid="ignore"):  # an infinite logit gives NaN, which the result shows
        shifted = logits - logits.max()
    return math.log(float(np.exp(shifted).sum(dtype=np.float64))) - float(shifted[token])


@dataclass
class Score:
    """Sums over predictions. Add scores to pool them."""

    count: int = 0
    sum: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """One prediction's `nll`."""
        self.count += 1
        self.sum += value
        self.squares += value * value

    def __add__(self, other: Score) -> Score:
        return Score(self.count + other.count, self.sum + other.sum, self.squares + other.squares)

    def perplexity(self) -> float | None:
        """e to the mean nll; None of nothing, or where a logit was not finite."""
        if not self.count or not math.isfinite(self.sum):
            return None
        mean = self.sum / self.count
        return math.exp(mean) if mean < 700 else None

    def error(self) -> float | None:
        """The standard error of the mean nll, times the perplexity; None where there is no such figure."""
        value = self.perplexity()
        if value is None or self.count < 2:
            return None
        variance = self.squares / self.count - (self.sum / self.count) ** 2
        return value * math.sqrt(variance / (self.count - 1)) if variance > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """For the result document."""
        return {"value": self.perplexity(), "error": self.error(), "scored": self.count}


def pooled(scores: Sequence[Score]) -> Score:
    """All of them together: what llama-perplexity prints at the end."""
    return sum(scores, Score())
