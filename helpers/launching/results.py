"""What a job leaves behind: `Run`."""

import html
import mmap
import os
import reprlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from helpers import record
from helpers.measuring.records import Collective, Region

RESULT_WIDTH = 100  # characters of a result in a run's table
_HEADS = ("rank", "time", "result")


class _Short(reprlib.Repr):
    """Values as a line of a table: floats with four digits."""

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.4g}"

    def repr_Tensor(self, value: Any, level: int) -> str:
        try:
            numbers = value.flatten()[:4].tolist() if value.ndim else []
        except Exception:  # without numbers, sparse, or of another library
            numbers = []
        if not numbers:
            return self.repr_instance(value, level)
        first = ", ".join(self.repr1(number, level) for number in numbers)
        return f"tensor of shape {tuple(value.shape)}: {first}" + ", …" * (value.numel() > 4)


_SHORT = _Short()
_SHORT.maxother = _SHORT.maxstring = 80


def _shortly(result: Any) -> str:
    text = " ".join(_SHORT.repr(result).split())
    return text if len(text) <= RESULT_WIDTH else text[: RESULT_WIDTH - 2] + " …"


class Log:
    """One rank's output: kept in memory when small, else on disk, in a file without a name that goes with this object."""

    SMALL = 1 << 20  # bytes

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            large = os.path.getsize(path) > self.SMALL
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if large else file.read()

    def __getstate__(self) -> dict[str, Any]:
        return {"_data": self._data[:]}  # a map of a file does not travel

    def text(self) -> str:
        """All of it; what a carriage return wrote over is gone, as on a terminal."""
        text = self._data[:].decode(errors="replace")
        return "\n".join(visible(line) for line in text.split("\n")) if "\r" in text else text

    def last(self, size: int) -> str:
        """Its last `size` bytes."""
        return self._data[-size:].decode(errors="replace")


def current_cell() -> str | None:
    """The message that asked for the cell being executed; None outside a notebook kernel."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython else None
    parent = kernel.get_parent() if kernel is not None else {}
    return parent.get("header", {}).get("msg_id")


def visible(line: str) -> str:
    """What a terminal shows of a line with carriage returns: the last thing written (a progress bar's latest state)."""
    return line.rstrip("\r").rpartition("\r")[2]


@dataclass
class Run:
    """The outcome of one `launch`.

    Lists are indexed by rank. Times are seconds; `spans` are (start, end) of the function on the clock common to all ranks.
    Of a job that failed, `results`, `seconds` and the ends of `spans` are None for ranks that did not finish.
    """

    ranks: int
    device: str  # "cpu" or "cuda"
    backend: str  # "gloo" or "nccl"
    results: list[Any] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)  # inside the function
    startup_seconds: float = 0.0  # from the call until every rank was inside the function
    spans: list[tuple[float, float | None] | None] = field(default_factory=list)
    collectives: tuple[Collective, ...] = ()
    regions: tuple[Region, ...] = ()
    oversubscribed: bool = False  # more ranks than cores: times are not those of a machine with enough of them
    machine: str = ""  # one line, for figure footers: "2 cores, no GPU"
    name: str = ""  # of the function
    problem: str | None = None  # why nothing was recorded, where that was asked for and failed
    logs: list[Log] = field(default_factory=list, repr=False)
    shown_in: str | None = field(default=None, repr=False)  # the execution of the cell whose live panel became its picture

    def output(self, rank: int) -> str:
        """Everything this rank printed, standard output and standard error as they came."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"no rank {rank}: this run has ranks 0 to {self.ranks - 1}")
        return self.logs[rank].text() if self.logs else ""

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write functions, regions and collectives as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        from helpers.measuring import trace

        return trace.write(self, path)

    def _summary(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        line = f"{self.name or 'job'} on {ranks}, {self.device}, {self.backend}; started in {self.startup_seconds:.2f} s"
        if self.collectives:
            count = len(self.collectives)
            line += f"; {count:,} collective{'s' * (count > 1)}, {sum(c.bytes for c in self.collectives):,} B handed over"
        if self.problem:
            line += f"; nothing recorded: {self.problem}"
        if self.oversubscribed:
            line += "; timings oversubscribed"
        return line

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for rank, (seconds, result) in enumerate(zip_longest(self.seconds, self.results)):
            yield str(rank), "did not finish" if seconds is None else f"{seconds:.3f} s", _shortly(result)

    def __repr__(self) -> str:
        return "\n".join([self._summary(), *(f"  {line}" for line in record.columns([_HEADS, *self._rows()]))])

    def _ipython_display_(self) -> None:
        """Nothing more in the cell whose panel shows this run already; elsewhere IPython goes on to the representations below."""
        if self.shown_in is None or self.shown_in != current_cell():
            raise NotImplementedError

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(self._summary())}{record.table(self._rows(), _HEADS)}</div>"
