import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_files import ROOT, read
from notebook_source import to_notebook, to_text

TEXT = '''# %% [markdown] id="opening"
# # Title
#
# $\\alpha$, `code`

# %% id="job" tags=["timing", "setup"]
def job():
    return """
# not a cell
"""


job()

# %% [markdown] id="why"
# Why.
'''


def test_text_becomes_a_notebook_and_comes_back():
    notebook = to_notebook(TEXT)
    assert [(cell.cell_type, cell.id) for cell in notebook.cells] == [
        ("markdown", "opening"),
        ("code", "job"),
        ("markdown", "why"),
    ]
    assert notebook.cells[0].source == "# Title\n\n$\\alpha$, `code`"
    assert notebook.cells[1].metadata == {"tags": ["timing", "setup"]}
    assert notebook.cells[1].source.endswith('"""\n\n\njob()')
    assert to_text(notebook) == TEXT


def test_markdown_between_quotes_and_blank_lines_before_the_first_cell():
    notebook = to_notebook('\n\n# %% [markdown] id="a"\n"""\n# Title\n\nText\n"""\n\n# %% id="b"\n1\n')
    assert [(cell.id, cell.source, cell.metadata) for cell in notebook.cells] == [("a", "# Title\n\nText", {}), ("b", "1", {})]


LINES = st.text(alphabet="ab #%\"'\\[](){}:=!?$éλ\n", max_size=40)


@given(st.lists(st.tuples(st.booleans(), LINES), max_size=4))
def test_nothing_is_lost_silently(cells):
    notebook = new_notebook()
    for number, (is_code, source) in enumerate(cells):
        notebook.cells.append((new_code_cell if is_code else new_markdown_cell)(source, id=f"cell-{number}"))
    try:
        text = to_text(notebook)
    except ValueError:
        return  # said, not lost
    again = to_notebook(text)
    assert [(cell.cell_type, cell.id, cell.source) for cell in again.cells] == [
        (cell.cell_type, cell.id, cell.source) for cell in notebook.cells
    ]


def test_a_cell_that_text_cannot_hold_is_named():
    with pytest.raises(ValueError, match="'marker' does not survive"):
        to_text(new_notebook(cells=[new_code_cell("# %% one\n1", id="marker")]))


def test_unchanged_cells_keep_their_outputs():
    stored = to_notebook('# %% id="same" tags=["timing"]\n1\n\n# %% id="other"\n2\n')
    stored.metadata["title"] = "kept"
    for cell in stored.cells:
        cell.outputs, cell.execution_count = [new_output("stream", text="out")], 1
    stored.cells[0].metadata["source_hash"] = "0123456789ab"
    assert "source_hash" not in to_text(stored)
    updated = to_notebook('# %% id="new"\n0\n\n# %% id="same" tags=["timing"]\n1\n\n# %% id="other"\n3\n', stored)
    new, same, other = updated.cells
    assert updated.metadata["title"] == "kept"
    assert (same.outputs[0].text, same.execution_count, same.metadata["source_hash"]) == ("out", 1, "0123456789ab")
    assert (new.outputs, other.outputs, other.execution_count) == ([], [], None)


def test_cells_without_ids_are_named_after_their_first_words():
    text = "# %% [markdown]\n# ## How much? 3 ways\n\n# %%\nrun = launch(job)\n\n# %%\nrun = launch(job)\n\n# %%\n...\n"
    assert [cell.id for cell in to_notebook(text).cells] == ["how-much-3-ways", "run-launch-job", "run-launch-job-2", "empty"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('# %% id="a"\n1\n\n# %% id="a"\n2\n', "two cells have the id 'a'"),
        ('# %% id="a b"\n1\n', "the id 'a b' may have"),
        ("1\n\n# %%\n2\n", "text before the first cell: begin with a line '# %%', not with '1'"),
        ("# %% id=sum\n1\n", "cannot read 'id=sum' in a cell's first line"),
        ('# %% id="sum" tags=["timing]\n1\n', "cannot read 'tags="),
    ],
)
def test_ids_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        to_notebook(text)


def test_commands(tmp_path):
    tool = [sys.executable, str(ROOT / "tools" / "notebook_source.py")]
    source, notebook = tmp_path / "a.py", tmp_path / "a.ipynb"
    source.write_text(TEXT, encoding="utf-8")
    subprocess.run([*tool, "notebook", source, notebook], check=True)
    assert [cell.id for cell in read(notebook).cells] == ["opening", "job", "why"]
    assert subprocess.run([*tool, "text", notebook], check=True, capture_output=True, text=True).stdout == TEXT
    source.write_text('# %% id="é"\n', encoding="utf-8")
    refused = subprocess.run([*tool, "notebook", source, notebook], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("the id 'é' may have")
