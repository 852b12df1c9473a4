"""Write a notebook as one text file and turn the text into the notebook: for writing and reviewing long notebooks.

    python tools/notebook_source.py text notebooks/03_train_on_shards.ipynb > /tmp/03.py
    python tools/notebook_source.py notebook /tmp/03.py notebooks/03_train_on_shards.ipynb

The text is jupytext's percent format. A cell starts with a line such as

    # %% [markdown] id="opening"
    # %% id="one-step" tags=["timing"]

Markdown lines start with `# `, or the whole text stands between two lines of three double quotes. A cell without an id gets
one made of its first words. An existing notebook keeps its metadata and the outputs of the code cells whose id and source are
unchanged. Only notebooks are committed.
"""

import argparse
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from notebook_files import read, write

# Cell metadata that only one of the two forms needs.
ONLY_IN_TEXT = {"id", "cell_marker", "lines_to_next_cell", "lines_to_end_of_cell_marker"}
ONLY_IN_NOTEBOOK = {"source_hash"}
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def to_text(notebook: NotebookNode) -> str:
    """The notebook without outputs as percent text, cell ids and tags included.

    Raises ValueError naming the first cell that the text could not give back exactly, for example one with a line `# %%` in it.
    """
    copy = nbformat.v4.new_notebook(metadata={"jupytext": {"notebook_metadata_filter": "-all", "cell_metadata_filter": "all"}})
    for cell in notebook.cells:
        metadata = {key: value for key, value in cell.metadata.items() if key not in ONLY_IN_NOTEBOOK}
        copy.cells.append(nbformat.from_dict({**cell, "metadata": {"id": cell.id, **metadata}}))
    text = jupytext.writes(copy, fmt="py:percent")
    returned = to_notebook(text).cells
    for position, cell in enumerate(notebook.cells):
        again = returned[position] if position < len(returned) else None
        if again is None or (again.id, again.cell_type, again.source) != (cell.id, cell.cell_type, cell.source):
            raise ValueError(
                f"cell {cell.id!r} does not survive as text: take blank lines from its end and lines with '# %%' out of it"
            )
    return text


def to_notebook(text: str, stored: NotebookNode | None = None) -> NotebookNode:
    """The notebook that percent text describes; from `stored` come its metadata and the outputs of unchanged cells.

    Raises ValueError for an id used twice or one that a notebook may not have.
    """
    earlier = {cell.id: cell for cell in stored.cells} if stored else {}
    notebook = nbformat.v4.new_notebook(metadata=stored.metadata if stored else {"kernelspec": KERNEL})
    taken: set[str] = set()
    for parsed in jupytext.reads(text, fmt="py:percent").cells:
        if not parsed.source and not parsed.metadata:
            continue  # blank lines before the first cell
        identity = parsed.metadata.get("id") or _unused(_slug(parsed.source), taken)
        if identity in taken:
            raise ValueError(f"two cells have the id {identity!r}: give each its own")
        if not re.fullmatch(r"[\w-]{1,64}", identity, re.ASCII):
            raise ValueError(f"the id {identity!r} may have 1 to 64 letters, digits, '-' and '_' only")
        taken.add(identity)
        metadata = {key: value for key, value in parsed.metadata.items() if key not in ONLY_IN_TEXT}
        cell = nbformat.from_dict({**parsed, "id": identity, "metadata": metadata})
        before = earlier.get(identity)
        if before and cell.cell_type == before.cell_type == "code" and before.source == cell.source:
            cell.outputs, cell.execution_count = before.outputs, before.execution_count
            cell.metadata.update({key: value for key, value in before.metadata.items() if key in ONLY_IN_NOTEBOOK})
        notebook.cells.append(cell)
    return notebook


def _slug(source: str) -> str:
    words = re.findall(r"[a-z0-9]+", next((line for line in source.splitlines() if line.strip()), "").lower())
    return "-".join(words)[:40].rstrip("-") or "empty"


def _unused(name: str, taken: set[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    direction = parser.add_subparsers(dest="direction", required=True)
    text = direction.add_parser("text", help="print a notebook as text")
    text.add_argument("notebook", type=Path)
    notebook = direction.add_parser("notebook", help="create or update a notebook from text")
    notebook.add_argument("source", type=Path)
    notebook.add_argument("notebook", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.direction == "text":
            sys.stdout.write(to_text(read(options.notebook)))
        else:
            stored = read(options.notebook) if options.notebook.exists() else None
            write(options.notebook, to_notebook(options.source.read_text(encoding="utf-8"), stored))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
