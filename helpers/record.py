"""The course's files: the data it comes with, and what a learner's work leaves behind: a line in their record, a card shown.

The record is a file of JSON lines, one per exercise checked or verdict given; the last line about a thing counts.
Notebooks in `my_notebooks/` share `my_notebooks/.record.jsonl`. The environment variable `WORKSHOP_RECORD` names another file.
Everywhere else (the committed notebooks, tests, CI) the record lives in the memory of the process and nothing is written,
so that published outputs never depend on who executed them.
"""

import html
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]  # of the repository: notebooks/, data/, my_notebooks/

_memory: list[str] = []


@cache
def data(name: str) -> Any:
    """What `data/<name>.yaml` holds, read once."""
    return yaml.safe_load((ROOT / "data" / f"{name}.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True, repr=False)
class Card:
    """The same message twice: `text` for a terminal, `html` for a notebook."""

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html

    def show(self) -> None:
        """Display it in a notebook, print it elsewhere."""
        from IPython.display import display

        display(self)


def markup(text: str) -> str:
    """HTML of a text; what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def table(rows: Iterable[Sequence[str]], heads: Sequence[str] = ()) -> str:
    """HTML of a table of texts, aligned left."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag} style=text-align:left>{markup(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = line("th", heads) if heads else ""
    return f"<table>{head}{''.join(line('td', row) for row in rows)}</table>"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of texts, aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def path() -> Path | None:
    """The file that holds the record; None where it is kept in memory only."""
    if named := os.environ.get("WORKSHOP_RECORD"):
        return Path(named)
    own = ROOT / "my_notebooks"
    return own / ".record.jsonl" if Path.cwd().is_relative_to(own) else None


def note(kind: str, name: str, **facts: Any) -> None:
    """Append what happened to `name`, for example `note("exercise", "04.2", state="solved")`. Facts are JSON values.

    One line goes out in one write, so several kernels can append to the same file; a line that was cut short stays alone.
    """
    line = json.dumps({"kind": kind, "name": name, **facts}) + "\n"  # ASCII: no byte of it is half a character
    file = path()
    if file is None:
        _memory.append(line)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab+") as record:
        if record.tell():  # its length
            record.seek(-1, os.SEEK_END)
            line = line if record.read() == b"\n" else "\n" + line
        record.write(line.encode())


def notes(kind: str) -> list[dict[str, Any]]:
    """All facts noted under `kind`, oldest first. A line that a crash cut short is left out."""
    file = path()
    lines = _memory if file is None else file.read_text("utf-8", "replace").split("\n") if file.exists() else []
    entries = []
    for line in lines:
        with suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    return [entry for entry in entries if entry["kind"] == kind]
