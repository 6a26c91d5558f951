"""The few statistics that reports need: summaries, Student t intervals, ratios of paired runs, outliers.

Everything takes plain floats and returns plain floats, or None where the figure cannot be known (no or too few
samples, a value that is not finite): a figure not measured is never 0. No units are assumed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

#: 97.5 % quantile of Student's t by degrees of freedom (two-sided 95 % intervals); beyond the last, the normal's.
_T975: tuple[tuple[int, float], ...] = (
    (1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (6, 2.4469), (7, 2.3646), (8, 2.3060),
    (9, 2.2622), (10, 2.2281), (11, 2.2010), (12, 2.1788), (13, 2.1604), (14, 2.1448), (15, 2.1314), (16, 2.1199),
    (17, 2.1098), (18, 2.1009), (19, 2.0930), (20, 2.0860), (21, 2.0796), (22, 2.0739), (23, 2.0687), (24, 2.0639),
    (25, 2.0595), (26, 2.0555), (27, 2.0518), (28, 2.0484), (29, 2.0452), (30, 2.0423), (40, 2.0211), (60, 2.0003),
    (120, 1.9799), (1000, 1.9623),
)  # fmt: skip

#: A run counts as an outlier this many robust standard deviations away from the median. Far wider than the textbook's
#: 3.5, which fires by chance in about one of four sets of five undisturbed runs.
OUTLIER_Z = 10.0


def t975(df: int) -> float:
    """97.5 % quantile of Student's t with `df` >= 1 degrees of freedom; between table rows the next lower row, which
    gives the wider interval.
    """
    if df < 1:
        raise ValueError("Student's t needs at least one degree of freedom")
    row = bisect_right(_T975, df, key=lambda r: r[0]) - 1
    return _T975[row][1]


def percentile(values: Sequence[float], q: float) -> float | None:
    """The `q`-th percentile (0 to 100), linear between the two nearest ranks; None without values."""
    if not values:
        return None
    if not 0 <= q <= 100:
        raise ValueError(f"no such percentile: {q}")
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """{mean, p50, p95, p99, max} of `values`, in their unit; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    points = {f"p{q}": percentile(ordered, q) for q in (50, 95, 99)}
    return {"mean": fmean(ordered), **{k: v for k, v in points.items() if v is not None}, "max": ordered[-1]}


def samples(values: Sequence[float]) -> dict[str, Any] | None:
    """{mean, sd, median, min, max, samples}: a figure measured once a repetition. `sd` is None below two samples;
    None as a whole without any.
    """
    if not values:
        return None
    return {
        "mean": fmean(values),
        "sd": sd(values),
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "samples": list(values),
    }


def sd(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None below two values."""
    return stdev(values) if len(values) >= 2 else None


def mean_ci95(values: Sequence[float]) -> tuple[float, float] | None:
    """Two-sided 95 % interval of the mean by Student's t; None below two values."""
    spread = sd(values)
    if spread is None:
        return None
    half = t975(len(values) - 1) * spread / math.sqrt(len(values))
    centre = fmean(values)
    return centre - half, centre + half


def mean_with_ci(values: Sequence[float]) -> dict[str, Any] | None:
    """{mean, ci95: [lo, hi] or None}; None without values."""
    if not values:
        return None
    interval = mean_ci95(values)
    return {"mean": fmean(values), "ci95": list(interval) if interval else None}


def paired_ratio(before: Mapping[int, float], after: Mapping[int, float]) -> dict[str, Any] | None:
    """{ratio, ci95} of after/before over the keys (repetitions) that both have.

    The ratio is the geometric mean of the paired ratios; its interval is Student's t on their logarithms, so that
    after/before and before/after tell the same story. None without a pair; `ci95` is None below two.
    """
    logs = [
        math.log(after[k] / before[k])
        for k in sorted(before.keys() & after.keys())
        if before[k] > 0 and after[k] > 0 and math.isfinite(before[k]) and math.isfinite(after[k])
    ]
    if not logs:
        return None
    interval = mean_ci95(logs)
    return {
        "ratio": math.exp(fmean(logs)),
        "ci95": [math.exp(interval[0]), math.exp(interval[1])] if interval else None,
    }


def modified_z(values: Sequence[float]) -> list[float]:
    """Each value's distance from the median in robust standard deviations (Iglewicz and Hoaglin, 1993).

    Where more than half of the values are equal, the median deviation is 0 and the mean deviation takes its place.
    """
    if not values:
        return []
    centre = median(values)
    deviations = [abs(v - centre) for v in values]
    scale = 1.4826 * median(deviations) or 1.2533 * fmean(deviations)
    return [(v - centre) / scale if scale else 0.0 for v in values]


def outliers(values: Sequence[float]) -> list[int]:
    """Indices of the values that lie OUTLIER_Z robust standard deviations or more off; none below four values."""
    if len(values) < 4:
        return []
    return [i for i, z in enumerate(modified_z(values)) if abs(z) >= OUTLIER_Z]


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity in it replaced by None, so that it is valid JSON. Tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
