"""Print predictions beside published measurements: `make predict-report`, or `python tools/predict_report.py`.

Every row of tests/data/published.csv is listed: predicted, published, error, and the reason where the error exceeds 25 % or the
row isn't scored. A figure and the numbers go to data/recorded/predict_report.png and .json, the same bytes each time.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator

sys.path.insert(0, str(Path(__file__).parent.parent))
import published
import published_times
from published import Line

from helpers.plots import style

RECORDED = Path(__file__).parent.parent / "data" / "recorded"
TIE = 0.05  # layouts that differ by less count as equal
LEAST = 5  # layouts that make a group whose order is judged
LIMITS = {"training peak": 0.12, "collectives": 0.20, "training": 0.20, "decode": 0.20, "KV cache": 0.02}  # of the median error
PANELS = {  # of the figure: the metrics shown, their unit
    "training peak": ({"peak_gpu_memory"}, "GiB or GB"),
    "KV cache": ({"kv_cache_gib_per_gpu"}, "GiB"),
    "collectives": ({"busbw"}, "GB/s on the bus"),
    "training": ({"tokens_per_s_per_gpu"}, "tokens/s a GPU"),
    "training steps": ({"step_time"}, "s"),
    "decode": ({"decode_tokens_per_s", "s_per_token"}, "tokens/s"),
}
NOTE = """
BL rows do not name their tool; the same notes read nvidia-smi, so the CUDA context that they state (1573 MiB) is added to the
prediction. GB is 10^9 bytes in BL rows and 2^30 in USP rows, whose source labels GiB as GB."""


def lines() -> list[Line]:
    """Return every row with its prediction, in the order of the table."""
    found = [
        *published.memory_lines(), *published_times.training(), *published_times.decoding(), *published_times.collectives()
    ]  # fmt: skip
    place = {row["id"]: index for index, row in enumerate(published.rows())}
    return sorted(found, key=lambda line: place[line.id])


def scores(found: Sequence[Line]) -> dict[str, tuple[int, float, float]]:
    """Return for each scored group: rows, median absolute error, largest absolute error."""
    groups: dict[str, list[float]] = {}
    for line in found:
        if line.group and line.error is not None:
            groups.setdefault(line.group, []).append(abs(line.error))
    return {name: (len(errors), statistics.median(errors), max(errors)) for name, errors in groups.items()}


def scores_by_source(found: Sequence[Line]) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Return the same for each scored group's rows of one source, by group and the source's short name."""
    sources = dict.fromkeys(published.source_of(line.id) for line in found)
    own = {source: scores([line for line in found if published.source_of(line.id) == source]) for source in sources}
    return {(name, source): own[source][name] for name in scores(found) for source in sources if name in own[source]}


def orders(found: Sequence[Line]) -> list[dict[str, Any]]:
    """Return for each group of layouts of one model on the same GPUs: Spearman's correlation and the place of the published best.

    Times that differ by less than 5 % count as equal: they share a rank, and the place is one more than the layouts predicted
    faster by more than that. `spearman_exact` is without this.
    """
    rows = {row["id"]: row for row in published.rows()}
    groups: dict[tuple[str, ...], list[tuple[float, float, str]]] = {}
    for line in found:
        row = rows[line.id]
        if line.metric in ("step_time", "tokens_per_s_per_gpu") and line.predicted:
            key = (published.source_of(line.id), row["model"], row["gpu_type"], row["gpus"])
            sign = 1 if line.metric == "step_time" else -1
            groups.setdefault(key, []).append((line.predicted**sign, line.published**sign, line.id))
    result = []
    for (source, model, _, gpus), each in groups.items():
        if len(each) < LEAST:
            continue
        predicted, measured = [one[0] for one in each], [one[1] for one in each]
        best = predicted[measured.index(min(measured))]
        result.append(
            {
                "group": f"{source}: {model.split(' (')[0]} on {gpus} GPUs",
                "layouts": len(each),
                "spearman": statistics.correlation(_ranks(predicted, TIE), _ranks(measured, TIE)),
                "spearman_exact": statistics.correlation(_ranks(predicted, 0), _ranks(measured, 0)),
                "place_of_best": 1 + sum(one < best * (1 - TIE) for one in predicted),
            }
        )
    return result


def _ranks(times: list[float], tie: float) -> list[float]:
    """Ranks of times; those within `tie` of the fastest that has no rank yet share the middle one."""
    ranks, left = [0.0] * len(times), sorted(range(len(times)), key=times.__getitem__)
    while left:
        equal = [index for index in left if times[index] <= times[left[0]] * (1 + tie)]
        for index in equal:
            ranks[index] = len(times) - len(left) + (len(equal) + 1) / 2
        left = left[len(equal) :]
    return ranks


def figure(found: Sequence[Line]) -> style.Figure:
    """Return predicted over published, both logarithmic, a panel for each kind with a limit, and the sources' markers."""
    reached = scores(found)
    spoken = "; ".join(f"{name} {reached[name][1]:.1%}" for name in LIMITS)
    made, axes = style.figure(
        f"Half of all predictions of each kind are within {max(reached[name][1] for name in LIMITS):.0%} of what was published",
        5.6,
        alt=f"Predicted over published values in five panels, near the line of equality. Median absolute errors: {spoken}.",
        footer="published measurements with their sources: tests/data/published.csv; rows that gave a constant are left out",
    )
    axes.remove()
    for place, (name, (metrics, unit)) in enumerate(PANELS.items(), 1):
        axes = made.add_subplot(2, 3, place)
        lines = [line for line in found if line.group and line.metric in metrics]
        for number, source in enumerate(dict.fromkeys(published.source_of(line.id) for line in lines)):
            points = [_point(line) for line in lines if line.id.startswith(f"{source}-")]
            look = {"color": style.PALETTE[number], "marker": style.MARKERS[number], "linestyle": "", "markersize": 5}
            axes.plot(*zip(*points, strict=True), label=source, alpha=0.8, **look)
        values = [value for line in lines for value in _point(line)]
        ends = [0.7 * min(values), 1.4 * max(values)]
        axes.plot(ends, ends, color=style.GREY, linewidth=1)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"published, {unit}", ylabel="predicted")
        half = statistics.median(abs(line.error or 0) for line in lines)
        axes.set_title(f"{name}: half within {half:.1%}", fontsize=8, loc="left")
        axes.legend(fontsize=7, loc="upper left", handletextpad=0.1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if max(values) < 1000 * min(values) else (1.0,), numticks=5))
            axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
            axis.set_minor_formatter(lambda value, _: "")
            axis.label.set_size(8)
        axes.tick_params(labelsize=7)
    return made


def _point(line: Line) -> tuple[float, float]:
    """Published and predicted; seconds a token as tokens a second."""
    assert line.predicted is not None
    pair = (line.published, line.predicted)
    return (1 / pair[0], 1 / pair[1]) if line.metric == "s_per_token" else pair


def table(found: Sequence[Line]) -> str:
    """Return all rows as text, scored ones first."""
    parts = []
    for heading, chosen in (("Scored", True), ("Not scored", False)):
        parts.append(f"\n{heading}\n{'row':<11}{'metric':<26}{'predicted':>13}{'published':>13} {'unit':<10}{'error':>8}  reason")
        for line in found:
            if bool(line.group) is not chosen:
                continue
            predicted = "" if line.predicted is None else f"{line.predicted:,.2f}"
            error = "" if line.error is None else f"{line.error:+.1%}"
            reason = line.reason if not chosen or (line.error is not None and abs(line.error) > 0.25) else ""
            numbers = f"{predicted:>13}{line.published:>13,.2f} {line.unit.split(' ')[0]:<10}{error:>8}"
            parts.append(f"{line.id:<11}{line.metric:<26}{numbers}  {reason}".rstrip())
    return "\n".join(parts)


def as_json(found: Sequence[Line]) -> dict[str, Any]:
    """Return rows, scores (by kind, by kind and source) and orders with six digits, for the notebook that shows them."""
    rows = {row["id"]: row for row in published.rows()}
    told = []
    for line in found:
        row, plain = rows[line.id], asdict(line)
        plain |= {"predicted": _rounded(line.predicted), "error": _rounded(line.error), "source": published.source_of(line.id)}
        told.append(plain | {"model": row["model"].split(" (")[0], "gpus": row["gpus"], "gpu": row["gpu_type"]})
    limited = {
        name: {"rows": count, "median": _rounded(median), "largest": _rounded(largest), "limit": LIMITS.get(name)}
        for name, (count, median, largest) in scores(found).items()
    }
    of_source = [
        {"kind": name, "source": source, "rows": count, "median": _rounded(median), "largest": _rounded(largest)}
        for (name, source), (count, median, largest) in scores_by_source(found).items()
    ]
    ordered = [
        {key: _rounded(value) if isinstance(value, float) else value for key, value in each.items()} for each in orders(found)
    ]
    return {"lines": told, "scores": limited, "scores_by_source": of_source, "orders": ordered}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def main(folder: Path = RECORDED) -> None:
    found = lines()
    print(table(found))
    print("\nScores: rows, median and largest absolute error, limit of the median")
    for name, (count, median, largest) in scores(found).items():
        limit = f"{LIMITS[name]:.0%}" if name in LIMITS else ""
        print(f"{name:<20}{count:>4}{median:>9.1%}{largest:>9.1%}{limit:>7}")
    print("\nScores by source: rows, median and largest absolute error")
    for (name, source), (count, median, largest) in scores_by_source(found).items():
        print(f"{name:<20}{source:<6}{count:>4}{median:>9.1%}{largest:>9.1%}")
    print("\nOrder of layouts: layouts, Spearman's correlation with ties under 5 % and without, place of the published best")
    for each in orders(found):
        shares = f"{each['spearman']:>8.2f}{each['spearman_exact']:>8.2f}"
        print(f"{each['group']:<46}{each['layouts']:>4}{shares}{each['place_of_best']:>4}")
    print(NOTE)
    (folder / "predict_report.json").write_text(json.dumps(as_json(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "predict_report.png").write_bytes(figure(found).png())


if __name__ == "__main__":
    main()
