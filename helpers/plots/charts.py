"""Bars, stacks and sweeps, and `compare`: guess, predicted and measured side by side."""

import itertools
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, StrMethodFormatter

from helpers.plots import style
from helpers.plots.style import Figure, amount, scale

Value = float | Mapping[str, float]
Series = Sequence[float | None]
Marks = Mapping[str, float] | None
_LOOKS = {"guess": (style.LIGHT, "//"), "predicted": (style.BLUE, ""), "measured": (style.ORANGE, "..")}


def compare(
    *, guess: Any = ..., predicted: Value | None = None, measured: Value, unit: str, title: str | None = None, **options: Any
) -> Figure:
    """Bars of what was guessed, predicted and measured; the finding is a line such as "predicted 4 B, recorded 4 B: equal".

    Each is a number, or a mapping from names to numbers (then all have the same names). A guess of `...` and a prediction of None
    are left out. `unit` is "bytes" (shown in KiB … GiB; whole numbers in the line), "s", "B/s" or any other name, shown as it is.
    Errors are relative to what was measured. More options: those of `bars`.

    Raises TypeError for what is no number, ValueError for names that differ, infinite or missing numbers.
    """
    guessed = guess.values() if isinstance(guess, Mapping) else [guess]
    given = {"guess": None if any(part is ... for part in guessed) else guess, "predicted": predicted, "measured": measured}
    values = {name: _named(name, value) for name, value in given.items() if value is not None}
    real = values["measured"]
    for name, numbers in values.items():
        if numbers.keys() != real.keys():
            raise ValueError(f"{name} has {list(numbers)}, measured has {list(real)}: name the same things in both")
    words = {"guess": "your guess", "predicted": "predicted", "measured": "recorded" if unit == "bytes" else "measured"}
    lines, errors = [], {}
    for key in real:
        said = ", ".join(f"{words[name]} {amount(numbers[key], unit, True)}" for name, numbers in values.items())
        off = {name: relative_error(values[name][key], real[key]) for name in ("predicted", "guess") if name in values}
        judged = [("your guess " if name == "guess" else "") + error_in_words(error) for name, error in off.items()]
        lines.append(f"{key}: " * bool(key) + ": ".join(part for part in (said, "; ".join(judged)) if part))
        errors[key] = off.get("predicted", 0.0)
    worst = max(errors, key=lambda key: abs(errors[key]))
    if title is None and predicted is None:
        title = f"Measured: {amount(max(real.values()), unit)}"
    elif title is None and not errors[worst]:
        title = "Prediction and measurement are equal"
    elif title is None:
        which = f"Worst of {len(real)} predictions: {worst}," if worst else "The prediction is"
        title = f"{which} {error_in_words(errors[worst])}"
    groups = {key: {name: numbers[key] for name, numbers in values.items()} for key in real}
    return bars(groups if worst else groups[""], unit=unit, title=title, finding="\n".join(lines), **options)


def bars(
    values: Mapping[str, Value],
    *,
    unit: str,
    title: str,
    label: str = "",
    stack: bool = False,
    log: bool = False,
    limits: Marks = None,
    **text: Any,
) -> Figure:
    """Horizontal bars: one per name, or per name a group of bars (`{"name": {"series": value}}`), each with its value.

    `stack` puts a group's bars end to end, with their total. `log` draws positive values of different orders of magnitude on a
    logarithmic axis, not with `stack`. `limits` draws a named vertical line at each value: the memory of a GPU, a deadline. A
    series keeps its look in all groups; "guess", "predicted" and "measured" have theirs in all figures.
    More options: `finding` and `footer` of `style.figure`.
    """
    grouped, limits = any(isinstance(value, Mapping) for value in values.values()), limits or {}
    groups = {name: value if isinstance(value, Mapping) else {name: value} for name, value in values.items()}
    numbers = [value for group in groups.values() for value in group.values()]
    if log and (stack or min(numbers) <= 0):
        raise ValueError("a logarithmic axis shows positive values and no stacks: leave out log=True")
    series = list(dict.fromkeys(key for group in groups.values() for key in group))
    looks = {key: _LOOKS.get(key, style.look(number if grouped else 0)) for number, key in enumerate(series)}
    rows = {name: [group] if stack else [{key: value} for key, value in group.items()] for name, group in groups.items()}
    ends = [sum(parts.values()) for drawn in rows.values() for parts in drawn]
    factor, shown = scale([*ends, *limits.values()], unit)
    spoken = [
        f"{name} {key + ' ' if grouped else ''}{amount(value, unit)}"
        for name, group in groups.items()
        for key, value in group.items()
    ]
    alt = f"{'Stacked bars' if stack else 'Bar chart'}: {title}. {'; '.join(spoken)}."
    gap = 0.7 if grouped and not stack else 0.15
    height = sum(len(drawn) + gap for drawn in rows.values())
    figure, axes = style.figure(title, 1.2 + 0.35 * height + 0.35 * grouped, alt=alt, **text)
    top, ticks = 0.0, []
    for drawn in rows.values():
        for place, parts in enumerate(drawn):
            end = style.stacked_bar(axes, top + place, parts, looks, factor, 0.85)
            crossed = any(end <= limit <= 1.15 * end for limit in limits.values())
            ground = {"bbox": style.ON_WHITE} if crossed else {}
            axes.annotate(f" {amount(end, unit)}", (end * factor, top + place), va="center", fontsize=9, **ground)
        ticks.append(top + (len(drawn) - 1) / 2)
        top += len(drawn) + gap
    for (name, limit), dashes in zip(limits.items(), itertools.cycle(("--", ":", "-.")), strict=False):
        axes.axvline(limit * factor, color="black", linestyle=dashes, label=f"{name}: {amount(limit, unit)}")
    axes.set(xlabel=f"{label} ({shown})" if label and shown else label or shown)
    axes.set_yticks(ticks, list(rows))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.16)
    if log:
        axes.set_xscale("log")
        lowest, highest = min(numbers), max(numbers)
        axes.set_xlim(lowest * factor / 2, highest * factor * (highest / lowest) ** 0.2 * 2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    if grouped or limits:
        style.legend_above(axes, 4, handles=[*(style.patches(looks) if grouped else []), *axes.lines])
    return figure


def stacked(rows: Mapping[str, Mapping[str, float]], **options: Any) -> Figure:
    """`bars` end to end, one stack per row: `{"rank 0": {"parameters": …, "gradients": …}, …}`."""
    return bars(rows, stack=True, **options)


def sweep(
    x: Sequence[float],
    measured: Mapping[str, Series] | None = None,
    predicted: Mapping[str, Series] | None = None,
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    xunit: str = "",
    yunit: str = "",
    log: str = "",
    spread: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    marks: Marks = None,
    limits: Marks = None,
    **text: Any,
) -> Figure:
    """What was measured as markers, what was predicted as lines, over `x`; a series has one colour in both.

    None leaves a point out. `log` is "", "x", "y" or "xy". `spread` holds (lowest, highest) for each point of a measured series,
    drawn as error bars. `marks` draws a named vertical line at each x, `limits` a named horizontal one at each y. Units as in
    `compare`, more options as in `bars`.

    Raises ValueError for a series whose length is not that of `x`, where there is no point, and for a logarithmic axis that
    would have to show zero or less.
    """
    measured, predicted, spread, limits = measured or {}, predicted or {}, spread or {}, limits or {}
    for name, series in [*measured.items(), *predicted.items(), *spread.items()]:
        if len(series) != len(x):
            raise ValueError(f"series {name!r} has {len(series)} values for {len(x)} of x; use None for a point that is missing")
    kinds = {"predicted": predicted, "measured": measured}
    values = [value for named in kinds.values() for each in named.values() for value in each if value is not None]
    if not values:
        raise ValueError("no series has a point: there is nothing to draw")
    values += limits.values()
    spoken = [f"{kind} {name} {_ends(each, yunit)}" for kind, named in kinds.items() for name, each in named.items()]
    over = f"{xlabel} from {amount(x[0], xunit)} to {amount(x[-1], xunit)}"
    alt = f"Line chart of {ylabel} over {over}: {title}. {'; '.join(spoken)}."
    figure, axes = style.figure(title, 3.8, alt=alt, **text)
    xfactor, yfactor = _axis(axes, "x", xlabel, xunit, x, log), _axis(axes, "y", ylabel, yunit, values, log)
    if len(x) <= 10:
        axes.set_xticks([value * xfactor for value in x])
    if "y" not in log and min(values) >= 0:
        axes.update_datalim([(x[0] * xfactor, 0)])  # a height is read from zero
    names = list(dict.fromkeys([*predicted, *measured]))
    for kind, name in [(kind, name) for name in names for kind in kinds if name in kinds[kind]]:
        number = names.index(name) % 7
        ys = numpy.array(kinds[kind][name], dtype=float) * yfactor  # None becomes NaN
        there = numpy.isfinite(ys)
        shape: dict[str, Any] = {"marker": style.MARKERS[number]} if kind == "measured" else {}
        shape["linestyle"] = "" if kind == "measured" and name in predicted else style.DASHES[number]
        if kind == "measured" and name in spread:
            shape["yerr"] = abs(numpy.array(spread[name]).T * yfactor - ys)[:, there]
        legend = f"{name}, {kind}" if name and predicted else name or kind
        points = (numpy.array(x) * xfactor)[there], ys[there]
        axes.errorbar(*points, color=style.PALETTE[number], linewidth=1.3, capsize=3, label=legend, **shape)
    for name, at in (marks or {}).items():
        axes.axvline(at * xfactor, color=style.GREY, linestyle=":")
        place = {"xy": (at * xfactor, 0.98), "xycoords": ("data", "axes fraction"), "va": "top", "fontsize": 9}
        axes.annotate(f" {name}: {amount(at, xunit)}", **place, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    for name, at in limits.items():
        axes.axhline(at * yfactor, color="black", linestyle="--", linewidth=1, label=f"{name}: {amount(at, yunit)}")
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
    named = {str(key): number for key, number in value.items()} if isinstance(value, Mapping) else {"": value}
    if not named:
        raise ValueError(f"{name} is empty: there is nothing to compare")
    for key, number in named.items():
        where = f"{name}[{key!r}]" if key else name
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"{where} is {number!r}; it must be a number" + (", or ... for no guess" if name == "guess" else ""))
        if not math.isfinite(number):
            raise ValueError(f"{where} is {number}; it must be finite")
    return {key: float(number) if not isinstance(number, int) else number for key, number in named.items()}


def _ends(series: Series, unit: str) -> str:
    there = [value for value in series if value is not None]
    return f"from {amount(there[0], unit)} to {amount(there[-1], unit)}" if there else "without points"


def _axis(axes: Any, which: str, label: str, unit: str, values: Sequence[float], log: str) -> float:
    """Label an axis; on a logarithmic one the ticks carry their units. Returns the factor that values are drawn with."""
    axis = getattr(axes, f"{which}axis")
    if which not in log:
        factor, shown = scale(values, unit)
        axis.set_label_text(f"{label} ({shown})" if shown else label)
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        return factor
    if (least := min(values)) <= 0:
        raise ValueError(f"a logarithmic axis shows positive values only, and {which} has {least:g}: leave {which} out of log")
    base = 16 if unit == "bytes" else 10
    getattr(axes, f"set_{which}scale")("log", base=base)
    axis.set_label_text(label)
    axis.set_major_locator(LogLocator(base, subs=_ticks(base, max(values) / min(values))))
    axis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, unit)))
    axis.set_minor_locator(NullLocator())
    return 1.0


def _ticks(base: int, spread: float) -> tuple[float, ...]:
    """The multiples of a power of the base that get a tick: more of them where values span few powers."""
    return (1,) if base != 10 or spread >= 1e3 else (1, 2, 5) if spread < 30 else (1, 3)
