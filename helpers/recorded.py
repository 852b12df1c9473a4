"""Measure here, or go on with what was measured elsewhere and kept in `data/recorded/`, marked with machine and date.

A notebook that needs what not every machine has (two hosts, GPUs) asks for its measurement through `measured_or_recorded`.
`WORKSHOP_WRITE_RECORDINGS=1 make notebooks NB=06` on a machine that has it writes the recordings anew.
"""

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import machine, record

FOLDER = record.ROOT / "data" / "recorded"


@dataclass(frozen=True)
class Measurement:
    """`values` as JSON gives them back (keys are texts, tuples are lists), `where` for figure footers, `here` if measured now."""

    values: Any
    where: str
    here: bool


def measured_or_recorded(name: str, measure: Callable[[], Any], possible: bool, why: str) -> Measurement:
    """What `measure` returns where that is `possible`; else what `data/recorded/<name>.json` holds, after saying `why`.

    Raises FileNotFoundError where it is not possible and nothing was recorded under that name.
    """
    file = FOLDER / f"{name}.json"
    if not possible:
        if not file.exists():
            raise FileNotFoundError(f"{name} cannot be measured here ({why}), and {file.name} was never recorded")
        page = json.loads(file.read_text(encoding="utf-8"))
        print(f"Not measured here: {why}. What follows was recorded on {page['machine']}, {page['date']}.")
        return Measurement(page["values"], f"recorded on {page['machine']}, {page['date']}", False)
    values = json.loads(json.dumps(measure()))
    if os.environ.get("WORKSHOP_WRITE_RECORDINGS"):
        write(name, values, FOLDER)
    return Measurement(values, f"measured on {machine.describe().line}", True)


def write(name: str, values: Any, folder: Path) -> None:
    """Keep `values` as what was measured on this machine today, in `folder`/<name>.json."""
    page = {"machine": machine.describe().line, "date": datetime.date.today().isoformat(), "values": values}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(name: str, title: str) -> None:
    """Print a recording of `make gpu-check` as a table under its title, with machine and date; say so where there is none."""
    file = FOLDER / f"{name}.json"
    if not file.exists():
        print(f"{title}: not recorded yet.\n  `make gpu-check` on a machine with an NVIDIA GPU records it.")
        return
    page = json.loads(file.read_text(encoding="utf-8"))
    shown = [[_cell(value) for value in row] for row in [page["values"]["columns"], *page["values"]["rows"]]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    print(f"{title}; recorded on {page['machine']}, {page['date']}:")
    for first, *others in shown:
        print("  ".join([f"  {first:<{widths[0]}}", *map(str.rjust, others, widths[1:])]))


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
