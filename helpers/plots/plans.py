"""A tensor-parallel plan: the matrices of one block, coloured by the rank that holds each piece."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Rectangle

from helpers.plots import style
from helpers.plots.style import Figure

if TYPE_CHECKING:
    from helpers.shard_plan import Shard, Shards

GAP = 0.35  # between matrices, as a share of the row's longest side


def shard_plan(shards: Shards, *, layer: int = 0, title: str | None = None) -> Figure:
    """Draw the matrices of decoder layer `layer`, then embedding and output matrix, from what `shard_plan.shards` returns.

    A matrix is drawn as input rows × output columns, so that column-wise pieces are columns (PyTorch stores it transposed).
    Sides are square roots of the sizes, capped at three times the shortest. Grey is held whole by every rank.
    """
    lines: dict[str, list[Shard]] = {}
    for row in shards.rows:
        if len(row.shape) == 2 and (re.search(rf"\.{layer}\.", row.name) or not re.search(r"\.\d+\.", row.name)):
            block = row.name.split(".")[-3] if re.search(r"\.\d+\.", row.name) else "ends"
            lines.setdefault(block, []).append(row)
    lines["ends"] = lines.pop("ends", [])
    held, tp = shards.parameters, shards.tp
    share = max(held) / shards.whole
    told = f"{tp} ranks: each holds {max(held):,} of {shards.whole:,} parameters ({share:.1%})"
    shapes = "; ".join(f"{_label(row)} {row.style or 'whole'}" for rows in lines.values() for row in rows)
    figure, axes = style.figure(
        title or told, 0.9 + 1.55 * len(lines), alt=f"Matrices of one layer by rank. {told}. {shapes}.", finding=told, footer=""
    )
    y = 0.0
    for name, rows in lines.items():
        sides = [[math.sqrt(size) for size in _sizes(row)] for row in rows]
        shortest = min((side for pair in sides for side in pair), default=1)
        unit = 1 / (3 * shortest)
        x = 0.0
        for row, pair in zip(rows, sides, strict=True):
            height, width = (min(side * unit, 1) for side in pair)
            _matrix(axes, x, y + (1 - height) / 2, width, height, row, tp)
            x += max(width, 0.75) + GAP
        axes.annotate(name.replace("_", " "), (-0.15, y + 0.5), ha="right", va="center", fontsize=9, fontweight="bold")
        y += 1.75
    axes.set(xlim=(-0.2, 5.2), ylim=(y, -0.35), aspect="equal")
    axes.axis("off")
    looks = {f"rank {rank}": style.look(rank) for rank in range(tp)} | {"every rank": (style.LIGHT, "")}
    axes.legend(handles=style.patches(looks), loc="upper right", fontsize=9, frameon=False)
    return figure


def _sizes(row: Shard) -> tuple[int, int]:
    """(inputs, outputs): an embedding is stored that way round, a linear layer's weight the other."""
    first, second = row.shape
    return (first, second) if _embeds(row) else (second, first)


def _embeds(row: Shard) -> bool:
    return "embed" in row.name or "wte" in row.name


def _label(row: Shard) -> str:
    return row.name.split(".")[-2]


def _matrix(axes: Any, x: float, y: float, width: float, height: float, row: Shard, tp: int) -> None:
    inputs, outputs = _sizes(row)
    axes.annotate(f"{_label(row)}\n{inputs:,} → {outputs:,}\n{row.style or 'whole'}", (x, y - 0.04), fontsize=7, va="bottom")
    if row.style is None:
        axes.add_patch(Rectangle((x, y), width, height, facecolor=style.LIGHT, edgecolor="white"))
        return
    start = 0.0
    for rank in range(tp):
        color, hatch = style.look(rank)
        part = [held / whole for held, whole in zip(row.shapes[rank], row.shape, strict=True)]
        down, across = part if _embeds(row) else part[::-1]
        at = (x + start * width, y) if down == 1 else (x, y + start * height)
        axes.add_patch(
            Rectangle(at, width * across, height * down, facecolor=color, hatch=hatch, edgecolor="white", linewidth=0.8)
        )
        start += across if down == 1 else down
