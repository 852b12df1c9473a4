"""The clock: named regions of a rank's time, and repeated measurements with median and spread.

All times are `time.perf_counter` seconds. Where CUDA is in use, a measurement begins and ends when the GPU has done what was
queued: work that is only queued takes no time on the host's clock.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from helpers.measuring import journal

_TRUSTED = 100  # a time is trusted from this many times what an empty measurement shows: 1 % of error


def synchronize() -> None:
    """Wait until the GPU has done what this process queued; without CUDA in use nothing happens."""
    if _cuda_in_use():
        sys.modules["torch"].cuda.synchronize()


def _cuda_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


@cache
def _shortest(cuda: bool) -> float:
    """Return the shortest time in seconds that can be trusted to 1 %: 100 empty measurements, by the median of 101."""
    empty = []
    for _ in range(101):
        start = time.perf_counter()
        synchronize()
        empty.append(time.perf_counter() - start)
    return _TRUSTED * max(statistics.median(empty), time.get_clock_info("perf_counter").resolution)


def show(seconds: float) -> str:
    """Return a duration with three digits and a unit: ``"12.3 ms"``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * size:  # which rounds up to it
            return f"{seconds / size:.3g} {unit}" if abs(seconds) < 999.5 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _too_short(seconds: float) -> str | None:
    shortest = _shortest(_cuda_in_use())  # a measurement takes longer from when CUDA is in use
    if seconds >= shortest:
        return None
    return (
        f"{show(seconds)} is too short for this clock, which is right to 1 % from {show(shortest)} on: "
        f"repeat the work inside, at least {int(shortest / max(seconds, 1e-9)) + 1} times, and divide"
    )


@dataclass
class Stopwatch:
    """What `region` yields: `seconds` is None until the region is left; `note` says where the time is too short to be trusted."""

    name: str
    seconds: float | None = None
    note: str | None = None

    def __repr__(self) -> str:
        if self.seconds is None:
            return f"{self.name}: running"
        return f"{self.name}: {show(self.seconds)}" + (f" ({self.note})" if self.note else "")


@contextmanager
def region(name: str) -> Iterator[Stopwatch]:
    """Time the block; inside a rank that records, `run.regions` has it too, also where the block raised."""
    stopwatch = Stopwatch(name)
    synchronize()
    start = time.perf_counter()
    try:
        yield stopwatch
    finally:
        synchronize()
        end = time.perf_counter()
        stopwatch.seconds = end - start
        stopwatch.note = _too_short(stopwatch.seconds)
        if journal.current is not None:
            journal.current.write("region", name, start, end)


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one thing, in seconds and in the order they were taken."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Half of the samples are shorter."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of the samples lies between these two."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Width of the middle half of the samples (the interquartile range)."""
        low, high = self.quartiles
        return high - low

    @property
    def note(self) -> str | None:
        """Why the median cannot be trusted; None where it can."""
        return _too_short(self.median)

    def __repr__(self) -> str:
        low, high = self.quartiles
        text = f"{show(self.median)} (median of {len(self.samples)}, middle half {show(low)} to {show(high)})"
        return text + (f"; {self.note}" if self.note else "")


def measure(fn: Callable[[], Any], *, repeats: int = 7, warmup: int = 1) -> Timing:
    """Call `fn` `warmup` times unmeasured, then `repeats` times with the clock running.

    Raises:
        TypeError: `fn` is not callable: pass `lambda: work(x)`, not `work(x)`.
        ValueError: `repeats` is under 1 or `warmup` under 0.
    """
    if not callable(fn):
        raise TypeError(
            f"measure needs something to call, got {type(fn).__name__}: write measure(lambda: work(x)), not measure(work(x))"
        )
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats is {repeats} and warmup {warmup}; at least 1 and 0 are needed")
    for _ in range(warmup):
        fn()
    samples = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        fn()
        synchronize()
        samples.append(time.perf_counter() - start)
    return Timing(tuple(samples))
