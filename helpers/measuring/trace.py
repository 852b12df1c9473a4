"""Writes a run as Chrome trace events, the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Everything is an
asynchronous event, a pair of beginning and end with a number of its own: those may overlap, and the viewer finds room for them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers.measuring.records import Collective

if TYPE_CHECKING:
    from helpers.launching.results import Run


def write(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write `run` to `path`, one process a rank with its function, regions and collectives; return the path.

    What has no end lasts to the last moment that is known of the run and says so. Times are microseconds since the first moment.
    """
    spans: list[tuple[int, str, str, float, float | None, dict[str, Any]]] = [
        (rank, "function", run.name or "function", *span, {}) for rank, span in enumerate(run.spans) if span is not None
    ]
    spans += [(each.rank, "region", each.name, each.start, each.end, {}) for each in run.regions]
    spans += [(each.rank, "collective", each.op, each.start, each.end, _arguments(each)) for each in run.collectives]
    first, last = min((start for *_, start, _, _ in spans), default=0.0), last_moment(run)
    events: list[dict[str, Any]] = []
    for rank in range(run.ranks):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
    for number, (rank, category, name, start, end, arguments) in enumerate(spans):
        if end is None:
            end, arguments = last, arguments | {"unfinished": True}
        common = {"pid": rank, "tid": rank, "cat": category, "id": number, "name": name}
        events.append({"ph": "b", "ts": (start - first) * 1e6, **common, "args": arguments})
        events.append({"ph": "e", "ts": (end - first) * 1e6, **common})
    about = {"job": run.name, "ranks": run.ranks, "device": run.device, "backend": run.backend, "machine": run.machine}
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}), encoding="utf-8")
    return path


def last_moment(run: Run) -> float:
    """The last time that anything in the run's record happened."""
    moments = [at for span in run.spans if span for at in span]
    moments += [at for region in run.regions for at in (region.start, region.end)]
    moments += [at for collective in run.collectives for at in (collective.start, collective.end)]
    return max((at for at in moments if at is not None), default=0.0)


def _arguments(collective: Collective) -> dict[str, Any]:
    """What is shown when it is clicked."""
    arguments = {name: getattr(collective, name) for name in ("sequence", "bytes", "dtype", "shape", "group", "peer", "source")}
    if collective.waited_from is not None and collective.end is not None:
        arguments["blocked for ms"] = (collective.end - collective.waited_from) * 1e3
    return {name: value for name, value in arguments.items() if value is not None}
