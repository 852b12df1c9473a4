"""Who holds what before and after a collective: one row per rank, one box per number."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helpers.plots import style
from helpers.plots.style import Figure

Rows = Sequence[Sequence[Any] | None]  # by rank; None: this rank holds nothing that counts


def holdings(
    panels: Mapping[str, tuple[Rows, Rows]],
    *,
    title: str,
    owner: Callable[[Any], int | None],
    columns: int = 2,
    footer: str | None = None,
) -> Figure:
    """Draw, per panel, what each rank holds before (left) and after (right).

    `owner(number)` is the rank a number came from, which gives its colour, or None for a number that several ranks made (grey).
    """
    ranks = len(next(iter(panels.values()))[0])
    lines = -(-len(panels) // columns)
    told = "; ".join(f"{name}: from {_told(before)} to {_told(after)}" for name, (before, after) in panels.items())
    height = 0.9 + lines * (0.45 + 0.24 * ranks)
    figure, hidden = style.figure(title, height, alt=f"What ranks hold. {title}. {told}.", footer=footer)
    hidden.remove()
    for position, (name, (before, after)) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, position + 1)
        widths = [max((len(row) for row in rows if row), default=1) for rows in (before, after)]
        right = max(widths[0], 4) + 1.6
        for left, rows in ((0.0, before), (right, after)):
            for rank, row in enumerate(rows):
                for place, number in enumerate(row or ()):
                    came_from = owner(number)
                    whose = (
                        {"color": style.LIGHT} if came_from is None else {"color": style.PALETTE[came_from % 7], "alpha": 0.45}
                    )
                    style.box(axes, (left + place + 0.04, rank + 0.08), 0.92, 0.84, str(number), 7, linewidth=0, **whose)
        arrow = {"arrowstyle": "->", "color": style.GREY}
        axes.annotate("", (right - 0.3, ranks / 2), (right - 1.3, ranks / 2), arrowprops=arrow)
        axes.set(xlim=(0, right + max(widths[1], 4)), ylim=(ranks, 0))
        axes.set_title(name, fontsize=9, loc="left", pad=3)
        style.rank_rows(axes, ranks, 0.5, fontsize=8)
        style.boxes_only(axes)
    return figure


def _told(rows: Rows) -> str:
    return ", ".join(f"rank {rank} {list(row)}" for rank, row in enumerate(rows) if row)
