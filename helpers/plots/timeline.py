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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.patches import Patch

from helpers.launching import waits
from helpers.measuring.trace import last_moment
from helpers.plots import style
from helpers.plots.style import Figure, amount, measured_on, scale

if TYPE_CHECKING:
    from helpers.launching.results import Run
    from helpers.measuring.records import Collective, Region

KINDS = {"compute": (style.BLUE, ""), "communication": (style.ORANGE, ".."), "idle": (style.LIGHT, "//")}


class Segment(NamedTuple):
    """A stretch of one rank's time in one state. Seconds on the clock common to all ranks."""

    start: float
    end: float
    kind: str  # "compute", "communication" or "idle"


class _Passage(NamedTuple):
    """A rank's way through one collective."""

    collective: Collective
    blocked: float  # when the rank began to block on it; its end where the rank never did
    met: float  # from when on it blocked though everyone it needs had come
    end: float  # the last moment of the run where the rank never came out; the start where the backend did not say


def segments(run: Run) -> list[list[Segment]]:
    """Per rank, its states in order, without gaps from the start of the function to its end; empty for a rank that never started.

    A rank that did not return is followed up to the last thing any rank recorded.
    """
    lanes: list[list[Segment]] = []
    for span, passages in zip(run.spans, _passages(run), strict=True):
        if span is None:
            lanes.append([])
            continue
        waiting = [(each.blocked, each.met) for each in passages]
        moving = [(each.met, each.end) for each in passages]
        lanes.append(_partition(span[0], last_moment(run) if span[1] is None else span[1], waiting, moving))
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
    lanes, seconds, passages = segments(run), shares(run), _passages(run)
    if not any(lanes):
        raise ValueError("no rank of this run started its function: there is nothing to draw")
    origin = min(lane[0].start for lane in lanes if lane)
    factor, unit = scale([lane[-1].end - origin for lane in lanes if lane], "s")
    lines = [_in_words(rank, run.spans[rank], share) for rank, share in enumerate(seconds)]
    title = title or f"All ranks together: {_percents({kind: sum(share[kind] for share in seconds) for kind in KINDS})}"
    alt, finding = f"Timeline: {title}. {'; '.join(lines)}.", "\n".join(lines)
    figure, axes = style.figure(title, 1.7 + 0.6 * len(lanes), alt=alt, finding=finding, footer=measured_on(run))

    def band(pieces: Sequence[tuple[float, float]], top: float, height: float, color: str, **look: Any) -> None:
        bars = [((start - origin) * factor, (end - start) * factor) for start, end in pieces]
        axes.broken_barh(bars, (top, height), facecolor=color, **look)

    flat: dict[str, Any] = {"edgecolor": "white", "linewidth": 0}
    for rank, (lane, own) in enumerate(zip(lanes, passages, strict=True)):
        for kind, (color, hatch) in KINDS.items():
            band([piece[:2] for piece in lane if piece.kind == kind], rank - 0.2, 0.5, color, hatch=hatch, **flat)
        band([(each.collective.start, each.blocked) for each in own], rank + 0.34, 0.12, style.ORANGE, **flat)
        endless = [each.collective.start for each in own if each.collective.end is None and each.end == each.collective.start]
        axes.plot([(start - origin) * factor for start in endless], [rank + 0.05] * len(endless), "|k", markersize=14)
    names = list(dict.fromkeys(region.name for region in run.regions))
    letter = 0.014 * (last_moment(run) - origin)  # seconds that one needs
    for region in sorted(run.regions, key=lambda region: region.start - region.end):  # shorter ones on those they lie in
        color, piece = style.PALETTE[(names.index(region.name) + 2) % 7], [(region.start, region.end)]
        band(piece, region.rank - 0.45, 0.22, "white")
        band(piece, region.rank - 0.45, 0.22, color, alpha=0.45, edgecolor="black", linewidth=0.5)
        left, right = _room_for_name(region, run)
        if right - left > letter * len(region.name):
            middle = ((left + right) / 2 - origin) * factor
            axes.text(middle, region.rank - 0.34, region.name, ha="center", va="center", fontsize=7)
    style.rank_rows(axes, len(lanes))
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel(f"time since the first rank began ({unit})")
    looks = {("waiting for another rank" if kind == "idle" else kind): look for kind, look in KINDS.items()}
    if any(each.blocked > each.collective.start for own in passages for each in own):
        looks["below: under way meanwhile"] = (style.ORANGE, "")
    handles = style.patches(looks)
    named = names if len(names) <= 4 else ["regions of the job"]  # a band may be too narrow for its name
    for number, name in enumerate(named):
        color = style.PALETTE[(number + 2) % 7]
        handles.append(Patch(facecolor=color, alpha=0.45, edgecolor="black", label=f"above: {name}"))
    style.legend_above(axes, 3 if all(len(name) < 20 for name in named) else 2, handles=handles)
    return figure


def _room_for_name(region: Region, run: Run) -> tuple[float, float]:
    """The longest stretch of a region in which no shorter one of its rank lies."""
    within = [
        (other.start, other.end)
        for other in run.regions
        if other.rank == region.rank
        and region.start <= other.start
        and other.end <= region.end
        and other.end - other.start < region.end - region.start
    ]
    gaps, reached = [], region.start
    for begin, end in [*sorted(within), (region.end, region.end)]:
        gaps.append((reached, begin))
        reached = max(reached, end)
    return max(gaps, key=lambda gap: gap[1] - gap[0])


def _passages(run: Run) -> list[list[_Passage]]:
    """Per rank, its way through each of its collectives."""
    met = _met(run.collectives)
    passages: list[list[_Passage]] = [[] for _ in run.spans]
    for rank, span in enumerate(run.spans):
        own = sorted((each for each in run.collectives if each.rank == rank), key=lambda each: each.sequence)
        issues = sorted(each.start for each in own if each.source)
        returned = span is not None and span[1] is not None
        for each in own:
            end = each.end
            if end is None:
                end = last_moment(run) if each is own[-1] and not returned else each.start
            blocked, came = _blocked_from(each, end, issues), met[each]
            came = blocked if each.end is not None and each.end < came else min(max(came, blocked), end)
            passages[rank].append(_Passage(each, blocked, came, end))
    return passages


def _met(collectives: Sequence[Collective]) -> dict[Collective, float]:
    """When everyone that a collective needs had come: infinite where somebody never did."""
    meetings, came = waits.Meetings(collectives), {}
    for each in collectives:
        present = [issued for rank, issued in meetings.row(each).items() if rank is not None]  # None: received from any rank
        came[each] = max(math.inf if issued is None else issued.start for issued in present)
    return came


def _blocked_from(each: Collective, end: float, issues: Sequence[float]) -> float:
    """When its rank, which issued something at the times `issues`, began to block on a collective; `end` where it never did."""
    if each.waited_from is not None:
        return min(each.waited_from, end)
    if each.source and "async_op=True" in each.source:
        return end
    before = bisect.bisect_left(issues, end)  # the last own issue before it ended, at the earliest its own
    return min(max([each.start, *issues[max(0, before - 1) : before]]), end)


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


def _percents(share: dict[str, float]) -> str:
    total = math.fsum(share.values()) or 1.0
    words = {"compute": "computing", "communication": "communicating", "idle": "waiting"}
    return ", ".join(f"{100 * share[kind] / total:.0f} % {word}" for kind, word in words.items())


def _in_words(rank: int, span: tuple[float, float | None] | None, share: dict[str, float]) -> str:
    if span is None:
        return f"rank {rank}: did not start"
    return f"rank {rank}: {_percents(share)} of {amount(math.fsum(share.values()), 's')}" + ", did not return" * (span[1] is None)
