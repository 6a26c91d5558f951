"""Statistics against values known from elsewhere."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggml_async import stats

numbers = st.floats(min_value=1e-3, max_value=1e6)


def test_students_t_is_that_of_the_printed_tables() -> None:
    assert stats.t975(1) == pytest.approx(12.706, abs=1e-3)
    assert stats.t975(4) == pytest.approx(2.776, abs=1e-3)
    assert stats.t975(30) == pytest.approx(2.042, abs=1e-3)
    assert stats.t975(35) == stats.t975(30)  # the wider interval between rows
    assert stats.t975(10**6) == pytest.approx(1.96, abs=3e-3)
    with pytest.raises(ValueError):
        stats.t975(0)


def test_percentiles_are_linear_between_ranks_like_numpys() -> None:
    assert stats.percentile([4, 1, 3, 2], 50) == 2.5
    assert stats.percentile([1, 2, 3, 4, 5], 95) == pytest.approx(4.8)
    assert stats.percentile([7], 99) == 7
    assert stats.percentile([], 50) is None
    with pytest.raises(ValueError):
        stats.percentile([1], 101)


def test_interval_of_the_mean_is_the_textbooks() -> None:
    # sd = sqrt(2.5), n = 5: 3 +- 2.7764 * sqrt(2.5 / 5)
    low, high = stats.mean_ci95([1, 2, 3, 4, 5]) or (0, 0)
    assert low == pytest.approx(3 - 1.96322, abs=1e-4)
    assert high == pytest.approx(3 + 1.96322, abs=1e-4)


def test_nothing_is_known_from_too_few_samples() -> None:
    assert stats.summary([]) is None
    assert stats.samples([]) is None
    assert stats.sd([1]) is None
    assert stats.mean_ci95([1]) is None
    assert stats.mean_with_ci([2.0]) == {"mean": 2, "ci95": None}
    assert stats.mean_with_ci([]) is None
    assert (stats.samples([3.0]) or {})["sd"] is None


def test_paired_ratio_is_geometric_and_pairs_by_repetition() -> None:
    found = stats.paired_ratio({0: 100, 1: 200, 2: 1}, {0: 200, 1: 100, 3: 5})
    assert found is not None
    assert found["ratio"] == pytest.approx(1)
    even = stats.paired_ratio({0: 10, 1: 20}, {0: 11, 1: 22})
    assert even == {"ratio": pytest.approx(1.1), "ci95": [pytest.approx(1.1), pytest.approx(1.1)]}
    assert stats.paired_ratio({0: 1}, {1: 1}) is None
    assert stats.paired_ratio({0: 2}, {0: 1}) == {"ratio": 0.5, "ci95": None}
    assert stats.paired_ratio({0: 0}, {0: 1}) is None


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=20))
def test_ratio_tells_the_same_story_both_ways(pairs: list[tuple[float, float]]) -> None:
    a = {i: p[0] for i, p in enumerate(pairs)}
    b = {i: p[1] for i, p in enumerate(pairs)}
    there, back = stats.paired_ratio(a, b), stats.paired_ratio(b, a)
    assert there and back
    assert there["ratio"] == pytest.approx(1 / back["ratio"])
    assert there["ci95"][0] <= there["ratio"] * (1 + 1e-9)
    assert there["ratio"] <= there["ci95"][1] * (1 + 1e-9)


@given(st.lists(numbers, min_size=1))
def test_summary_is_ordered(values: list[float]) -> None:
    found = stats.summary(values)
    assert found
    assert found["p50"] <= found["p95"] * (1 + 1e-9)
    assert found["p95"] <= found["p99"] * (1 + 1e-9)
    assert found["p99"] <= found["max"] * (1 + 1e-9)
    assert min(values) * (1 - 1e-9) <= found["mean"] <= max(values) * (1 + 1e-9)


def test_modified_z_is_iglewicz_and_hoaglins() -> None:
    # median 3, median deviation 1: (100 - 3) / 1.4826
    assert stats.modified_z([1, 2, 3, 4, 100])[4] == pytest.approx(65.42, abs=0.01)
    assert stats.modified_z([5, 5, 5]) == [0, 0, 0]
    assert stats.modified_z([]) == []


def test_outliers_need_four_values_and_a_wide_gap() -> None:
    assert stats.outliers([10, 10.1, 9.9, 10.05, 30]) == [4]
    assert stats.outliers([10, 10.1, 9.9, 10.05, 10.4]) == []
    assert stats.outliers([1, 1.1, 100]) == []


def test_what_is_not_finite_becomes_null() -> None:
    assert stats.finite({"a": [1.0, math.nan, (math.inf,)], "b": "x", "c": 3, "d": True}) == {
        "a": [1.0, None, [None]], "b": "x", "c": 3, "d": True,
    }  # fmt: skip
