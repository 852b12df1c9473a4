"""Groups on hosts: a column for each rank, a row for each axis, a colour for each group."""

from typing import Any

from helpers.plots import style
from helpers.plots.style import Figure


def placement(*layouts: Any, title: str | None = None) -> Figure:
    """Draw `grouping.layout(…)`: cells of one colour in a row are one group, hatched where the group spans hosts.

    Several layouts of the same world are drawn below each other. Axes of one rank are left out. Nothing was measured, so there
    is no machine in the footer.
    """
    rows = [(each, axis) for each in layouts for axis in each.order if each.sizes[axis] > 1]
    crossing = ", ".join(dict.fromkeys(axis for each, axis in rows if each.crossing(axis)))
    title = title or (f"Groups that cross hosts: {crossing}" if crossing else "No group crosses hosts")
    told = "; ".join(repr(each).replace("\n", ";") for each in layouts)
    height = 1.2 + 0.42 * len(rows) + 0.35 * len(layouts)
    figure, axes = style.figure(
        title, height, alt=f"Groups by rank. {told}.", finding=title, footer="hatched: the group spans hosts"
    )
    first, top, ticks = layouts[0], 0.0, {}
    for each in layouts:
        for rank in range(each.world):
            axes.annotate(str(rank), (rank + 0.5, top + 0.3), ha="center", va="center", fontsize=9, color=style.GREY)
        ticks[top + 0.3] = " × ".join(f"{axis} {each.sizes[axis]}" for axis in each.order if each.sizes[axis] > 1) + "   rank"
        top += 0.6
        for axis in (axis for owner, axis in rows if owner is each):
            for number, group in enumerate(each.groups(axis)):
                color, hatch = style.PALETTE[number % 7], "///" if group in each.crossing(axis) else ""
                look = {"facecolor": color, "alpha": 0.55, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
                label = f"{axis} group {number}" if each.world <= 8 else str(number)
                for rank in group:
                    name = style.box(axes, (rank + 0.05, top + 0.06), 0.9, 0.88, label, 8, **look)
                    name.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})
            ticks[top + 0.5] = f"{axis} groups"
            top += 1
        top += 0.3
    for host in range(first.hosts):
        left, wide = host * first.ranks_per_node, first.ranks_per_node
        axes.annotate(f"host {host}", (left + wide / 2, -0.25), ha="center", va="center", fontsize=9, fontweight="bold")
        if host:
            axes.axvline(left, color="black", linewidth=1.5)
    axes.set(xlim=(0, first.world), ylim=(top - 0.2, -0.6))
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    style.boxes_only(axes)
    return figure
