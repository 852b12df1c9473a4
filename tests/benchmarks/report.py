"""What a run of benchmarks leaves: a table to read, a figure, and a file with every sample, the date and the machine."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator

from helpers import machine
from helpers.plots import style

from .framework import Benchmark, Claim, Findings, Row

STILL_QUIET = 0.25  # cores used by others while a benchmark runs, above which its times are marked as disturbed
_PACKAGES = ("torch", "accelerate", "transformers", "torchrunx", "nbdistributed", "ipykernel")


@dataclass(frozen=True)
class Outcome:
    """One benchmark that ran: its wall time, the cores that others used meanwhile, and findings or an error."""

    benchmark: Benchmark
    seconds: float
    others: float
    findings: Findings
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and all(claim.holds for claim in self.findings.claims)

    @property
    def quiet(self) -> bool:
        return self.others <= STILL_QUIET


def table(outcome: Outcome) -> str:
    """The rows, the claims with their verdicts, and the notes, as text."""
    head = f"{outcome.benchmark.full_name}: {outcome.benchmark.summary} ({outcome.seconds:.0f} s)"
    lines = [head, *_rows_as_text(outcome.findings.rows)]
    lines += [f"  {'holds' if claim.holds else 'FAILS'}  {claim.text}: {_measured(claim)}" for claim in outcome.findings.claims]
    lines += [f"  note   {note}" for note in outcome.findings.notes]
    if outcome.error:
        lines.append(f"  ERROR  {outcome.error}")
    if not outcome.quiet:
        lines.append(f"  note   other processes used {outcome.others:.2f} cores meanwhile: these times are disturbed")
    return "\n".join(lines)


def _rows_as_text(rows: Sequence[Row]) -> list[str]:
    cells = [("", "median", "lowest … highest", "n", "")]
    for row in rows:
        spread = f"{_amount(min(row.samples), row.unit)} … {_amount(max(row.samples), row.unit)}" if row.samples else ""
        cells.append((row.name, _amount(row.median, row.unit), spread, str(len(row.samples)), row.note))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    return [
        f"  {name:<{widths[0]}}  {median:>{widths[1]}}  {spread:>{widths[2]}}  {count:>{widths[3]}}  {note}".rstrip()
        for name, median, spread, count, note in (cells if rows else [])
    ]


def _amount(value: float, unit: str) -> str:
    return style.amount(value, unit) if math.isfinite(value) else "–"


def _measured(claim: Claim) -> str:
    if claim.unit == "true":
        return "shown" if claim.holds else "not shown"
    limits = [f"at least {_amount(claim.least, claim.unit)}"] * math.isfinite(claim.least)
    limits += [f"at most {_amount(claim.most, claim.unit)}"] * math.isfinite(claim.most)
    return f"{_amount(claim.measured, claim.unit)} ({' and '.join(limits)} required)"


def figure(outcome: Outcome) -> style.Figure | None:
    """Medians as points on a logarithmic axis, each with its lowest and highest sample; the rows that have the first's unit."""
    drawn = [row for row in outcome.findings.rows if row.samples and row.unit == outcome.findings.rows[0].unit]
    if not drawn or min(min(row.samples) for row in drawn) <= 0:
        return None
    spoken = "; ".join(f"{row.name} {_amount(row.median, row.unit)}" for row in drawn)
    title = outcome.findings.finding or outcome.benchmark.summary
    footer = f"{style.measured_on()}, {_today():%Y-%m-%d}"
    made, axes = style.figure(title, 1.4 + 0.34 * len(drawn), alt=f"Medians on a logarithmic axis: {spoken}.", footer=footer)
    for place, row in enumerate(drawn):
        color, marker = (style.VERMILION, "s") if row.name.startswith("helpers.") else (style.BLUE, "o")
        axes.plot([min(row.samples), max(row.samples)], [place, place], color=style.LIGHT, linewidth=6, solid_capstyle="butt")
        axes.plot(row.median, place, marker, color=color)
        text = (row.median, place)
        axes.annotate(_amount(row.median, row.unit), text, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xscale("log")
    decades = math.log10(max(max(row.samples) for row in drawn) / min(min(row.samples) for row in drawn))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 1.5 else (1.0, 2.0, 5.0), numticks=6))
    axes.xaxis.set_major_formatter(lambda value, _: _amount(value, drawn[0].unit))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_yticks(range(len(drawn)), [row.name for row in drawn])
    axes.set_ylim(len(drawn) - 0.4, -0.8)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.08)
    axes.set_xlabel("medians, each over lowest to highest")
    return made


def save(outcomes: Sequence[Outcome], folder: Path, prefix: str = "") -> list[Path]:
    """Write `<prefix><topic>.json` per topic and `<prefix><topic>_<name>.png` per benchmark; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for topic, of_topic in groupby(outcomes, lambda outcome: outcome.benchmark.topic):
        path, outcomes_of_topic = folder / f"{prefix}{topic}.json", list(of_topic)
        path.write_text(json.dumps(as_json(outcomes_of_topic), indent=1, ensure_ascii=False) + "\n")
        written.append(path)
        for outcome in outcomes_of_topic:
            if made := figure(outcome):
                written.append(folder / f"{prefix}{topic}_{outcome.benchmark.name}.png")
                written[-1].write_bytes(made.png())
    return written


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The benchmarks of a topic with all samples, when they ran and where."""
    return {
        "date": f"{_today():%Y-%m-%d %H:%M} UTC",
        "machine": machine.describe().line,
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "quiet": all(outcome.quiet for outcome in outcomes),
        "benchmarks": [_outcome_as_json(outcome) for outcome in outcomes],
    }


def _outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    findings = outcome.findings
    return {
        "name": outcome.benchmark.name,
        "summary": outcome.benchmark.summary,
        "finding": findings.finding,
        "seconds": round(outcome.seconds, 1),
        "cores_used_by_others": round(outcome.others, 3),
        "passed": outcome.passed,
        "error": outcome.error,
        "rows": [
            {
                "name": row.name,
                "unit": row.unit,
                "median": _rounded(row.median),
                "samples": [_rounded(sample) for sample in row.samples],
                "note": row.note,
            }
            for row in findings.rows
        ],
        "claims": [
            {
                "text": claim.text,
                "measured": _rounded(claim.measured),
                "least": _rounded(claim.least),
                "most": _rounded(claim.most),
                "unit": claim.unit,
                "holds": claim.holds,
            }
            for claim in findings.claims
        ],
        "notes": list(findings.notes),
    }


def _today() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _rounded(value: float) -> float | None:
    """Six digits; None for what JSON cannot say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
