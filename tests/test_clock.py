"""The clock: what it measures, what it says of times that are too short, and what ends in `run.regions`."""

import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import launch
from helpers.measuring import clock


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_region_takes_at_least_as_long_as_what_is_in_it():
    with clock.region("work") as stopwatch:
        assert stopwatch.seconds is None
        assert repr(stopwatch) == "work: running"
        spin(0.01)
    assert stopwatch.seconds >= 0.01
    assert stopwatch.note is None
    assert repr(stopwatch).startswith("work: ")


def test_a_region_that_raises_has_its_time_as_well():
    with pytest.raises(KeyError), clock.region("broken") as stopwatch:
        raise KeyError("gone")
    assert stopwatch.seconds > 0


def test_a_region_too_short_for_the_clock_says_so():
    with clock.region("nothing") as stopwatch:
        pass
    assert "too short for this clock" in stopwatch.note
    assert stopwatch.note in repr(stopwatch)


def test_measure_warms_up_and_keeps_every_sample():
    calls = []
    timing = clock.measure(lambda: calls.append(spin(0.001)), repeats=5, warmup=2)
    assert len(calls) == 7
    assert len(timing.samples) == 5
    assert min(timing.samples) >= 0.001
    assert timing.note is None
    assert "median of 5" in repr(timing)


def test_measuring_nothing_says_that_it_is_too_short():
    timing = clock.measure(lambda: None, repeats=3)
    assert "repeat the work inside" in timing.note
    assert timing.note in repr(timing)


def test_what_can_be_trusted_is_measured_anew_when_cuda_comes_into_use(monkeypatch):
    import torch

    clock._shortest.cache_clear()
    clock.Timing((0.0,)).note  # noqa: B018
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    assert clock.Timing((0.0,)).note == clock.Timing((0.0,)).note
    assert len(calls) == 101
    clock._shortest.cache_clear()


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_median_and_middle_half(samples):
    timing = clock.Timing(tuple(samples))
    low, high = timing.quartiles
    assert timing.median == statistics.median(samples)
    assert min(samples) <= low <= timing.median * (1 + 1e-12)
    assert timing.median <= high * (1 + 1e-12)
    assert high <= max(samples)
    assert timing.spread == high - low


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (75.0, "75 s"),
        (1234.0, "1234 s"),
        (999.7, "1000 s"),
        (1.5, "1.5 s"),
        (0.9996, "1 s"),
        (0.0123, "12.3 ms"),
        (9.996e-4, "1 ms"),
        (4.5e-6, "4.5 µs"),
        (2e-8, "20 ns"),
        (0.0, "0 ns"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds, text):
    assert clock.show(seconds) == text


def test_wrong_arguments():
    with pytest.raises(TypeError, match="lambda"):
        clock.measure(3)
    with pytest.raises(ValueError, match="repeats is 0"):
        clock.measure(spin, repeats=0)
    with pytest.raises(ValueError, match="warmup -1"):
        clock.measure(spin, warmup=-1)


def test_regions_of_ranks_are_in_the_run():
    def job():
        import torch.distributed as dist

        from helpers.measuring import clock

        with clock.region("outer") as outer, clock.region(f"rank {dist.get_rank()}"):
            dist.barrier()
        return outer.seconds

    run = launch(job, ranks=2)
    for rank in range(2):
        inner, outer = (region for region in run.regions if region.rank == rank)  # written when they end
        assert (inner.name, outer.name) == (f"rank {rank}", "outer")
        assert outer.end - outer.start == pytest.approx(run.results[rank], abs=1e-9)
        assert run.spans[rank][0] <= outer.start <= inner.start <= inner.end <= outer.end <= run.spans[rank][1]
        (barrier,) = (collective for collective in run.collectives if collective.rank == rank)
        assert inner.start <= barrier.start <= barrier.end <= inner.end


def test_regions_count_without_a_recorder_too():
    def job():
        from helpers.measuring import clock

        with clock.region("unrecorded") as stopwatch:
            sum(range(1000))
        return stopwatch.seconds

    run = launch(job, ranks=1, record=False)
    assert run.results[0] > 0
    assert run.regions == ()
