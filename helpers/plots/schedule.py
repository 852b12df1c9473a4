"""Pipeline schedules: one row per rank, one box per operation, planned in slots or as it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle

from helpers.plots import style
from helpers.plots.style import Figure, scale

if TYPE_CHECKING:
    from helpers.pipeline import Operation

KINDS = {
    "F": ("forward", style.BLUE, "white"),
    "B": ("backward", style.ORANGE, "black"),
    "I": ("backward: inputs", style.ORANGE, "black"),
    "W": ("backward: weights", style.GREEN, "white"),
}


def schedule(placed: Sequence[Sequence[Operation]], title: str, *, unit: str = "slots", footer: str | None = "") -> Figure:
    """Draw operations with their times, as `pipeline.place` (unit "slots") or `pipeline.recorded` (unit "s") return them.

    Boxes hold the number of the micro-batch where it fits; where a rank has several stages, those of its later ones are paler.
    White is idle. `footer` as in `style.figure`; a planned schedule was not measured, so it has none.
    """
    end = max(each.end for row in placed for each in row)
    factor, shown = scale([end], unit)
    idle = [end - sum(each.end - each.start for each in row) for row in placed]
    share = 100 * sum(idle) / (len(placed) * end)
    told = "; ".join(f"rank {rank} idle {100 * each / end:.0f} %" for rank, each in enumerate(idle))
    figure, axes = style.figure(
        title,
        1.5 + 0.38 * len(placed),
        alt=f"Schedule of {len(placed)} ranks: {title}. {told}.",
        finding=f"{share:.1f} % of all ranks' time is idle: {told}",
        footer=footer,
    )
    for rank, row in enumerate(placed):
        for each in row:
            _, face, ink = KINDS[each.kind]
            start, width, text = each.start * factor, (each.end - each.start) * factor, str(each.micro_batch)
            if later := each.stage != min(one.stage for one in row):
                face, ink = to_hex(tuple((1 + part) / 2 for part in to_rgb(face))), "black"
            axes.add_patch(Rectangle((start, rank - 0.42), width, 0.84, facecolor=face, edgecolor="white", linewidth=0.8))
            if each.end - each.start > (0.004 + 0.01 * len(text)) * end:
                place = (start + width / 2, rank)
                axes.annotate(text, place, ha="center", va="center", fontsize=7, color=ink, weight="bold" if later else "normal")
    axes.set(xlim=(0, end * factor), ylim=(len(placed) - 0.5, -0.5), xlabel=f"time ({shown})")
    axes.set_yticks(range(len(placed)), [f"rank {rank}" for rank in range(len(placed))])
    axes.grid(visible=False)
    present = {each.kind for row in placed for each in row}
    looks = {name: (color, "") for kind, (name, color, _) in KINDS.items() if kind in present}
    if any(each.stage != row[0].stage for row in placed for each in row):
        looks["paler, bold: its later stage"] = (style.LIGHT, "")
    style.legend_above(axes, 3, handles=style.patches(looks))
    return figure
