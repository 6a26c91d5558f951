"""Chunks and perplexity, against figures worked out by hand and against the definition itself."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_async.errors import UsageError
from ggml_async.verify_text import (
    Batch,
    Score,
    fingerprint,
    groups,
    n_chunks,
    nll,
    pooled,
    prompt,
    random_tokens,
    read_text,
    scored,
)

TOKENS = np.arange(100, 200, dtype=np.int32)


def test_the_shipped_text_is_there_and_long_enough_for_the_default_chunks() -> None:
    text = read_text(None)
    assert 6_000 < len(text.data) < 10_000
    assert text.data.isascii()
    assert len(text.data.split()) > 2 * 512, "two chunks of llama-perplexity's own size"


def test_a_text_that_cannot_be_used_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_text(tmp_path / "none")
    (tmp_path / "empty").write_text("\n ")
    with pytest.raises(UsageError, match="is empty"):
        read_text(tmp_path / "empty")
    (tmp_path / "some").write_text("some")
    assert read_text(tmp_path / "some").data == b"some"


def test_chunks_are_as_many_as_fit_and_two_must_be_there() -> None:
    assert n_chunks(100, 10, -1) == 10
    assert n_chunks(109, 10, -1) == 10
    assert n_chunks(100, 10, 3) == 3
    assert n_chunks(100, 50, 7) == 2
    assert n_chunks(3, 10, 0) == 0
    with pytest.raises(UsageError, match="at least 102 tokens"):
        n_chunks(101, 51, 1)


def rows(batch: Batch) -> list[tuple[int, int, int, int]]:
    return list(
        zip(
            batch.tokens.tolist(),
            batch.sequences.tolist(),
            batch.chunks.tolist(),
            batch.positions.tolist(),
            strict=True,
        )
    )


def test_as_many_chunks_as_fit_a_batch_are_decoded_at_once_each_with_bos() -> None:
    found = list(groups(TOKENS, 3, 4, 9, 1))
    assert [len(g) for g in found] == [1, 1]
    assert rows(found[0][0]) == [
        (1, 0, 0, 0), (101, 0, 0, 1), (102, 0, 0, 2), (103, 0, 0, 3),
        (1, 1, 1, 0), (105, 1, 1, 1), (106, 1, 1, 2), (107, 1, 1, 3),
    ]  # fmt: skip
    assert rows(found[1][0]) == [(1, 0, 2, 0), (109, 0, 2, 1), (110, 0, 2, 2), (111, 0, 2, 3)]
    assert TOKENS[0] == 100, "the text itself stays as it is: its first token is scored, not BOS"


def test_a_chunk_larger_than_a_batch_is_decoded_in_pieces_with_one_bos() -> None:
    (first, second) = groups(TOKENS, 2, 5, 2, 1)
    assert [b.tokens.tolist() for b in first] == [[1, 101], [102, 103], [104]]
    assert [b.positions.tolist() for b in second] == [[0, 1], [2, 3], [4]]
    assert [b.tokens.tolist() for b in second] == [[1, 106], [107, 108], [109]]


def test_without_bos_the_text_is_decoded_as_it_is() -> None:
    ((batch,),) = groups(TOKENS, 1, 6, 6, None)
    assert batch.tokens.tolist() == TOKENS[:6].tolist()


def test_a_prompt_is_its_tokens_in_pieces_and_one_token_alone() -> None:
    batches = prompt(TOKENS, 5, 2, 1)
    assert [b.tokens.tolist() for b in batches] == [[1, 111], [112, 113], [114], [115]]
    assert [b.positions.tolist() for b in batches] == [[0, 1], [2, 3], [4], [5]]
    assert {int(c) for b in batches for c in b.chunks} == {5}


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(2, 400), st.integers(1, 64))
def test_prompts_of_any_length_have_that_many_tokens_and_one_more(length: int, n_tokens: int, n_batch: int) -> None:
    tokens = np.arange(n_tokens, dtype=np.int32)
    batches = prompt(tokens, length, n_batch, None)
    assert sum(len(b.tokens) for b in batches) == length + 1
    assert len(batches[-1].tokens) == 1
    assert all(0 < len(b.tokens) <= n_batch for b in batches)


def test_prompts_of_neighbouring_lengths_begin_at_different_places() -> None:
    tokens = random_tokens(1000)
    starts = [int(prompt(tokens, n, 512, None)[0].tokens[0]) for n in range(2, 129)]
    assert all(a != b for a, b in itertools.pairwise(starts))


def test_the_second_half_of_a_chunk_is_scored_but_for_its_last_position() -> None:
    assert [p for p in range(8) if scored(p, 8)] == [4, 5, 6]
    assert [p for p in range(7) if scored(p, 7)] == [3, 4, 5]


def test_nll_is_that_of_a_softmax() -> None:
    logits = np.log(np.array([1, 2, 5, 2], np.float32))
    assert nll(logits, 2) == pytest.approx(math.log(2))
    assert nll(logits + np.float32(80), 0) == pytest.approx(math.log(10), rel=1e-5)
    assert math.isnan(nll(np.array([0, math.nan], np.float32), 0))


def test_perplexity_and_its_error_are_those_of_the_definition() -> None:
    values = [1.0, 2.0, 4.0, 1.0]
    score = Score()
    for value in values:
        score.add(value)
    mean = np.mean(values)
    assert score.perplexity() == pytest.approx(math.exp(mean))
    # the standard error of the mean with n - 1, times the perplexity
    assert score.error() == pytest.approx(math.exp(mean) * np.std(values) / math.sqrt(3))
    halves = [Score(), Score()]
    for i, value in enumerate(values):
        halves[i % 2].add(value)
    assert pooled(halves) == score


def test_what_is_no_figure_is_none() -> None:
    assert Score().perplexity() is None and Score().error() is None
    one = Score()
    one.add(2.0)
    assert one.perplexity() == pytest.approx(math.e**2) and one.error() is None
    same = Score(4, 8.0, 16.0)
    assert same.error() is None, "llama-perplexity has no error there either"
    bad = Score()
    bad.add(math.nan)
    assert bad.perplexity() is None and bad.as_dict() == {"value": None, "error": None, "scored": 1}
    assert Score(1, 1e6, 1e12).perplexity() is None


def test_a_fingerprint_sees_every_bit() -> None:
    a = np.array([1.0, 0.0], np.float32)
    b = np.array([1.0, -0.0], np.float32)
    assert (a == b).all() and fingerprint(a) != fingerprint(b)
    assert fingerprint(a) == fingerprint(a.copy()) and fingerprint(a).finite
    assert not fingerprint(np.array([math.inf], np.float32)).finite
