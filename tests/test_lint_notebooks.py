import copy

import lint_notebooks
import pytest
from nbformat.v4 import new_output
from notebook_files import ROOT, write
from notebook_source import to_notebook
from publish import WIDGET_VIEW, source_hash, sources_hash

GOOD = """# %% [markdown] id="opening"
# # 4. Split a model
# You will be able to split a model. 20 minutes. You need two cores.

# %% id="setup" tags=["setup"]
from helpers import launch

# %% id="sum" tags=["nbval-check-output"]
print(1 + 1)

# %% id="clock" tags=["timing"]
import time
time.perf_counter()

# %% id="figure"
%matplotlib inline
from helpers import hint, solution
show()

# %% id="stub" tags=["exercise"]
answer = ...
check("04.1", answer)
"""
PICTURE = {"image/png": "iVBORw0K", "text/plain": "<Figure>"}


def good():
    """A notebook without a fault, as publishing would store it."""
    notebook = to_notebook(GOOD)
    code = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}
    for number, cell in enumerate(code.values(), 1):
        cell.execution_count = number
    code["sum"].outputs = [new_output("stream", text="2\n")]
    code["clock"].outputs = [new_output("execute_result", {"text/plain": "0.5"}, execution_count=3)]
    code["clock"].metadata["source_hash"] = source_hash(code["clock"])
    code["figure"].outputs = [new_output("display_data", dict(PICTURE), metadata={"image/png": {"alt": "A rising line."}})]
    code["stub"].outputs = [new_output("stream", text="not answered yet\n")]
    notebook.metadata["published_sources"] = sources_hash(notebook)
    return notebook


def findings(tmp_path, notebook, exercises=("04.1",)):
    path = tmp_path / "04_split.ipynb"
    write(path, notebook)
    found = lint_notebooks.lint(path, exercises)
    return [finding.removeprefix(str(path)).removeprefix(" cell ").removeprefix(": ") for finding in found]


def cell(notebook, cell_id):
    return next(cell for cell in notebook.cells if cell.id == cell_id)


def source(cell_id, text):
    """A change of a cell's source that is published as well."""

    def change(notebook):
        cell(notebook, cell_id).source = text
        notebook.metadata["published_sources"] = sources_hash(notebook)

    return change


def tags(cell_id, *names):
    def change(notebook):
        cell(notebook, cell_id).metadata["tags"] = list(names)

    return change


def output(cell_id, *outputs):
    def change(notebook):
        cell(notebook, cell_id).outputs = list(outputs)

    return change


def both(*changes):
    def change(notebook):
        for one in changes:
            one(notebook)

    return change


def many_cells(notebook):
    notebook.cells += [to_notebook(f'# %% id="more-{number}"\n{number}\n').cells[0] for number in range(26)]
    for number, one in enumerate((one for one in notebook.cells if one.cell_type == "code"), 1):
        one.execution_count = number
    notebook.metadata["published_sources"] = sources_hash(notebook)


ERROR = new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])
STDERR = new_output("stream", name="stderr", text="a.py:1: UserWarning: old\n  old()\n")
HOME_FILE = new_output("stream", text="saved to " + "/home" + "/ada/x\n")

FAULTS = {
    "long cell": (source("setup", "1\n" * 25 + "1"), "setup: 26 lines: split it"),
    "many cells": (many_cells, "31 code cells: make two notebooks"),
    "large file": (output("sum", new_output("stream", text="x" * 1_101_000)), "kB: make its figures smaller"),
    "no title": (source("opening", GOOD.split("\n")[2][2:]), "opening: the opening lacks something: start with a title"),
    "no promise": (source("opening", "# 4. Split\n20 minutes. You need two cores."), "'will be able to'"),
    "no time": (source("opening", "# 4. Split\nYou will be able to split. You need two cores."), "how many minutes"),
    "no needs": (source("opening", "# 4. Split\nYou will be able to split. 20 min."), "what the learner needs"),
    "code first": (lambda notebook: notebook.cells.pop(0), "does not open with text"),
    "misspelt tag": (tags("setup", "nbval-check-ouput"), "setup: unknown tag 'nbval-check-ouput', which does nothing"),
    "skipped": (tags("setup", "nbval-skip"), "setup: unknown tag 'nbval-skip'"),
    "compared times": (tags("sum", "timing", "nbval-check-output"), "sum: tagged timing and nbval-check-output"),
    "comment to nbval": (source("setup", "# NBVAL_SKIP\n1"), "setup: steers nbval by a comment"),
    "nothing compared": (tags("sum"), "no cell's output is compared"),
    "nothing to compare": (tags("setup", "nbval-check-output"), "setup: tagged nbval-check-output but without stored output"),
    "only a picture to compare": (
        output("sum", new_output("display_data", {"image/png": "iVBORw0K"}, metadata={"image/png": {"alt": "A line."}})),
        "sum: tagged nbval-check-output but nbval does not compare pictures",
    ),
    "stored error": (output("sum", ERROR), "sum: its stored output is an error (ValueError)"),
    "no exception": (tags("setup", "raises-exception"), "setup: tagged raises-exception but its stored output is no exception"),
    "uncompared exception": (
        both(tags("stub", "raises-exception"), output("stub", ERROR)),
        "stub: raises-exception alone passes",
    ),
    "unknown line magic": (source("setup", "%tym x\n1"), "setup: uses %tym: where unknown, the cell passes unexecuted"),
    "unknown cell magic": (source("setup", "%%tym\n1"), "setup: uses %tym"),
    "shell line": (source("setup", "files = !ls"), "setup: runs a shell line, whose failure passes unseen"),
    "help": (source("setup", "launch?"), "setup: uses %pinfo"),
    "not Python": (source("setup", "def f(:"), "setup: is not Python"),
    "not executed": (
        lambda notebook: cell(notebook, "setup").update(execution_count=None),
        "not executed once each from top to bottom",
    ),
    "executed twice": (
        lambda notebook: cell(notebook, "stub").update(execution_count=7),
        "not executed once each from top to bottom",
    ),
    "changed since": (lambda notebook: cell(notebook, "stub").update(source='check("04.1", 2)'), "its code has changed since"),
    "silent print": (source("setup", "print(1)"), "setup: prints, but has no stored output"),
    "widget state": (lambda notebook: notebook.metadata.update(widgets={}), "stores widget state"),
    "execution times": (
        lambda notebook: cell(notebook, "setup").metadata.update(execution={}),
        "setup: has execution in its metadata",
    ),
    "stored widget": (
        output("stub", new_output("display_data", {WIDGET_VIEW: {"model_id": "1"}, "text/plain": "a slider"})),
        "stub: stores a widget, which shows nothing without its kernel",
    ),
    "widget without a picture": (
        output("stub", new_output("display_data", {"text/plain": "VBox(children=(IntSlider(value=3), Output()))"})),
        "stub: shows nothing but the name of a widget",
    ),
    "machine path": (output("sum", HOME_FILE), "sum: shows a path of one machine (/"),
    "path of the checkout": (output("sum", new_output("stream", text=f"{ROOT}/x")), "sum: shows a path of one machine"),
    "warning": (output("stub", STDERR), "stub: warns on stderr"),
    "unknown magic ran": (
        output("stub", new_output("stream", name="stderr", text="UsageError: no %tym")),
        "stub: warns on stderr",
    ),
    "figure without alt text": (
        output("figure", new_output("display_data", dict(PICTURE))),
        "figure: its figure has no alt text: show it through helpers.plots",
    ),
    "picture without alt text": (
        source("opening", GOOD.split("\n")[1][2:] + "\n" + GOOD.split("\n")[2][2:] + "\n![](a.png)"),
        "opening: its picture has no alt text",
    ),
    "exercise of another notebook": (source("setup", 'hint("05.1")'), "setup: names exercise 05.1 of another notebook"),
    "exercise without solution": (source("setup", "check('04.2', 1)"), "setup: exercise 04.2 has no solution"),
    "hint out of reach": (
        source("figure", "%matplotlib inline\nfrom helpers import solution\nshow()"),
        "checks exercises, but hint is not imported: a learner is told to call it",
    ),
    "solution without exercise": (source("stub", "answer = 1"), "exercise 04.1 of notebooks/solutions/04.py is nowhere checked"),
}


def test_a_good_notebook(tmp_path):
    assert findings(tmp_path, good()) == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_once(tmp_path, name):
    change, expected = FAULTS[name]
    notebook = good()
    change(notebook)
    found = findings(tmp_path, notebook)
    assert len(found) == 1
    assert expected in found[0]


def test_a_compared_exception_is_good(tmp_path):
    notebook = good()
    both(tags("stub", "raises-exception", "nbval-check-output"), output("stub", ERROR))(notebook)
    assert findings(tmp_path, notebook) == []


def test_ids_missing_and_used_twice(tmp_path):
    notebook = good()
    path = tmp_path / "04_split.ipynb"
    write(path, notebook)
    path.write_text(path.read_text(encoding="utf-8").replace('"id": "setup"', '"id": "sum"').replace('   "id": "clock",\n', ""))
    messages = lint_notebooks.lint(path, ["04.1"])
    assert any(message.endswith("cell sum: has the id of another cell: give it one of its own") for message in messages)
    assert any(message.endswith("cell 3: has no id: run make notebooks") for message in messages)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"nbformat": 3}', "{}"])
def test_a_file_that_is_no_notebook(tmp_path, text):
    path = tmp_path / "04.ipynb"
    path.write_text(text)
    found = lint_notebooks.lint(path, [])
    assert len(found) == 1
    assert found[0].startswith(f"{path}: not a notebook")


def test_the_command_prints_findings_and_fails(tmp_path, capsys):
    path = tmp_path / "99_none.ipynb"
    write(path, good())
    assert lint_notebooks.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "cell stub: names exercise 04.1 of another notebook" in out
    assert out.endswith("1 notebooks, 1 finding\n")
    changed = copy.deepcopy(good())
    source("stub", "1")(changed)
    write(path, changed)
    assert lint_notebooks.main([str(path)]) == 0
    assert capsys.readouterr().out.endswith("1 notebooks, no findings\n")
