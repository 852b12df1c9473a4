"""A chart of questions: asked from top to bottom, each "no" leads to what to look at."""

import textwrap
from collections.abc import Sequence
from typing import Any

from helpers.plots import style
from helpers.plots.style import Figure

_LINE, _HEAD, _LEFT, _RIGHT = 0.155, 0.2, (0.0, 2.5), (3.2, 3.8)  # inches: heights of lines; where a column begins, its width


def decisions(steps: Sequence[tuple[str, str, str]], *, end: str, title: str, footer: str = "") -> Figure:
    """Draw (question, heading, text) from top to bottom: "yes" leads to the next question, at last to `end`, "no" to the right.

    The right box has the heading in bold and the text, which may have several lines, below it. Nothing was measured, so there is
    no machine in the footer.

    Raises ValueError without a step.
    """
    if not steps:
        raise ValueError("a chart needs at least one step: (question, heading, text)")
    rows = [
        (textwrap.wrap(question, 30), heading, [part for line in text.splitlines() for part in textwrap.wrap(line, 58)])
        for question, heading, text in steps
    ]
    told = "; ".join(f"{question} If not: {heading}: {text}" for question, heading, text in steps)
    heights = [0.2 + max(_LINE * len(asked), _HEAD + _LINE * len(lines)) for asked, _, lines in rows]
    gap, last = 0.3, 2 * _LINE
    total = sum(heights) + gap * len(rows) + last
    figure, axes = style.figure(title, total + 0.75, alt=f"Decision chart. {told}. If all are answered yes: {end}", footer=footer)
    top = 0.0
    for number, ((asked, heading, lines), height) in enumerate(zip(rows, heights, strict=True)):
        middle, color = top + height / 2, style.PALETTE[number % 7]
        look = {"facecolor": f"{color}22", "edgecolor": color, "linewidth": 1.3}
        style.box(axes, (_LEFT[0], top), _LEFT[1], height, "\n".join(asked), 9, **look)
        style.box(axes, (_RIGHT[0], top), _RIGHT[1], height, "", 9, **look)
        axes.text(_RIGHT[0] + 0.1, top + 0.09, heading, va="top", fontsize=9, fontweight="bold")
        axes.text(_RIGHT[0] + 0.1, top + 0.09 + _HEAD, "\n".join(lines), va="top", fontsize=8, linespacing=1.35)
        _arrow(axes, (_LEFT[1], middle), (_RIGHT[0], middle), "no", (0, -0.09))
        _arrow(axes, (_LEFT[1] / 2, top + height), (_LEFT[1] / 2, top + height + gap), "yes", (0.2, 0.05))
        top += height + gap
    grey = {"facecolor": f"{style.GREY}22", "edgecolor": style.GREY, "linewidth": 1.3}
    style.box(axes, (_LEFT[0], top), _LEFT[1], last, end, 9, **grey)
    axes.set(xlim=(-0.1, _RIGHT[0] + _RIGHT[1] + 0.1), ylim=(total + 0.05, -0.08), yticks=[])
    style.boxes_only(axes)
    return figure


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], word: str, beside: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0})
    middle = ((start[0] + end[0]) / 2 + beside[0], (start[1] + end[1]) / 2 + beside[1])
    axes.text(*middle, word, ha="center", va="bottom" if beside[1] < 0 else "center", fontsize=9)
