"""A tensor-parallel plan: the matrices of one block, coloured by the rank that holds each piece."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Rectangle

from helpers.plots import style
from helpers.plots.style import Figure
from helpers.shard_plan.anatomy import ROLES

if TYPE_CHECKING:
    from helpers.shard_plan import Shard, Shards

GAP, LABEL = 0.35, 0.6  # between matrices, and above each, where the longest side is 1


def shard_plan(shards: Shards, *, title: str | None = None) -> Figure:
    """Draw the matrices of the first decoder layer, then embedding and output matrix, from what `shard_plan.shards` returns.

    A matrix is drawn as input rows × output columns, so that column-wise pieces are columns (PyTorch stores it transposed).
    Sides are square roots of the sizes, capped at three times the shortest. Grey is held whole by every rank.
    """
    lines: dict[str, list[Shard]] = {}
    for row in shards.rows:
        layer = re.search(r"\.(\d+)\.", row.name)
        if len(row.shape) == 2 and (layer is None or layer[1] == "0"):
            block = row.name.split(".")[-3] if layer else "ends"
            lines.setdefault("layer" if block.isdigit() else block, []).append(row)
    lines["ends"] = lines.pop("ends")
    for line in lines.values():
        line.sort(key=lambda row: _label(row) in ROLES["o"])  # in the order of use
    matrices = [row for line in lines.values() for row in line]
    held, tp = shards.parameters, shards.tp
    told = f"{tp} ranks: each holds {max(held):,} of {shards.whole:,} parameters ({max(held) / shards.whole:.1%})"
    shapes = "; ".join(f"{_label(row)} {row.style or 'whole'}" for row in matrices)
    unit = 1 / (3 * math.sqrt(min(size for row in matrices for size in row.shape)))
    sides = {row.name: [min(math.sqrt(size) * unit, 1) for size in _sizes(row)] for row in matrices}
    heights = [LABEL + max(sides[row.name][0] for row in line) for line in lines.values()]
    alt = f"Matrices of one layer by rank. {told}. {shapes}."
    figure, axes = style.figure(title or told, 0.6 + sum(heights), alt=alt, finding=told, footer="")
    y = LABEL
    for (name, line), height in zip(lines.items(), heights, strict=True):
        x = 0.0
        for row in line:
            _matrix(axes, x, y, row, *sides[row.name])
            x += max(sides[row.name][1], 0.9) + GAP
        axes.annotate(name.replace("_", " "), (-0.2, y + 0.05), ha="right", va="top", fontsize=9, fontweight="bold")
        y += height
    axes.set(xlim=(-1.1, 5.4), ylim=(y - LABEL + 0.05, 0))
    axes.axis("off")
    looks = {f"rank {rank}": style.look(rank) for rank in range(tp)}
    if any(row.style is None for row in matrices):
        looks["every rank"] = (style.LIGHT, "")
    axes.legend(handles=style.patches(looks), loc="lower right", fontsize=9, frameon=False)
    return figure


def _sizes(row: Shard) -> tuple[int, int]:
    """(inputs, outputs): an embedding is stored that way round, a linear layer's weight the other."""
    first, second = row.shape
    return (first, second) if _embeds(row) else (second, first)


def _embeds(row: Shard) -> bool:
    return "embed" in row.name or "wte" in row.name


def _label(row: Shard) -> str:
    return row.name.split(".")[-2]


def _matrix(axes: Any, x: float, y: float, row: Shard, height: float, width: float) -> None:
    inputs, outputs = _sizes(row)
    axes.annotate(f"{_label(row)}\n{inputs:,} → {outputs:,}\n{row.style or 'whole'}", (x, y - 0.04), fontsize=7, va="bottom")
    pieces = [(style.LIGHT, "", row.shape)]
    if row.style is not None:
        pieces = [(*style.look(rank), shape) for rank, shape in enumerate(row.shapes)]
    for color, hatch, shape in pieces:
        part = [held / whole for held, whole in zip(shape, row.shape, strict=True)]
        down, across = part if _embeds(row) else part[::-1]
        look: dict[str, Any] = {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.8}
        axes.add_patch(Rectangle((x, y), width * across, height * down, **look))
        x, y = (x + width * across, y) if down == 1 else (x, y + height * down)
