"""What a job leaves behind: `Run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helpers.measuring.records import Collective, Region


@dataclass
class Run:
    """The outcome of one `launch`.

    Lists are indexed by rank. Times are seconds; `spans` are (start, end) of the function on the clock common to all ranks.
    """

    ranks: int
    device: str  # "cpu" or "cuda"
    backend: str  # "gloo" or "nccl"
    results: list[Any] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)
    startup_seconds: float = 0.0
    spans: list[tuple[float, float | None] | None] = field(default_factory=list)
    collectives: tuple[Collective, ...] = ()
    regions: tuple[Region, ...] = ()
    oversubscribed: bool = False  # more ranks than cores: times are not those of a machine with enough of them
    machine: str = ""  # one line, for figure footers: "2 cores, no GPU"
    name: str = ""  # of the function
