"""Write a notebook as one text file and turn the text into the notebook: for writing and reviewing long notebooks.

    python tools/notebook_source.py text notebooks/03_train_on_shards.ipynb > /tmp/03.py
    python tools/notebook_source.py notebook /tmp/03.py notebooks/03_train_on_shards.ipynb

A cell starts with a line such as

    # %% [markdown] id="opening"
    # %% id="one-step" tags=["timing"]

(values are JSON), and one blank line stands before the next. Markdown lines start with `# `, or the whole text stands between
two lines of three double quotes. A cell without an id gets one made of its first words. An existing notebook keeps its metadata
and the outputs of the code cells whose id and source are unchanged. Only notebooks are committed.

The format is the "percent format" of several editors. The library for it, jupytext, does not keep cell ids, and installing it
would change what learners see in JupyterLab.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from notebook_files import read, write

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
ONLY_IN_NOTEBOOK = ("source_hash",)  # metadata that publishing writes
HEADER = re.compile(r"^# %%(?: \[(markdown|raw)\])?(.*)$", re.MULTILINE)
ENTRY = re.compile(r"(\w+)=")


def to_text(notebook: NotebookNode) -> str:
    """The notebook without outputs as text, cell ids and tags included.

    Raises ValueError naming the first cell that the text could not give back exactly, for example one with a line `# %%` in it.
    """
    parts = []
    for cell in notebook.cells:
        metadata = {"id": cell.id, **{key: value for key, value in cell.metadata.items() if key not in ONLY_IN_NOTEBOOK}}
        kind = "" if cell.cell_type == "code" else f" [{cell.cell_type}]"
        header = f"# %%{kind} " + " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in metadata.items())
        body = cell.source if cell.cell_type == "code" else "\n".join(f"# {line}".rstrip() for line in cell.source.split("\n"))
        parts.append(f"{header}\n{body}\n")
        try:
            again = [(one.cell_type, one.id, one.source) for one in to_notebook(parts[-1]).cells]
        except ValueError:
            again = []
        if again != [(cell.cell_type, cell.id, cell.source)]:
            raise ValueError(
                f"cell {cell.id!r} does not survive as text: take spaces and blank lines from its ends, '# %%' out of it"
            )
    return "\n".join(parts)


def to_notebook(text: str, stored: NotebookNode | None = None) -> NotebookNode:
    """The notebook that the text describes; from `stored` come its metadata and the outputs of unchanged cells.

    Raises ValueError for text before the first cell, for a header that cannot be read, an id used twice or one that may not be.
    """
    earlier = {cell.id: cell for cell in stored.cells} if stored else {}
    notebook = nbformat.v4.new_notebook(metadata=stored.metadata if stored else {"kernelspec": KERNEL})
    taken: set[str] = set()
    before, *pieces = HEADER.split(text)
    if before.strip():
        raise ValueError(f"text before the first cell: begin with a line '# %%', not with {before.strip().splitlines()[0]!r}")
    for kind, header, body in zip(pieces[0::3], pieces[1::3], pieces[2::3], strict=True):
        source = body.strip("\n") if not kind else _uncommented(body.strip("\n"))
        metadata = _entries(header)
        identity = metadata.pop("id", None) or _unused(_slug(source), taken)
        if identity in taken:
            raise ValueError(f"two cells have the id {identity!r}: give each its own")
        if not re.fullmatch(r"[\w-]{1,64}", identity, re.ASCII):
            raise ValueError(f"the id {identity!r} may have 1 to 64 letters, digits, '-' and '_' only")
        taken.add(identity)
        make = getattr(nbformat.v4, f"new_{kind or 'code'}_cell")
        cell = make(source, id=identity, metadata=metadata)
        known = earlier.get(identity)
        if known and cell.cell_type == known.cell_type == "code" and known.source == source:
            cell.outputs, cell.execution_count = known.outputs, known.execution_count
            cell.metadata.update({key: value for key, value in known.metadata.items() if key in ONLY_IN_NOTEBOOK})
        notebook.cells.append(cell)
    return notebook


def _entries(header: str) -> dict[str, object]:
    """The entries `name=JSON` of a cell's first line."""
    entries, position = {}, 1
    while position < len(header):
        name = ENTRY.match(header, position)
        try:
            if name is None:
                raise ValueError
            entries[name[1]], end = json.JSONDecoder().raw_decode(header, name.end())
        except ValueError:
            raise ValueError(
                f'cannot read {header[position:]!r} in a cell\'s first line: write for example id="sum" tags=["timing"]'
            ) from None
        position = end + 1
    return entries


def _uncommented(body: str) -> str:
    quoted = re.fullmatch(r'r?"""\n(.*)\n"""', body, re.DOTALL)
    return quoted[1] if quoted else re.sub(r"^# ?", "", body, flags=re.MULTILINE)


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
