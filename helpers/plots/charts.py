"""Bars, stacks and sweeps, and `compare`: guess, predicted and measured side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, StrMethodFormatter

from helpers.plots import style
from helpers.plots.style import Figure, amount, scale

Value = float | Mapping[str, float]
_LOOKS = {"guess": (style.LIGHT, "//"), "predicted": (style.BLUE, ""), "measured": (style.ORANGE, "..")}


def compare(
    *,
    guess: Any = ...,
    predicted: Value | None = None,
    measured: Value,
    unit: str,
    title: str | None = None,
    footer: str | None = None,
) -> Figure:
    """Bars of what was guessed, predicted and measured; the finding is a line such as "predicted 4 B, recorded 4 B: equal".

    Each is a number, or a mapping from names to numbers (then all have the same names). A guess of `...` and a prediction of None
    are left out. `unit` is "bytes" (shown in KiB … GiB; whole numbers in the line), "s", "B/s" or any other name, shown as it is.
    Errors are relative to what was measured.

    Raises TypeError for what is no number, ValueError for names that differ, infinite or missing numbers.
    """
    given = {"guess": None if guess is ... else guess, "predicted": predicted, "measured": measured}
    values = {name: _named(name, value) for name, value in given.items() if value is not None}
    for name, numbers in values.items():
        if numbers.keys() != values["measured"].keys():
            raise ValueError(f"{name} has {list(numbers)}, measured has {list(values['measured'])}: name the same things in both")
    lines, worst = [], ("", 0.0)
    for key, real in values["measured"].items():
        said = [
            f"{'your guess' if name == 'guess' else name} {amount(numbers[key], unit, True)}" for name, numbers in values.items()
        ]
        said[-1] = said[-1].replace("measured", "recorded") if unit == "bytes" else said[-1]
        errors = {name: relative_error(values[name][key], real) for name in ("guess", "predicted") if name in values}
        verdict = error_in_words(errors["predicted"]) if "predicted" in errors else ""
        if "guess" in errors:
            verdict = f"{verdict}; your guess: {error_in_words(errors['guess'])}" if verdict else error_in_words(errors["guess"])
        lines.append(f"{key}: " * bool(key) + ", ".join(said) + f": {verdict}" * bool(verdict))
        if abs(errors.get("predicted", 0)) > abs(worst[1]):
            worst = (key, errors["predicted"])
    if title is None and predicted is None:
        title = f"Measured: {amount(max(values['measured'].values()), unit)}"
    elif title is None and worst[0]:
        title = f"Worst of {len(lines)} predictions: {worst[0]}, {error_in_words(worst[1])}"
    elif title is None:
        title = f"The prediction is {error_in_words(worst[1])}" if worst[1] else "Prediction and measurement are equal"
    groups = {key: {name: numbers[key] for name, numbers in values.items()} for key in values["measured"]}
    return bars(groups, unit=unit, title=title, finding="\n".join(lines), footer=footer)


def bars(
    values: Mapping[str, Value], *, unit: str, title: str, label: str = "", finding: str = "", footer: str | None = None
) -> Figure:
    """Horizontal bars: one per name, or per name a group of bars (`{"name": {"series": value}}`), each with its value."""
    groups = {name: dict(value) if isinstance(value, Mapping) else {"": value} for name, value in values.items()}
    if list(groups) == [""]:
        groups = {name: {name: value} for name, value in groups[""].items()}  # one group without a name: its series are the names
    series = list(dict.fromkeys(key for group in groups.values() for key in group))
    looks = {key: _LOOKS.get(key, (style.PALETTE[i % 7], style.HATCHES[i % 7])) for i, key in enumerate(series)}
    factor, shown = scale([value for group in groups.values() for value in group.values()], unit)
    spoken = [
        f"{name} {key if key != name else ''} {amount(value, unit)}"
        for name, group in groups.items()
        for key, value in group.items()
    ]
    alt = f"Bar chart: {title}. {'; '.join(' '.join(words.split()) for words in spoken)}."
    grouped = any(len(group) > 1 for group in groups.values())
    gap = 0.7 if grouped else 0.1
    rows = sum(len(group) + gap for group in groups.values())
    figure, axes = style.figure(title, 1.2 + 0.35 * rows + 0.3 * grouped, alt=alt, finding=finding, footer=footer)
    top, ticks = 0.0, {}
    for name, group in groups.items():
        ticks[name] = top + (len(group) - 1) / 2
        for place, (key, value) in enumerate(group.items()):
            color, hatch = looks[key]
            axes.barh(top + place, value * factor, 0.85, color=color, hatch=hatch, edgecolor="white", linewidth=0)
            axes.annotate(f" {amount(value, unit)}", (value * factor, top + place), va="center", fontsize=9)
        top += len(group) + gap
    axes.set_yticks(list(ticks.values()), list(ticks))
    _lying(axes, f"{label} ({shown})" if label and shown else label or shown)
    if grouped:
        patches = [Patch(facecolor=color, hatch=hatch, edgecolor="white", label=key) for key, (color, hatch) in looks.items()]
        style.legend_above(axes, 5, handles=patches)
    return figure


def stacked(
    rows: Mapping[str, Mapping[str, float]],
    *,
    unit: str,
    title: str,
    label: str = "",
    limits: Mapping[str, float] | None = None,
    finding: str = "",
    footer: str | None = None,
) -> Figure:
    """A horizontal stack per row, for example `{"rank 0": {"parameters": …, "gradients": …}}`, its total at its end.

    `limits` draws a named vertical line at each value: the memory of a GPU, a deadline. Parts keep their colour over all rows.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    totals = {name: sum(row.values()) for name, row in rows.items()}
    limits = limits or {}
    factor, shown = scale([*totals.values(), *limits.values()], unit)
    spoken = [
        f"{name}: " + ", ".join(f"{part} {amount(value, unit)}" for part, value in row.items()) for name, row in rows.items()
    ]
    figure, axes = style.figure(
        title, 1.9 + 0.45 * len(rows), alt=f"Stacked bars: {title}. {'; '.join(spoken)}.", finding=finding, footer=footer
    )
    for number, part in enumerate(parts):
        starts = [sum(row.get(before, 0) for before in parts[:number]) * factor for row in rows.values()]
        widths = [row.get(part, 0) * factor for row in rows.values()]
        color, hatch = style.PALETTE[number % 7], style.HATCHES[number % 7]
        axes.barh(list(rows), widths, 0.7, left=starts, label=part, color=color, hatch=hatch, edgecolor="white", linewidth=0)
    for name, total in totals.items():
        axes.annotate(f" {amount(total, unit)}", (total * factor, name), va="center", fontsize=9)
    for name, limit in limits.items():
        axes.axvline(limit * factor, color=style.VERMILION, linestyle="--", label=f"{name}: {amount(limit, unit)}")
    _lying(axes, f"{label} ({shown})" if label else shown)
    style.legend_above(axes, 4)
    return figure


def sweep(
    x: Sequence[float],
    measured: Mapping[str, Sequence[float | None]] | None = None,
    predicted: Mapping[str, Sequence[float | None]] | None = None,
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    xunit: str = "",
    yunit: str = "",
    log: str = "",
    spread: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    marks: Mapping[str, float] | None = None,
    finding: str = "",
    footer: str | None = None,
) -> Figure:
    """What was measured as markers, what was predicted as lines, over `x`; a series has one colour in both.

    None leaves a point out. `log` is "", "x", "y" or "xy". `spread` holds (lowest, highest) for each point of a measured series,
    drawn as error bars. `marks` draws a named vertical line at each x. Units as in `compare`.

    Raises ValueError for a series whose length is not that of `x`.
    """
    measured, predicted, spread, marks = measured or {}, predicted or {}, spread or {}, marks or {}
    for name, series in [*measured.items(), *predicted.items(), *spread.items()]:
        if len(series) != len(x):
            raise ValueError(f"series {name!r} has {len(series)} values for {len(x)} of x; use None for a point that is missing")
    kinds = {"measured": measured, "predicted": predicted}
    values = [value for kind in kinds.values() for series in kind.values() for value in series if value is not None]
    spoken = [f"{kind} {name} {_ends(series, yunit)}" for kind, named in kinds.items() for name, series in named.items()]
    over = f"{xlabel} from {amount(x[0], xunit)} to {amount(x[-1], xunit)}"
    alt = f"Line chart of {ylabel} over {over}: {title}. {'; '.join(spoken)}."
    figure, axes = style.figure(title, 3.8, alt=alt, finding=finding, footer=footer)
    xfactor = _axis(axes, "x", xlabel, xunit, x, "x" in log, x if len(x) <= 10 else None)
    yfactor = _axis(axes, "y", ylabel, yunit, values, "y" in log)
    if "y" not in log and min(values) >= 0:
        axes.update_datalim([(x[0] * xfactor, 0)])  # a height is read from zero
    for number, name in enumerate(dict.fromkeys([*predicted, *measured])):
        color, marker, dashes = style.PALETTE[number % 7], style.MARKERS[number % 7], style.DASHES[number % 7]
        if name in predicted:
            xs, ys, _ = _points(x, predicted[name], xfactor, yfactor)
            axes.plot(xs, ys, color=color, linestyle=dashes, label=f"{name}, predicted" if name else "predicted")
        if name in measured:
            xs, ys, kept = _points(x, measured[name], xfactor, yfactor)
            ends = [
                [abs(spread[name][i][side] * yfactor - y) for i, y in zip(kept, ys, strict=True)]
                for side in (0, 1)
                if name in spread
            ]
            line, label = (
                ("" if name in predicted else dashes),
                (f"{name}, measured" if name and predicted else name or "measured"),
            )
            axes.errorbar(
                xs, ys, yerr=ends or None, color=color, marker=marker, linestyle=line, linewidth=1, capsize=3, label=label
            )
    for name, at in marks.items():
        axes.axvline(at * xfactor, color=style.GREY, linestyle=":")
        axes.annotate(
            f" {name}: {amount(at, xunit)}", (at * xfactor, 0.98), xycoords=("data", "axes fraction"), va="top", fontsize=9
        )
    axes.legend(fontsize=9, frameon=False)
    return figure


def relative_error(said: float, real: float) -> float:
    """(said − real) / real; 0 where both are 0, infinite where only `real` is."""
    return (said - real) / real if real else (0.0 if said == real else math.inf)


def error_in_words(error: float) -> str:
    """ "equal", "8 % too low", "4.2 times too high", for an error relative to what was measured."""
    side = "high" if error > 0 else "low"
    if error == 0 or math.isinf(error):
        return "nothing was measured" if error else "equal"
    if error > 2 or -1 < error < -2 / 3:
        return f"{1 + error if error > 0 else 1 / (1 + error):,.3g} times too {side}"
    return "equal within 0.1 %" if abs(error) < 0.001 else f"{100 * abs(error):.{0 if abs(error) >= 0.1 else 1}f} % too {side}"


def _named(name: str, value: Value) -> dict[str, float]:
    """A number or a mapping as a mapping of finite numbers."""
    named = dict(value) if isinstance(value, Mapping) else {"": value}
    for key, number in named.items():
        where = f"{name}[{key!r}]" if key else name
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"{where} is {number!r}; it must be a number" + (", or ... for no guess" if name == "guess" else ""))
        if not math.isfinite(number):
            raise ValueError(f"{where} is {number}; it must be finite")
    return {key: float(number) if not isinstance(number, int) else number for key, number in named.items()}


def _lying(axes: Any, label: str) -> None:
    """Axes of horizontal bars: the first on top, room for the values at their ends."""
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.16)
    axes.set_xlabel(label)


def _axis(
    axes: Any, which: str, label: str, unit: str, values: Sequence[float], log: bool, ticks: Sequence[float] | None = None
) -> float:
    """Label an axis; on a logarithmic one the ticks carry their units. Returns the factor that values are drawn with."""
    factor, shown = (1.0, "") if log else scale(values, unit)
    axis = getattr(axes, f"{which}axis")
    axis.set_label_text(f"{label} ({shown})" if shown else label)
    if log:
        base, wide = (16, True) if unit == "bytes" else (10, max(values) >= 1e3 * min(values))
        getattr(axes, f"set_{which}scale")("log", base=base)
        axis.set_major_locator(LogLocator(base=base, subs=(1,) if wide else (1, 3)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, unit)))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    if ticks is not None:
        axis.set_ticks([value * factor for value in ticks])
    return factor


def _points(
    x: Sequence[float], series: Sequence[float | None], xfactor: float, yfactor: float
) -> tuple[list[float], list[float], list[int]]:
    """Where the points of a series stand, and which of them exist."""
    kept = [(at * xfactor, value * yfactor, i) for i, (at, value) in enumerate(zip(x, series, strict=True)) if value is not None]
    return [at for at, _, _ in kept], [value for _, value, _ in kept], [i for _, _, i in kept]


def _ends(series: Sequence[float | None], unit: str) -> str:
    there = [value for value in series if value is not None]
    return f"from {amount(there[0], unit)} to {amount(there[-1], unit)}" if there else "without points"
