"""Test notebooks: lint them, then execute every cell on the CPU and compare the outputs that are exact.

    python tools/run_nbval.py                 # all notebooks (part of `make test`)
    python tools/run_nbval.py 03 04           # some of them

A cell fails where it raises, where its output is tagged `nbval-check-output` and differs from the stored one, and where it takes
longer than --cell-seconds. Times are printed. Two notebooks run at once, so one that takes more than twice the seconds of machine
time that its first cell promises is marked; no time is a failure.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import lint_notebooks
from notebook_files import ROOT, SANITIZE_RULES, execution_environment, named_or_all, promised, read
from publish import CELL_SECONDS

SLOWEST_CELLS = 5
CELL_NUMBERS = """
[number of a cell, which is 1 for every cell that nbval executes]
regex: \\bcell \\d+
replace: cell …
"""


def nbval(paths: Sequence[Path], cell_seconds: float = CELL_SECONDS) -> int:
    """Execute the notebooks, two at a time, and print the time that each took.

    Returns pytest's exit code, 0 where all is well, and 1 where cells were not run that should have been.
    """
    paths = [path.resolve() for path in paths]
    root = ROOT if all(path.is_relative_to(ROOT) for path in paths) else os.path.commonpath([path.parent for path in paths])
    flags = ["--nbval-lax", "--nbval-current-env", f"--nbval-cell-timeout={cell_seconds}", "-q", "-p", "no:cacheprovider"]
    flags += [f"--timeout={cell_seconds + 60}"]  # nbval ends a cell in time; this ends nbval
    flags += ["-n", "2", "--dist", "loadscope"] if len(paths) > 1 else []
    flags += [f"--rootdir={root}", "-c", str(ROOT / "pyproject.toml")]  # a notebook outside rootdir would have no name
    with tempfile.TemporaryDirectory(prefix="nbval_") as scratch:
        rules, report = Path(scratch) / "sanitize.cfg", Path(scratch) / "report.xml"
        rules.write_text(SANITIZE_RULES.read_text(encoding="utf-8") + CELL_NUMBERS, encoding="utf-8")
        flags += [f"--nbval-sanitize-with={rules}", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *flags, *map(str, paths)]
        code = subprocess.run(command, cwd=ROOT, env=execution_environment(Path(scratch))).returncode
        times = cell_times(report) if report.exists() else {}
    print(summary(times, {path.stem: promised(path) for path in paths}))
    ran, expected = sum(map(len, times.values())), sum(cell.cell_type == "code" for path in paths for cell in read(path).cells)
    if ran != expected:
        print(f"{ran} cells were run, but the notebooks have {expected} code cells")
    return code or int(ran != expected)


def cell_times(report: Path) -> dict[str, dict[str, float]]:
    """From a JUnit report: notebook -> cell -> seconds."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for case in ElementTree.parse(report).iter("testcase"):
        times[case.attrib["classname"]][case.attrib["name"]] = float(case.attrib["time"])
    return times


def summary(times: Mapping[str, Mapping[str, float]], promises: Mapping[str, int]) -> str:
    """For each notebook the seconds it took, marked where over twice what it promised, and a line with its slowest cells."""
    lines = []
    for notebook, cells in sorted(times.items()):
        total, promise = sum(cells.values()), promises[notebook.removesuffix(".ipynb").rpartition(".")[2]]
        slowest = sorted(cells.items(), key=lambda item: -item[1])[:SLOWEST_CELLS]
        lines.append(f"{notebook:44} {total:6.1f} s{f'  over twice the {promise} s promised' if total > 2 * promise else ''}")
        lines.append("    slowest: " + ", ".join(f"{cell} {seconds:.1f} s" for cell, seconds in slowest))
    lines.append(f"{'in all':44} {sum(sum(cells.values()) for cells in times.values()):6.1f} s")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", help="files, or starts of file names such as 04; default: all")
    parser.add_argument(
        "--cell-seconds", type=float, default=CELL_SECONDS, help="longest time one cell may take (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    paths = named_or_all(options.notebooks)
    findings = lint_notebooks.main([str(path) for path in paths])
    sys.stdout.flush()
    return nbval(paths, options.cell_seconds) or findings


if __name__ == "__main__":
    sys.exit(main())
