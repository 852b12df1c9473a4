"""Pipeline schedules: one row per rank, one box per operation, planned in slots or as it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.colors import to_hex, to_rgb

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
            later, length, text = each.stage != min(one.stage for one in row), each.end - each.start, str(each.micro_batch)
            if later:
                face, ink = to_hex(tuple((1 + part) / 2 for part in to_rgb(face))), "black"
            text = text if length > (0.004 + 0.01 * len(text)) * end else ""
            corner, look = (each.start * factor, rank - 0.42), {"facecolor": face, "edgecolor": "white", "linewidth": 0.8}
            number = style.box(axes, corner, length * factor, 0.84, text, 7, **look)
            number.set(color=ink, weight="bold" if later else "normal")
    axes.set(xlim=(0, end * factor), ylim=(len(placed) - 0.5, -0.5), xlabel=f"time ({shown})")
    style.rank_rows(axes, len(placed))
    axes.grid(visible=False)
    present = {each.kind for row in placed for each in row}
    looks = {name: (color, "") for kind, (name, color, _) in KINDS.items() if kind in present}
    if any(each.stage != row[0].stage for row in placed for each in row):
        looks["paler, bold: its later stage"] = (style.LIGHT, "")
    style.legend_above(axes, 3, handles=style.patches(looks))
    return figure
