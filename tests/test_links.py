"""The α–β fit finds the link that made the times, with one bend or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.predict.links import Link, Segment, fit_link

SIZES = [2**i for i in range(10, 27)]


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12))
def test_exact_times_give_back_their_link(alpha, bandwidth):
    link = fit_link(SIZES, [alpha + size / bandwidth for size in SIZES])
    for size in (3_000, 5_000_000, 2**28):
        assert link.seconds(size) == pytest.approx(alpha + size / bandwidth, rel=1e-6)


def test_a_change_of_algorithm_becomes_a_second_segment():
    def seconds(size):
        return 20e-6 + size / 2e8 if size < 2**17 else 300e-6 + size / 2e9

    link = fit_link(SIZES, [seconds(size) for size in SIZES])
    assert len(link.segments) == 2
    assert link.alpha == pytest.approx(20e-6, rel=1e-3)
    assert link.bandwidth == pytest.approx(2e9, rel=1e-3)
    assert link.seconds(2**25 + 1) == pytest.approx(seconds(2**25 + 1), rel=1e-3)


def test_noise_alone_makes_no_second_segment():
    wobble = [1.1, 0.9, 1.05, 0.95, 1.0, 1.08, 0.93] * 3
    link = fit_link(SIZES, [(1e-4 + size / 1e9) * factor for size, factor in zip(SIZES, wobble, strict=False)])
    assert len(link.segments) == 1
    assert 0.02 < link.error < 0.12


def test_flat_times_have_no_negative_parts():
    link = fit_link([1, 10, 100], [3e-4, 2.9e-4, 2.8e-4])
    assert link.alpha == pytest.approx(2.9e-4, rel=0.02)
    assert link.bandwidth == float("inf")


@pytest.mark.parametrize(
    ("sizes", "seconds", "says"),
    [([1, 2], [1, 2], "2 points"), ([1, 2, 3], [1, 0, 2], "above 0"), ([-1, 2, 3], [1, 1, 2], "negative")],
)
def test_bad_points_are_refused(sizes, seconds, says):
    with pytest.raises(ValueError, match=says):
        fit_link(sizes, seconds)


def test_a_flat_segment_is_told_without_a_bandwidth():
    flat, rising = Segment(1, 1e-4, float("inf")), Segment(1000, 0.0, 1e9)
    assert repr(Link((flat, rising), 0.1)).startswith(
        "Link(from 1 B: 100 µs whatever the size; from 1,000 B: 0 µs + size / 1.00 GB/s;"
    )
