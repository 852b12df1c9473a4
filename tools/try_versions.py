"""A reduced set of tests on the oldest and the newest supported transformers and accelerate: `make versions`.

    python tools/try_versions.py          # the versions that are installed are left out: `make test` runs everything with them
    python tools/try_versions.py --all

The ranges are those of pyproject.toml. Another version than the installed one is put into a folder that comes before the
environment on Python's path, and so is what it asks for and the environment does not have; the environment is not touched.
torch stays as it is: its range admits one release.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
TRIED = ("transformers", "accelerate")
SHOWN = ("torch", *TRIED)
TESTS = [  # what stands on the libraries whose version changes
    "tests/test_models.py",
    "tests/test_shard_plan.py",
    "tests/test_offload.py",
    "tests/test_collectives.py",
]
SECONDS = 280  # for the tests of one set of versions
UNMET = """
import sys
from importlib import metadata
from packaging.requirements import Requirement
for distribution in metadata.distributions(path=[sys.argv[1]]):
    for text in distribution.requires or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            try:
                met = wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
            except metadata.PackageNotFoundError:
                met = False
            if not met:
                print(f"{wanted.name}{wanted.specifier}")
"""


def ranges() -> dict[str, Requirement]:
    """By name of the package, what pyproject.toml asks for."""
    wanted = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    return {requirement.name: requirement for requirement in wanted if requirement.name in SHOWN}


def oldest(wanted: Requirement) -> str:
    """The lowest version that a range admits. Raises ValueError where it names none."""
    low = [each.version for each in wanted.specifier if each.operator == ">="]
    if len(low) != 1:
        raise ValueError(f"{wanted} names no oldest version: it needs exactly one >=")
    return f"{wanted.name}=={low[0]}"


def candidates() -> dict[str, list[str]]:
    """What pip shall install, by name of the set."""
    found = ranges()
    return {"oldest": [oldest(found[name]) for name in TRIED], "newest": [str(found[name]) for name in TRIED]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Try each set and print a table; 0 where all tests passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also the versions that are installed")
    options = parser.parse_args(arguments)
    installed, rows = {name: importlib.metadata.version(name) for name in SHOWN}, []
    for name, requirements in candidates().items():
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            versions = installed | overlay(Path(folder), requirements)
            if same(versions, installed) and not options.all:
                result = "installed: make test"
            else:
                result = "passed" if passes(Path(folder)) else "FAILED"
            rows.append([name, *(versions[each] for each in SHOWN), result, f"{time.monotonic() - begin:.0f} s"])
    print(table([["", *SHOWN, "tests", "time"], *rows]))
    return int(any("FAILED" in row for row in rows))


def overlay(folder: Path, requirements: Sequence[str]) -> dict[str, str]:
    """Install into `folder`, without what is met by the environment; the versions there. Raises CalledProcessError."""
    while requirements:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *requirements]
        subprocess.run(command, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        done = subprocess.run(
            [sys.executable, "-c", UNMET, str(folder)], capture_output=True, text=True, check=True, env=environment(folder)
        )
        requirements = done.stdout.split()
    return {each.name: each.version for each in importlib.metadata.distributions(path=[str(folder)]) if each.name in TRIED}


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process that finds the packages of `folder` first."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WORKSHOP_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}


def passes(folder: Path) -> bool:
    """Whether the reduced set of tests passes with the packages of `folder`."""
    command = [sys.executable, "-m", "pytest", *TESTS, "-q", "-m", "not slow and not gpu", "-n", "2", "-p", "no:cacheprovider"]
    try:
        return subprocess.run(command, cwd=ROOT, env=environment(folder), timeout=SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def same(versions: dict[str, str], installed: dict[str, str]) -> bool:
    """Whether two sets of versions are equal, however they are written."""
    return all(Version(versions[name]) == Version(installed[name]) for name in SHOWN)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts, the columns under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
