"""What a job leaves behind: `Run`."""

from __future__ import annotations

import contextlib
import html
import os
import reprlib
import sys
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.measuring.records import Collective, Region

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 80


class Log:
    """One rank's output: kept in memory when small, else in a file that goes with this object."""

    SMALL = 1 << 20  # bytes

    def __init__(self, path: str = "") -> None:
        self.path: str | None = None  # of the file, where that is kept
        self._text = ""
        if path and os.path.exists(path) and os.path.getsize(path) > self.SMALL:
            self.path = path
            weakref.finalize(self, _discard, path)
        elif path and os.path.exists(path):
            self._text = _read(path)

    def text(self) -> str:
        """All of it; what a carriage return wrote over is gone, as on a terminal."""
        text = _read(self.path) if self.path else self._text
        return "\n".join(visible(line) for line in text.split("\n")) if "\r" in text else text


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace", newline="") as file:  # carriage returns as they are
        return file.read()


def _discard(path: str) -> None:
    """Remove a log, and with the last one of a job its folder."""
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


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
            line += f"; {len(self.collectives):,} collectives, {sum(c.bytes for c in self.collectives):,} B handed over"
        if self.problem:
            line += f"; nothing recorded: {self.problem}"
        if self.oversubscribed:
            line += "; timings oversubscribed"
        return line

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = []
        for rank in range(self.ranks):
            seconds = self.seconds[rank] if rank < len(self.seconds) else None
            result = _short(self.results[rank]) if rank < len(self.results) else ""
            rows.append((str(rank), "did not finish" if seconds is None else f"{seconds:.3f} s", result))
        return rows

    def __repr__(self) -> str:
        rows = [("rank", "time", "result"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows]
        return "\n".join([self._summary(), *lines])

    def _ipython_display_(self) -> None:
        """Nothing more in the cell whose panel shows this run already; elsewhere IPython goes on to the representations below."""
        if self.shown_in is None or self.shown_in != current_cell():
            raise NotImplementedError

    def _repr_html_(self) -> str:
        cell = "<td style='text-align:left'>"
        head = "".join(f"<th style='text-align:left'>{title}</th>" for title in ("rank", "time", "result"))
        body = "".join(f"<tr>{''.join(f'{cell}{html.escape(value)}</td>' for value in row)}</tr>" for row in self._rows())
        return f"<div>{html.escape(self._summary())}<table><tr>{head}</tr>{body}</table></div>"


def _short(value: Any) -> str:
    return " ".join(_SHORT.repr(value).split())
