"""Writes a run as Chrome trace events, the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from helpers.measuring.records import Collective

if TYPE_CHECKING:
    from helpers.launching.results import Run


class _Slice(NamedTuple):
    start: float
    end: float
    name: str
    arguments: dict[str, Any]  # shown when the slice is clicked


def write(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write `run` to `path`, one process a rank with tracks for its function, regions and collectives; return the path.

    Collectives that were in flight together lie on several tracks, since slices of one track must not overlap. What has no
    end lasts to the last moment that is known of the run and says so. Times are microseconds since the first moment.
    """
    slices = [list(_slices_of(run, rank, _last_moment(run))) for rank in range(run.ranks)]
    first = min((piece.start for tracks in slices for _, pieces in tracks for piece in pieces), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, tracks in enumerate(slices):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
        for number, (title, pieces) in enumerate(tracks):
            place = {"pid": rank, "tid": number}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": title}})
            events.append({"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": number}})
            for piece in pieces:
                times = {"ts": (piece.start - first) * 1e6, "dur": (piece.end - piece.start) * 1e6}
                events.append({"ph": "X", **place, "name": piece.name, "cat": title, **times, "args": piece.arguments})
    about = {"job": run.name, "ranks": run.ranks, "device": run.device, "backend": run.backend, "machine": run.machine}
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}), encoding="utf-8")
    return path


def _last_moment(run: Run) -> float:
    spans: list[tuple[float, float | None]] = [span for span in run.spans if span is not None]
    spans += [(region.start, region.end) for region in run.regions]
    spans += [(collective.start, collective.end) for collective in run.collectives]
    return max((time for span in spans for time in span if time is not None), default=0.0)


def _slices_of(run: Run, rank: int, last: float) -> Iterator[tuple[str, list[_Slice]]]:
    """Yield the tracks of one rank: title and slices."""

    def piece(start: float, end: float | None, name: str, arguments: dict[str, Any]) -> _Slice:
        return (
            _Slice(start, last, name, {**arguments, "unfinished": True}) if end is None else _Slice(start, end, name, arguments)
        )

    span = run.spans[rank] if rank < len(run.spans) else None
    if span is not None:
        yield "function", [piece(*span, run.name or "function", {})]
    regions = [piece(region.start, region.end, region.name, {}) for region in run.regions if region.rank == rank]
    collectives = [piece(c.start, c.end, c.op, _arguments(c)) for c in run.collectives if c.rank == rank]
    for title, pieces, nests in (("regions", regions, True), ("collectives", collectives, False)):
        for number, lane in enumerate(_lanes(pieces, nests)):
            yield title if number == 0 else f"{title} {number + 1}", lane


def _arguments(collective: Collective) -> dict[str, Any]:
    arguments = {name: getattr(collective, name) for name in ("sequence", "bytes", "dtype", "shape", "group", "peer", "source")}
    if collective.waited_from is not None and collective.end is not None:
        arguments["blocked for ms"] = (collective.end - collective.waited_from) * 1e3
    return {name: value for name, value in arguments.items() if value is not None}


def _lanes(pieces: Iterable[_Slice], nests: bool) -> list[list[_Slice]]:
    """Return the slices on as few tracks as they need; with `nests` one may lie within another."""
    lanes: list[tuple[list[_Slice], list[float]]] = []  # slices, and the ends of those that enclose what comes next
    for piece in sorted(pieces, key=lambda piece: (piece.start, -piece.end)):
        for lane in lanes:
            enclosing = lane[1]
            while enclosing and enclosing[-1] <= piece.start:
                enclosing.pop()
            if not enclosing or (nests and piece.end <= enclosing[-1]):
                break
        else:
            lane = [], []
            lanes.append(lane)
        lane[0].append(piece)
        lane[1].append(piece.end)
    return [slices for slices, _ in lanes]
