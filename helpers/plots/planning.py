"""A plan's first layouts: what the fullest rank holds, beside what its step is spent on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.plots import style
from helpers.plots.style import Figure, amount, scale

if TYPE_CHECKING:
    from helpers.predict import Candidate, Plan

SHOWN = 5


def plan(found: Plan, title: str | None = None, footer: str = "predicted, not measured") -> Figure:
    """Draw the first layouts of `predict.plan(…)`: bytes at the peak beside the room for them, and seconds by what they go to.

    Raises LookupError where no layout fits, with what was left out.
    """
    best, rows = found.best, found.candidates[:SHOWN]
    title = title or f"First for {found.goal}: {best.name}"
    told = "; ".join(f"{each.name} {amount(each.memory.peak, 'bytes')}, {amount(each.seconds, 's')}" for each in rows)
    height = 2.0 + 0.55 * len(rows)
    alt = f"Two bar charts, memory and time of {len(rows)} layouts. {title}. {told}."
    figure, (left, right) = style.figure(title, height, alt=alt, footer=footer, columns=2)
    tables = ([_memory(each) for each in rows], [_time(each) for each in rows])
    labels = ("fullest rank at its peak", "step")
    for panel, table, unit, label in zip((left, right), tables, ("bytes", "s"), labels, strict=True):
        ends = [sum(row.values()) for row in table] + [found.room] * (unit == "bytes")
        factor, shown = scale(ends, unit)
        names = dict.fromkeys(name for row in table for name in row)
        looks = {name: style.look(number) for number, name in enumerate(names)}
        for place, row in enumerate(table):
            end = style.stacked_bar(panel, place, row, looks, factor, 0.45)
            panel.annotate(f" {amount(end, unit)}", (end * factor, place), va="center", fontsize=8, bbox=style.ON_WHITE)
        if unit == "bytes":
            panel.axvline(found.room * factor, color="black", linestyle="--", linewidth=1)
            room, beside = f"room {amount(found.room, unit)}", {"xytext": (-4, 0), "textcoords": "offset points", "ha": "right"}
            panel.annotate(room, (found.room * factor, len(rows) - 0.55), fontsize=8, **beside)
        panel.set(xlim=(0, 1.22 * max(ends) * factor), xlabel=f"{label} ({shown})")
        panel.grid(axis="y", visible=False)
        style.legend_above(panel, 2, handles=style.patches(looks), handlelength=1.2, columnspacing=1.0)
    for place, each in enumerate(rows):
        name = left.annotate(each.name, (0, place - 0.28), fontsize=8, va="bottom", annotation_clip=False, bbox=style.ON_WHITE)
        name.set_in_layout(False)
    left.set_zorder(1)  # names may reach over the right half
    left.patch.set_visible(False)
    left.set(ylim=(len(rows) - 0.45, -0.75))
    left.set_yticks(range(len(rows)), [str(place + 1) for place in range(len(rows))])
    return figure


def _memory(each: Candidate) -> dict[str, float]:
    """What makes up the peak: the states that always exist, and what else exists at that moment."""
    held = each.memory
    parts = {
        "weights": held.parameters,
        "optimiser": held.optimizer_state + held.master_weights,
        "buffers": held.buffers,
        "KV cache": held.kv_cache,
    }
    rest = "gradients, activations" if each.workload.training else "activations"
    return {name: size for name, size in {**parts, rest: held.peak - sum(parts.values())}.items() if size > 0}


def _time(each: Candidate) -> dict[str, float]:
    """Seconds by what they go to, what is under 0.5 % of the step in one part."""
    if each.time is None:
        return {"one token for each sequence": each.seconds}
    shown = {name.replace("_", " "): value for name, value in each.time.parts.items() if value >= 0.005 * each.seconds}
    rest = each.seconds - sum(shown.values())
    return shown | ({"other": rest} if rest > 1e-9 * each.seconds else {})
