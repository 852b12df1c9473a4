"""Find what running a notebook does not show: cells that check nothing, noise, what a learner would stumble over.

    python tools/lint_notebooks.py        # all notebooks
    python tools/lint_notebooks.py 03 04  # some of them

Prints one line for each finding with what to do about it; exit code 1 where there is one.
"""

import argparse
import ast
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from notebook_files import ROOT, named_or_all, shown
from publish import DROPPED_CELL_METADATA, WIDGET_VIEW, sources_hash

MAX_CELL_LINES = 25
MAX_CODE_CELLS = 30
MAX_BYTES = 1_100_000
PUBLISH = "run make notebooks"
TAGS = {
    "timing",
    "nbval-check-output",
    "nbval-ignore-output",
    "raises-exception",
    "setup",
    "exercise",
    "hide-input",
    "hide-output",
}
MAGICS = {"matplotlib", "config", "time", "timeit", "capture"}
OPENING = {
    r"\A# \S": "start with a title, a line '# …'",
    r"(?i)you will be able to": "say what the learner 'will be able to' do",
    r"(?i)\d\s*(min|minutes?)\b": "say how many minutes it takes",
    r"(?i)\bneeds?\b": "say what the learner needs",
}
MACHINE_PATH = re.compile(
    r"(?<![\w.<])(?:/(?:home|root|Users|tmp|var/folders)/[\w.]|[A-Z]:\\Users\\|" + re.escape(f"{ROOT}/") + ")"
)
EXERCISE_CALL = re.compile(r"""\b(?:check|hint|solution)\(\s*["'](\d\d\.\d+)["']""")


@dataclass(frozen=True)
class Notebook:
    """A notebook under review: its name, its cells and the ids of the exercises that have a solution."""

    path: Path
    content: NotebookNode
    exercises: Collection[str]

    @property
    def code(self) -> list[NotebookNode]:
        return [cell for cell in self.content.cells if cell.cell_type == "code"]

    @property
    def executed(self) -> list[NotebookNode]:
        return [cell for cell in self.code if cell.execution_count is not None]


Messages = Iterator[tuple[NotebookNode | None, str]]
RULES: list[Callable[[Notebook], Messages]] = []


def rule(function: Callable[[Notebook], Messages]) -> Callable[[Notebook], Messages]:
    """Register a rule: it yields (cell or None for the whole notebook, message)."""
    RULES.append(function)
    return function


def lint(path: Path, exercises: Collection[str]) -> list[str]:
    """All findings in the notebook, each with its place and mend. `exercises` are the ids with a solution, such as "04.2"."""
    try:
        content = nbformat.from_dict(nbformat.reader.parse_json(path.read_text(encoding="utf-8")))
        notebook = Notebook(path, content, exercises)
        if content.nbformat != 4:
            raise ValueError(f"format {content.nbformat} instead of 4")
    except (ValueError, AttributeError, nbformat.reader.NotJSONError) as error:
        return [f"{shown(path)}: not a notebook ({error}): mend or remove the file"]
    for cell in content.cells:
        for multiline in [cell, *cell.get("outputs", [])]:
            for key in ("source", "text"):
                if isinstance(multiline.get(key), list):
                    multiline[key] = "".join(multiline[key])
    found = []
    for one in RULES:
        for cell, message in one(notebook):
            position = "" if cell is None else f" cell {cell.get('id') or content.cells.index(cell)}"
            found.append(f"{shown(path)}{position}: {message}")
    return found


@rule
def ids(notebook: Notebook) -> Messages:
    """Every cell has an id of its own, so that a change shows as a change of one cell."""
    seen = set()
    for cell in notebook.content.cells:
        identity = cell.get("id")
        if not identity:
            yield cell, "has no id: " + PUBLISH
        elif identity in seen:
            yield cell, "has the id of another cell: give it one of its own"
        seen.add(identity)


@rule
def sizes(notebook: Notebook) -> Messages:
    """Cells fit on a screen, notebooks into a sitting, files into a repository."""
    for cell in notebook.code:
        lines = cell.source.count("\n") + 1
        if lines > MAX_CELL_LINES:
            yield cell, f"{lines} lines: split it, or move what is not the lesson to helpers (at most {MAX_CELL_LINES})"
    if len(notebook.code) > MAX_CODE_CELLS:
        yield None, f"{len(notebook.code)} code cells: make two notebooks of it (at most {MAX_CODE_CELLS})"
    size = notebook.path.stat().st_size
    if size > MAX_BYTES:
        yield None, f"{size // 1000} kB: make its figures smaller or fewer (at most {MAX_BYTES // 1000})"


@rule
def opening(notebook: Notebook) -> Messages:
    """The first screen says what, how long and what for."""
    first = notebook.content.cells[0] if notebook.content.cells else None
    if first is None or first.cell_type != "markdown":
        yield None, "does not open with text: begin with a markdown cell (title, what one will be able to do, time, needs)"
        return
    for pattern, mend in OPENING.items():
        if not re.search(pattern, first.source):
            yield first, f"the opening lacks something: {mend}"


@rule
def tags(notebook: Notebook) -> Messages:
    """A misspelt tag would check nothing; a skipped cell too."""
    for cell in notebook.content.cells:
        own = cell.metadata.get("tags", [])
        for tag in own:
            if tag not in TAGS:
                yield cell, f"unknown tag {tag!r}, which does nothing: use one of {', '.join(sorted(TAGS))}"
        if {"timing", "nbval-check-output"} <= set(own):
            yield cell, "tagged timing and nbval-check-output: times cannot be compared, take one tag off"
        if re.search(r"(?m)^\s*#\s*(NBVAL_|PYTEST_VALIDATE)", cell.source):
            yield cell, "steers nbval by a comment: use a tag, which readers do not see"
    if notebook.code and not any("nbval-check-output" in cell.metadata.get("tags", []) for cell in notebook.code):
        yield None, "no cell's output is compared: tag cells with exact output nbval-check-output"


@rule
def compared_outputs(notebook: Notebook) -> Messages:
    """A compared cell has something to compare; a planned error has happened and is compared."""
    for cell in notebook.executed:
        own = cell.metadata.get("tags", [])
        if "nbval-check-output" in own and not cell.outputs:
            yield cell, f"tagged nbval-check-output but without stored output nothing is compared: {PUBLISH}, or print something"
        elif "nbval-check-output" in own and not any(_comparable(output) for output in cell.outputs):
            yield cell, "tagged nbval-check-output but nbval does not compare pictures and widgets: print the finding as well"
        raised = [output for output in cell.outputs if output.output_type == "error"]
        if "raises-exception" not in own:
            for output in raised:
                yield cell, f"its stored output is an error ({output.ename}): mend it, then {PUBLISH}"
        elif not raised:
            yield cell, "tagged raises-exception but its stored output is no exception: nbval would not notice; take the tag off"
        elif "nbval-check-output" not in own:
            yield cell, "raises-exception alone passes when nothing is raised: add nbval-check-output, or try, print and assert"


def _comparable(output: NotebookNode) -> bool:
    return any(not kind.startswith(("image/", WIDGET_VIEW)) for kind in output.get("data", {"text/plain": ""}))


@rule
def magics(notebook: Notebook) -> Messages:
    """IPython reports an unknown magic on stderr, skips what follows and calls the cell a success; a failing shell line too."""
    for cell in notebook.code:
        try:
            calls = [
                call for call in ast.walk(_python(cell)) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            ]
        except SyntaxError as error:
            yield cell, f"is not Python ({error.msg}, line {error.lineno}): mend it"
            continue
        for call in (call for call in calls if ast.unparse(call.func.value) == "get_ipython()"):
            name = ast.literal_eval(call.args[0])
            if call.func.attr in ("system", "getoutput"):
                yield cell, "runs a shell line, whose failure passes unseen: use subprocess.run(..., check=True)"
            elif name not in MAGICS:
                yield cell, f"uses %{name}: where unknown, the cell passes unexecuted; use Python, or {', '.join(sorted(MAGICS))}"


def _python(cell: NotebookNode) -> ast.Module:
    return ast.parse(TransformerManager().transform_cell(cell.source))


@rule
def outputs_present(notebook: Notebook) -> Messages:
    """What is committed is what the code gives: executed in order, from exactly this source, with its outputs."""
    counts = [cell.execution_count for cell in notebook.code if cell.source.strip()]
    if counts != list(range(1, len(counts) + 1)):
        yield None, f"its cells were not executed once each from top to bottom: {PUBLISH}"
    elif notebook.content.metadata.get("published_sources") != sources_hash(notebook.content):
        yield None, f"its code has changed since its outputs were stored: {PUBLISH}"
    for cell in notebook.executed:
        if not cell.outputs and _prints(cell):
            yield cell, f"prints, but has no stored output: {PUBLISH}"


def _prints(cell: NotebookNode) -> bool:
    try:
        statements = _python(cell).body
    except SyntaxError:
        return False
    calls = [
        statement.value for statement in statements if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    ]
    return any(isinstance(call.func, ast.Name) and call.func.id in ("print", "display") for call in calls)


@rule
def noise(notebook: Notebook) -> Messages:
    """Nothing of the run or of the machine it ran on is stored."""
    if "widgets" in notebook.content.metadata:
        yield None, f"stores widget state: {PUBLISH}"
    for cell in notebook.content.cells:
        dropped = [key for key in DROPPED_CELL_METADATA if key in cell.metadata]
        if dropped:
            yield cell, f"has {', '.join(dropped)} in its metadata: {PUBLISH}"
        for output in cell.get("outputs", []):
            if WIDGET_VIEW in output.get("data", {}):
                yield cell, f"stores a widget, which shows nothing without its kernel: {PUBLISH}"
            text = "\n".join(_texts(output))
            if re.match(r"\w+\(children=", text):
                yield cell, "shows nothing but the name of a widget without its kernel: show it through helpers.widgets"
            if match := MACHINE_PATH.search(text):
                yield cell, f"shows a path of one machine ({match[0]}…): print it relative to the project, or not at all"
            if output.get("name") == "stderr" and re.search(r"UsageError|Warning\b", text):
                yield (
                    cell,
                    f"warns on stderr ({text.strip().splitlines()[-1][:80]}): mend the cause, readers take it for an error",
                )


def _texts(output: NotebookNode) -> Iterator[str]:
    for value in (output.get("text"), output.get("evalue"), output.get("traceback"), *output.get("data", {}).values()):
        yield from [value] if isinstance(value, str) else [part for part in value or [] if isinstance(part, str)]


@rule
def alternative_texts(notebook: Notebook) -> Messages:
    """Every picture says in words what it shows."""
    for cell in notebook.content.cells:
        for output in cell.get("outputs", []):
            for kind in output.get("data", {}):
                described = output.get("metadata", {}).get(kind, {})
                if kind in ("image/png", "image/jpeg") and not (isinstance(described, dict) and described.get("alt")):
                    yield cell, "its figure has no alt text: show it through helpers.plots"
        if cell.cell_type == "markdown" and re.search(r"!\[\s*\]\(|<img(?![^>]*\balt=\"[^\"])", cell.source):
            yield cell, "its picture has no alt text: write ![what it shows](file)"


@rule
def exercises(notebook: Notebook) -> Messages:
    """Every exercise a notebook checks has a solution, and every solution a place in its notebook."""
    number = notebook.path.name[:2]
    mentioned = set()
    for cell in notebook.code:
        for exercise in EXERCISE_CALL.findall(cell.source):
            mentioned.add(exercise)
            if not exercise.startswith(f"{number}."):
                yield cell, f"names exercise {exercise} of another notebook: here they are {number}.1, {number}.2, …"
            elif exercise not in notebook.exercises:
                yield cell, f"exercise {exercise} has no solution: add it to notebooks/solutions/{number}.py"
    code = "\n".join(cell.source for cell in notebook.code)
    for name in ("hint", "solution") if mentioned else ():
        if not re.search(rf"^from helpers import (?:\([^)]*|.*)\b{name}\b", code, re.MULTILINE):
            yield None, f"checks exercises, but {name} is not imported: a learner is told to call it"
    for exercise in sorted(notebook.exercises):
        if exercise.startswith(f"{number}.") and exercise not in mentioned:
            yield None, f"exercise {exercise} of notebooks/solutions/{number}.py is nowhere checked: add its cell or take it out"


def main(arguments: list[str] | None = None) -> int:
    from helpers.exercises import listed

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", help="files, or starts of file names such as 04; default: all")
    known = {exercise for exercise, _ in listed()}
    paths = named_or_all(parser.parse_args(arguments).notebooks)
    found = [finding for path in paths for finding in lint(path, known)]
    for finding in found:
        print(finding)
    print(f"{len(paths)} notebooks, {len(found) or 'no'} finding{'s' * (len(found) != 1)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
