"""Ranges by streaming histograms; references are NumPy over all values at once, bounds are widths of bins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tx_export.quantize._static_histogram import BINS, Histogram
from tx_export.quantize._static_ranges import METHODS, Range, find, read, write

from .graphs import Array, normal


def values(seed: int = 0, count: int = 20_000) -> Array:
    """A few far larger than most, and more of them above zero."""
    x = normal(count, seed=seed) * np.exp(normal(count, seed=seed + 1))
    uneven: Array = np.where(x < 0, x / 3, x).astype(np.float32)
    return uneven


def histogram(*batches: Array) -> Histogram:
    found = Histogram()
    for batch in batches:
        found.add(batch)
    return found


def rounded(x: Array, low: float, high: float) -> Array:
    """x in 255 steps over a range that includes zero, float64."""
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    levels: Array = np.clip(np.rint(x.astype(np.float64) / scale) + zero, 0, 255) - zero
    return levels * scale


@pytest.mark.parametrize("order", ["as they come", "reversed", "sorted"])
@pytest.mark.parametrize("batches", [1, 7, 1000])
def test_the_counts_are_those_of_all_values_at_once_in_whatever_order_and_batches(order: str, batches: int) -> None:
    x = values()
    arranged = {
        "as they come": x,
        "reversed": x[::-1],
        "sorted": np.sort(np.abs(x)) * np.sign(x)[np.argsort(np.abs(x))],
    }
    found = histogram(*np.array_split(arranged[order], batches))
    width = 2.0 ** math.ceil(math.log2(np.abs(x).max() / BINS))
    assert found.width == width
    assert np.array_equal(found.counts, np.histogram(x.astype(np.float64), (np.arange(2 * BINS + 1) - BINS) * width)[0])
    assert (found.low, found.high) == (x.min(), x.max())


@pytest.mark.parametrize("extreme", [1e-45, -1e-45, 3.4e38, -3.4e38, 8192.0, -8192.0])
def test_the_smallest_and_the_largest_numbers_are_counted_whatever_comes_behind(extreme: float) -> None:
    one, other = np.array([extreme], np.float32), values(count=50)
    assert np.array_equal(histogram(one, other).counts, histogram(other, one).counts)
    assert histogram(one, other).counts.sum() == 51


def test_a_histogram_does_not_grow() -> None:
    few, many = histogram(values(count=10)), histogram(*(values(seed, 1000) for seed in range(50)))
    assert few.counts.nbytes == many.counts.nbytes == 2 * BINS * 8


def test_minmax_holds_all_values_and_zero() -> None:
    x = values()
    assert find(histogram(x), "minmax", 99.9, False) == Range(x.min(), x.max())
    assert find(histogram(np.abs(x) + 1), "minmax", 99.9, False) == Range(0.0, (np.abs(x) + 1).max())


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.99, 100.0])
def test_a_percentile_is_that_of_all_values_but_for_the_width_of_a_bin(percentile: float) -> None:
    x = values()
    counted = histogram(*np.array_split(x, 13))
    low, high = find(counted, "percentile", percentile, False)
    expected = [
        sign * np.percentile(sign * x.astype(np.float64), percentile, method="inverted_cdf") for sign in (-1, 1)
    ]
    assert 0 <= expected[0] - low <= counted.width and 0 <= high - expected[1] <= counted.width


def test_the_squared_error_is_the_least_of_all_shares_of_the_range() -> None:
    x = values()
    counted = histogram(x)
    low, high = find(counted, "mse", 99.9, False)
    assert x.min() < low < 0 and 0 < high < x.max()  # it cuts off

    def error(low: float, high: float) -> float:
        return float(np.square(rounded(x, low, high) - x).sum())

    # Reference: the errors of the values themselves. A value is half a bin from the middle of its bin at most, which
    # moves the root of the error by no more than half a bin for each value.
    slack = counted.width / 2 * math.sqrt(len(x))
    for end, given in enumerate((low, high)):
        others = [(share * x.min(), high) if end == 0 else (low, share * x.max()) for share in np.arange(1, 129) / 128]
        assert math.sqrt(error(low, high)) <= min(math.sqrt(error(*other)) for other in others) + 2 * slack, given


def test_the_divergence_is_the_least_of_all_shares_of_the_range() -> None:
    """Reference: the divergence of TensorRT, written out bin by bin, for the upper end of values above zero."""
    x = np.abs(values())
    counted = histogram(x)
    seen = counted.counts > 0
    centers, counts = counted.centers[seen], counted.counts[seen]

    def divergence(high: float) -> float:
        levels = np.rint(centers / np.float64(np.float32(high / 255)))
        given = [float(count) for count, level in zip(counts, levels, strict=True) if level <= 255]
        kept = levels[: len(given)]
        spread = [
            sum(g for g, k in zip(given, kept, strict=True) if k == level) / list(kept).count(level) for level in kept
        ]
        given[-1] += counts[len(given) :].sum()
        p, q = np.array(given) / sum(given), np.array(spread) / sum(spread)
        return float((p * np.log(p / q)).sum())

    low, high = find(counted, "entropy", 99.9, False)
    others = [float(np.float32(share * x.max())) for share in (1 / 128, 0.05, 0.1, 0.2, 0.5, 1)]
    assert low == 0 and high < x.max() / 2
    assert divergence(high) <= min(map(divergence, others)) + 1e-12


@pytest.mark.parametrize(
    ("method", "least", "most"), [("minmax", 100, 100), ("percentile", 3.5, 4), ("entropy", 3.5, 5), ("mse", 80, 100)]
)
def test_of_one_outlier_each_method_makes_what_it_says(method: str, least: float, most: float) -> None:
    """Of 100,000 normal values 99.99% are below 3.72; cutting 100 off costs more than all rounding."""
    found = find(histogram(np.append(normal(100_000), np.float32(100))), method, 99.99, False)
    assert least <= found.high <= most and -5 < found.low <= -3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("constant", "held"), [(0.0, 0.0), (5.0, 5.0), (-3.0, -3.0), (1e-44, 0.0)])
def test_a_constant_has_a_scale_and_is_held(method: str, symmetric: bool, constant: float, held: float) -> None:
    counted = histogram(np.full(100, constant, np.float32))
    scale, zero = find(counted, method, 99.9, symmetric).parameters(symmetric)
    assert np.isfinite(scale) and scale > 0
    found = (np.clip(np.rint(np.float32(constant) / scale) + zero, 0, 255) - zero) * scale
    # The end of a range is its last level; a search may put it 1/128 of the value and half a bin aside.
    assert abs(found - held) <= abs(held) * (1 / 128 + 1e-6) + scale / 2


def test_ranges_around_a_middle_have_the_zero_point_128() -> None:
    scale, zero = Range(-2.0, 1.0).parameters(True)
    assert (float(scale), int(zero)) == (float(np.float32(2 / 127)), 128)
    scale, zero = Range(-1.0, 254.0).parameters(False)
    assert (float(scale), int(zero)) == (1.0, 1)


def test_ranges_are_the_same_when_they_are_written_and_read() -> None:
    ranges = {
        "layer_norm": Range(float(np.float32(-0.1)), float(np.float32(1 / 3))),
        "bert/MatMul:0": Range(0.0, float(np.float32(3.4e38))),
        "a b{c}=d,e%20": Range(float(np.float32(-1e-45)), 0.0),
    }
    text = write(ranges)
    assert read(text) == ranges and not set(text) & set("{}=")
    assert read("") == {}


@pytest.mark.parametrize("text", ["x:1", "x:a:b", "x:1:2", "x:-1:-0.5", "x:-inf:0", "x:nan:1"])
def test_ranges_that_cannot_be_read_show_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"^ranges: .*(NAME:LOW:HIGH|finite and includes 0)"):
        read(text)
