"""The α–β model of a link: a message of S bytes takes α seconds, whatever its size, and S / bandwidth on top.

Source of the model: Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 1994.
Known misses: libraries change their algorithm with the size (two segments catch one such change), caches, several messages at
once on the same link.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Link", "fit_link"]

_BETTER = 0.5  # a second segment is taken where it leaves at most this share of the squared relative error
_FEWEST = 3  # points in a segment: two would fit any line


@dataclass(frozen=True)
class Segment:
    """From `smallest` bytes on: `alpha` seconds per message, then `bandwidth` bytes per second."""

    smallest: float
    alpha: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """A fitted link. `segments` are ordered by size; `error` is the root mean square relative error over the fitted points."""

    segments: tuple[Segment, ...]
    error: float

    @property
    def alpha(self) -> float:
        """Seconds that the smallest message takes."""
        return self.segments[0].alpha

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the largest messages reach."""
        return self.segments[-1].bandwidth

    def seconds(self, size: float) -> float:
        """Predicted seconds for a message of `size` bytes."""
        segment = next((s for s in reversed(self.segments) if size >= s.smallest), self.segments[0])
        return segment.alpha + size / segment.bandwidth

    def __repr__(self) -> str:
        parts = []
        for each in self.segments:
            rate = f" + size / {each.bandwidth / 1e9:.2f} GB/s" if each.bandwidth < float("inf") else " whatever the size"
            parts.append(f"from {each.smallest:,.0f} B: {each.alpha * 1e6:,.0f} µs{rate}")
        return f"Link({'; '.join(parts)}; typical error of the fit {100 * self.error:.0f} %)"


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Fit α and bandwidth to measured times, by least squares of the relative error; two segments where one line misses the bend.

    Raises ValueError for fewer than three points, lengths that differ, or times that are not positive.
    """
    points = sorted(zip(sizes, seconds, strict=True))
    if len(points) < _FEWEST:
        raise ValueError(f"{len(points)} points: a fit of two numbers needs at least {_FEWEST}, better 8")
    if any(size < 0 or time <= 0 for size, time in points):
        raise ValueError("sizes must not be negative and times must be above 0: a time of 0 was not measured")
    lines = [_line(points)]
    cuts = range(_FEWEST, len(points) - _FEWEST + 1)
    bent = min(([_line(points[:cut]), _line(points[cut:])] for cut in cuts), key=_squares, default=lines)
    if _squares(bent) < _BETTER * _squares(lines):
        lines = bent
    return Link(tuple(segment for segment, _ in lines), (_squares(lines) / len(points)) ** 0.5)


def _line(points: Sequence[tuple[float, float]]) -> tuple[Segment, float]:
    """The line time = α + βS with the least squared relative error, neither part negative, and that error."""
    import numpy as np

    size, time = np.array(points, dtype=float).T
    beta, alpha = np.polyfit(size, time, 1, w=1 / time)
    tries = [(alpha, beta)]
    if min(alpha, beta) < 0:  # flat, or through the origin
        tries = [((1 / time).sum() / (1 / time**2).sum(), 0.0), (0.0, (size / time).sum() / ((size / time) ** 2).sum())]
    squares, alpha, beta = min((float((((a + b * size) / time - 1) ** 2).sum()), float(a), float(b)) for a, b in tries)
    return Segment(points[0][0], alpha, 1 / beta if beta else float("inf")), squares


def _squares(lines: Sequence[tuple[Segment, float]]) -> float:
    return sum(squares for _, squares in lines)
