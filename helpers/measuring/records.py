"""What the instruments write down. Plain records, readable without importing torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective, send or receive, as one rank issued it.

    `start` and `end` are seconds on `time.perf_counter`'s clock, which all processes of one Linux host share.
    `end` is None while it has not finished, or where the backend does not say when it did.
    """

    rank: int
    sequence: int  # 0, 1, 2 … in the order this rank issued them
    op: str  # "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv", "barrier" …
    group: tuple[int, ...]  # global ranks
    dtype: str | None  # "float32"; None for a barrier
    shape: tuple[int, ...]  # of the payload; several tensors are counted as one flat one
    bytes: int  # the payload: all_gather and reduce_scatter count the full (gathered) buffer
    start: float
    end: float | None
    source: str | None  # "cell 5, line 7: dist.all_reduce(x)"; None where no line of the learner's issued it
    peer: int | None = None  # global rank at the other end of a send or recv
    waited_from: float | None = None  # when the rank began to block on it, until `end`; None where it did not or C++ waits
    callers: tuple[str, ...] = ()  # the nearest lines of the learner's that led to `source`, as it is written, innermost first


@dataclass(frozen=True)
class Region:
    """A named stretch of one rank's time, written by `measuring.clock.region`. Seconds on the common clock."""

    rank: int
    name: str
    start: float
    end: float
