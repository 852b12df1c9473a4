"""The timeline of a run: what each rank did when, computed from its record of collectives, and drawn.

At every moment between the start and the end of its function a rank is in one of three states:

* communication: it blocks on a collective that everyone it needs has entered;
* idle: it blocks on collectives that all still lack somebody: a rank of the group has not entered, or the other end of a send
  or receive has not been issued;
* compute: it does not block.

It blocks on a collective from `waited_from` to `end`. Where `waited_from` is None, either nobody blocked in Python or C++ waited
(DDP's reducer, DTensor), and the record does not say which. Then a collective whose source line asks for `async_op=True` blocked
nobody, and any other counts as blocking from the last moment at which its rank is known to have been free: its own issue, or that
of a later collective meanwhile. For those, communication and idle are upper limits.
A collective that ended before the last rank came waited for nobody (a broadcast's source, a buffered send): communication.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.patches import Patch

from helpers.plots import style
from helpers.plots.style import Figure, amount, measured_on, scale

if TYPE_CHECKING:
    from helpers.launching.results import Run
    from helpers.measuring.records import Collective

KINDS = {"compute": (style.BLUE, ""), "communication": (style.ORANGE, ".."), "idle": (style.LIGHT, "//")}


class Segment(NamedTuple):
    """A stretch of one rank's time in one state. Seconds on the clock common to all ranks."""

    start: float
    end: float
    kind: str  # "compute", "communication" or "idle"


def segments(run: Run) -> list[list[Segment]]:
    """Per rank, its states in order, without gaps from the start of the function to its end; empty for a rank that never started.

    A rank that did not return is followed up to the last thing any rank recorded.
    """
    last, ends, met, blocked = _last_moment(run), _ends(run), _met(run.collectives), _blocked_from(run)
    lanes: list[list[Segment]] = []
    for rank, span in enumerate(run.spans):
        if span is None:
            lanes.append([])
            continue
        waiting, moving = [], []
        for collective in run.collectives:
            if collective.rank == rank:
                begin, until, came = blocked[id(collective)], ends[id(collective)], met[id(collective)]
                came = begin if collective.end is not None and collective.end < came else min(max(came, begin), until)
                waiting.append((begin, came))
                moving.append((came, until))
        lanes.append(_partition(span[0], last if span[1] is None else span[1], waiting, moving))
    return lanes


def shares(run: Run) -> list[dict[str, float]]:
    """Per rank the seconds of "compute", "communication" and "idle"; together they are the time in its function."""
    return [
        {kind: math.fsum(segment.end - segment.start for segment in lane if segment.kind == kind) for kind in KINDS}
        for lane in segments(run)
    ]


def timeline(run: Run, title: str | None = None) -> Figure:
    """A lane per rank: computing, communicating, waiting; above it regions (`measuring.clock.region`) as labelled bands, below it
    a thin strip ("below" in the legend) where a collective is under way while the rank computes.

    Ticks mark collectives whose end was not recorded; they count as computing. Raises ValueError for a run without spans.
    """
    lanes, seconds, ends, blocked = segments(run), shares(run), _ends(run), _blocked_from(run)
    if not any(lanes):
        raise ValueError("no rank of this run started its function: there is nothing to draw")
    origin = min(lane[0].start for lane in lanes if lane)
    factor, unit = scale([lane[-1].end - origin for lane in lanes if lane], "s")
    lines = [_in_words(rank, run.spans[rank], share) for rank, share in enumerate(seconds)]
    total = {kind: sum(share[kind] for share in seconds) for kind in KINDS}
    title = title or f"All ranks together: {_percents(total)}"
    alt, finding = f"Timeline: {title}. {'; '.join(lines)}.", "\n".join(lines)
    figure, axes = style.figure(title, 1.7 + 0.6 * len(lanes), alt=alt, finding=finding, footer=measured_on(run))
    for rank, lane in enumerate(lanes):
        own = [each for each in run.collectives if each.rank == rank]
        behind = [(each.start, blocked[id(each)]) for each in own]
        rows = [(kind, [piece[:2] for piece in lane if piece.kind == kind], rank - 0.2, 0.5) for kind in KINDS]
        for name, pieces, top, thick in [*rows, ("under way while computing", behind, rank + 0.34, 0.12)]:
            color, hatch = KINDS.get(name, (style.ORANGE, ""))
            bars = [((start - origin) * factor, (end - start) * factor) for start, end in pieces]
            axes.broken_barh(bars, (top, thick), facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)
        endless = [(each.start - origin) * factor for each in own if each.end is None and ends[id(each)] == each.start]
        axes.plot(endless, [rank + 0.05] * len(endless), "|k", markersize=14)
    _draw_regions(axes, run, origin, factor)
    axes.set_yticks(range(len(lanes)), [f"rank {rank}" for rank in range(len(lanes))])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel(f"time since the first rank began ({unit})")
    overlaps = any(blocked[id(each)] > each.start for each in run.collectives)
    looks = {("waiting for another rank" if kind == "idle" else kind): look for kind, look in KINDS.items()}
    looks |= {"below: under way meanwhile": (style.ORANGE, "")} if overlaps else {}
    handles = style.patches(looks)
    if run.regions:
        handles.append(Patch(facecolor=style.PALETTE[2], alpha=0.45, edgecolor="black", label="above: regions of the job"))
    style.legend_above(axes, 3, handles=handles)
    return figure


def _is_within(inner: Any, outer: Any) -> bool:
    """Whether one region lies in another, longer one."""
    return outer.start <= inner.start and inner.end <= outer.end and inner.end - inner.start < outer.end - outer.start


def _draw_regions(axes: Any, run: Run, origin: float, factor: float) -> None:
    """A band for each region above its rank's lane, with its name where that fits."""
    names = list(dict.fromkeys(region.name for region in run.regions))
    least = 0.014 * (_last_moment(run) - origin)  # seconds that a letter needs
    for region in run.regions:
        start, width = (region.start - origin) * factor, (region.end - region.start) * factor
        color = style.PALETTE[(names.index(region.name) + 2) % 7]
        axes.broken_barh(
            [(start, width)], (region.rank - 0.45, 0.22), facecolor=color, alpha=0.45, edgecolor="black", linewidth=0.5
        )
        within = sorted((o.start, o.end) for o in run.regions if o.rank == region.rank and _is_within(o, region))
        gaps, reached = [], region.start  # what lies beside those
        for begin, end in [*within, (region.end, region.end)]:
            gaps.append((reached, begin))
            reached = max(reached, end)
        left, right = max(gaps, key=lambda gap: gap[1] - gap[0])
        if right - left > least * len(region.name):
            middle = ((left + right) / 2 - origin) * factor
            axes.text(middle, region.rank - 0.34, region.name, ha="center", va="center", fontsize=7)


def _met(collectives: tuple[Collective, ...]) -> dict[int, float]:
    """By the id of each collective, when everyone it needs had come: infinite where somebody never did.

    The n-th collective on a group is one meeting, whatever its operation; so is the n-th send from a to b with the n-th receive.
    """
    counted: Counter[tuple] = Counter()
    meetings: dict[tuple, list[Collective]] = {}
    for each in sorted(collectives, key=lambda each: (each.rank, each.sequence)):
        members, lone = each.group, each.op in ("send", "recv")
        if lone:
            ends = (each.rank,) if each.peer is None else (each.rank, each.peer)
            members = ends if each.op == "send" else ends[::-1]
        counted[each.rank, lone, members] += 1
        meetings.setdefault((lone, members, counted[each.rank, lone, members]), []).append(each)
    came = {}
    for (_, members, _), present in meetings.items():
        complete = {each.rank for each in present} >= set(members)
        came.update({id(each): max(other.start for other in present) if complete else math.inf for each in present})
    return came


def _ends(run: Run) -> dict[int, float]:
    """By the id of each collective, when it ended; the last moment of the run where its rank never came out of it.

    Where the backend did not say, it is the start.
    """
    final = {each.rank: each.sequence for each in sorted(run.collectives, key=lambda each: each.sequence)}
    ends, last = {}, _last_moment(run)
    for each in run.collectives:
        span = run.spans[each.rank]
        stuck = each.sequence == final[each.rank] and (span is None or span[1] is None)
        ends[id(each)] = each.end if each.end is not None else last if stuck else each.start
    return ends


def _blocked_from(run: Run) -> dict[int, float]:
    """By the id of each collective, when its rank began to block on it; its end where the rank never did."""
    ends = _ends(run)
    issues = {
        rank: sorted(each.start for each in run.collectives if each.rank == rank and each.source) for rank in range(run.ranks)
    }
    begins = {}
    for each in run.collectives:
        until, own = ends[id(each)], issues[each.rank]
        if each.waited_from is not None:
            begin = each.waited_from
        elif each.source and "async_op=True" in each.source:
            begin = until
        else:  # the last own issue before it ended, at the earliest its own
            before = bisect.bisect_left(own, until)
            begin = max([each.start, *own[max(0, before - 1) : before]])
        begins[id(each)] = min(begin, until)
    return begins


def _partition(start: float, end: float, waiting: list[tuple[float, float]], moving: list[tuple[float, float]]) -> list[Segment]:
    """The stretch from `start` to `end` cut into states; touching pieces of one state are joined."""
    changes = {start: [0, 0], end: [0, 0]}  # at a time: change in the number of collectives waiting, moving
    for column, intervals in enumerate((waiting, moving)):
        for interval in intervals:
            for at, step in zip(interval, (1, -1), strict=True):
                changes.setdefault(min(max(at, start), end), [0, 0])[column] += step
    pieces: list[Segment] = []
    idle = busy = 0
    for left, right in itertools.pairwise(sorted(changes)):
        idle, busy = idle + changes[left][0], busy + changes[left][1]
        kind = "communication" if busy else "idle" if idle else "compute"
        begin = pieces.pop().start if pieces and pieces[-1].kind == kind else left
        pieces.append(Segment(begin, right, kind))
    return pieces or [Segment(start, end, "compute")]


def _last_moment(run: Run) -> float:
    """The last time that anything in the run's record happened."""
    moments = [at for span in run.spans if span for at in span if at is not None]
    moments += [at for each in run.collectives for at in (each.start, each.end) if at is not None]
    return max([*moments, *(region.end for region in run.regions)], default=0.0)


def _percents(share: dict[str, float]) -> str:
    total = math.fsum(share.values()) or 1.0
    words = {"compute": "computing", "communication": "communicating", "idle": "waiting"}
    return ", ".join(f"{100 * share[kind] / total:.0f} % {word}" for kind, word in words.items())


def _in_words(rank: int, span: tuple[float, float | None] | None, share: dict[str, float]) -> str:
    if span is None:
        return f"rank {rank}: did not start"
    return f"rank {rank}: {_percents(share)} of {amount(math.fsum(share.values()), 's')}" + ", did not return" * (span[1] is None)
