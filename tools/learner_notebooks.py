"""Learners work on copies: my_notebooks/ holds them, git ignores it, and nothing a learner changed is ever overwritten.

python tools/learner_notebooks.py      # copy notebooks that are not there yet (part of `make lab`)
python tools/learner_notebooks.py 04   # bring 04 back as it was; the learner's own gets a dated name (`make fresh NB=04`)
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
MINE = ROOT / "my_notebooks"
RECORD = ".copied.json"  # file name -> digest of the notebook it was copied from


def copy_new(notebooks: Path = NOTEBOOKS, mine: Path = MINE) -> list[str]:
    """Copy notebooks that the learner lacks, and newer ones over copies never changed; one line for each."""
    mine.mkdir(exist_ok=True)
    record = _read_record(mine)
    lines = []
    for original in sorted(notebooks.glob("*.ipynb")):
        copy, name, digest = mine / original.name, original.name, _digest(original)
        if not copy.exists():
            lines.append(f"{name}: copied to {mine.name}/")
        elif record.get(name) == digest:
            continue
        elif _digest(copy) == digest:  # only its record is gone
            _note(original, mine, record)
            continue
        elif record.get(name) == _digest(copy):
            lines.append(f"{name}: renewed, the course has a newer one")
        else:
            lines.append(f"{name}: the course has a newer one; yours stays. `make fresh NB={name[:2]}` brings the newer one")
            continue
        _copy(original, copy, record)
    return lines


def bring_back(prefix: str, notebooks: Path = NOTEBOOKS, mine: Path = MINE, now: datetime | None = None) -> str:
    """Put the course's notebook in the learner's folder; the learner's own is kept under a dated name. Says what was done.

    Raises ValueError where `prefix` names no notebook, or several.
    """
    names = [path.name for path in sorted(notebooks.glob("*.ipynb"))]
    found = [name for name in names if prefix and name.startswith(prefix)]
    if len(found) != 1:
        known = ", ".join(name[:2] for name in names) or "none yet"
        raise ValueError(f"NB={prefix} names {len(found)} notebooks; right is the number of one: {known}")
    mine.mkdir(exist_ok=True)
    copy, kept = mine / found[0], ""
    if copy.exists():
        stem = f"{copy.stem}.{now or datetime.now():%Y-%m-%d-%H%M%S}"
        names_left = (mine / f"{stem}{suffix}.ipynb" for suffix in ("", *(f"-{count}" for count in range(2, 1000))))
        dated = next(path for path in names_left if not path.exists())
        copy.rename(dated)
        kept = f"; yours is now {dated.name}"
    _copy(notebooks / found[0], copy, _read_record(mine))
    return f"{mine.name}/{found[0]} is as the course has it{kept}"


def _copy(original: Path, copy: Path, record: dict[str, str]) -> None:
    partial = copy.with_suffix(".partial")
    shutil.copyfile(original, partial)
    os.replace(partial, copy)  # a full disk or an interrupt leaves no half notebook
    _note(original, copy.parent, record)


def _note(original: Path, mine: Path, record: dict[str, str]) -> None:
    record[original.name] = _digest(original)
    partial = mine / f"{RECORD}.partial"
    partial.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    os.replace(partial, mine / RECORD)


def _read_record(mine: Path) -> dict[str, str]:
    try:
        found = json.loads((mine / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", nargs="?", help="number of the notebook to bring back, such as 04")
    options = parser.parse_args()
    try:
        print(*([bring_back(options.notebook)] if options.notebook is not None else copy_new()), sep="\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
