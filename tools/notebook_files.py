"""Where the notebooks are, the environment they are executed in, and the one form in which they are written."""

import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PROMISE = re.compile(r"about (\d+) s of machine time")  # in the first cell, for two cores to itself
PROMISED_SECONDS = 60  # where the first cell says nothing
SANITIZE_RULES = ROOT / "tests" / "notebooks" / "sanitize.cfg"

# What outputs would otherwise take from a person's settings. Notebooks are stored as they run on the CPU with the shipped model.
EXECUTION_ENVIRONMENT = {
    "WORKSHOP_DEVICE": "cpu",
    "OMP_WAIT_POLICY": "PASSIVE",  # two notebooks share the cores: threads that spin while they wait would stall both
    "WORKSHOP_MODEL": "tiny-ernie",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # order of sets
    "COLUMNS": "100",  # width of tracebacks and tables
}


def course_notebooks() -> list[Path]:
    """All notebooks of the course, in their order."""
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def named_or_all(names: Iterable[str]) -> list[Path]:
    """The named notebooks (a path, or the start of a file name in notebooks/ such as `04`), or all of the course.

    Raises SystemExit naming what was not found.
    """
    found = []
    for name in names:
        path = Path(name)
        matches = [path] if path.is_file() else sorted(NOTEBOOKS.glob(f"{path.name}*.ipynb"))
        if not matches:
            raise SystemExit(f"no notebook {name!r}: it is neither a file nor the start of a file name in {NOTEBOOKS.name}/")
        found += matches
    return found or course_notebooks()


def shown(path: Path) -> str:
    """The path as people name it: relative to the project where it lies inside."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def execution_environment(scratch: Path) -> dict[str, str]:
    """The environment for a kernel that executes a notebook for the repository: this process's, with personal settings replaced.

    `scratch` is an existing folder that holds what the kernel would otherwise read from and write to the person's home folder.
    """
    environment = {**os.environ, **EXECUTION_ENVIRONMENT, "IPYTHONDIR": str(scratch / "ipython")}
    for personal in (
        "WORKSHOP_RECORD",
        "JPY_SESSION_NAME",
        "VSCODE_PID",
        "COLAB_RELEASE_TAG",
    ):  # a learner's record, a live panel
        environment.pop(personal, None)
    path = [str(Path(sys.executable).parent), environment.get("PATH", "")]
    return environment | {"PATH": os.pathsep.join(path)}


def read(path: Path) -> NotebookNode:
    """The notebook, validated, in the current format (version 4)."""
    return nbformat.read(path, as_version=4)


def promised(path: Path) -> int:
    """The seconds of machine time that a notebook's first cell names."""
    found = PROMISE.search(read(path).cells[0].source)
    return int(found[1]) if found else PROMISED_SECONDS


def text_of(notebook: NotebookNode) -> str:
    """The one form in which a notebook is written, the same as JupyterLab's: sorted keys, indent 1, a newline at the end."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def write(path: Path, notebook: NotebookNode) -> None:
    """Write the notebook whole or not at all: a reader never sees half a file, and a crash leaves the old one."""
    text = text_of(notebook)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
