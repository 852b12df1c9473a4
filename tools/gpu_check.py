"""The GPU parts of all notebooks on this machine: tests first, then measurements that are kept for those without a GPU.

    python tools/gpu_check.py                              # `make gpu-check`: within 10 minutes on one GPU
    python tools/gpu_check.py --device cpu --into folder   # the same measurements, smaller, without a GPU: do they run?

What is measured goes into data/recorded/gpu_*.json with the machine and the date; `helpers.recorded.table` shows it, marked.
Nothing is recorded where there is no GPU or where a test fails. Exit code 0 where all went well, or there is no GPU.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from notebook_files import ROOT, named_or_all, read

from helpers import launch, machine, recorded

TEST_SECONDS, MEASURING_SECONDS = 240, 120  # in all, and for one measurement


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and record; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--into", type=Path, default=recorded.FOLDER, help="folder of the recordings")
    parser.add_argument("--only", nargs="*", help="some recordings, such as gpu_levers, without the tests")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    if options.device == "cpu":
        if options.into == recorded.FOLDER:
            parser.error("--device cpu needs --into: what a CPU gives is no recording of a GPU")
        os.environ["WORKSHOP_DEVICE"] = "cpu"
    elif missing := why_not():
        print(f"Nothing was recorded: {missing}.")
        return 0
    elif options.only is None and (code := tests()):
        print(f"Nothing was recorded: the tests in tests/gpu ended with exit code {code}.")
        return 1
    failed = record(options.into, options.only)
    print(f"{time.monotonic() - begin:.0f} s in all; recorded on {machine.describe().line}")
    print(f"FAILED: {', '.join(failed)}" if failed else "Everything that was measured is in " + str(options.into))
    return bool(failed)


def why_not() -> str:
    """What is missing for GPU measurements; empty where they can run."""
    if not machine.gpus():
        return "no NVIDIA GPU here, or it is hidden (WORKSHOP_DEVICE, CUDA_VISIBLE_DEVICES)"
    return "" if machine.torch_cuda() else "there is a GPU, but the installed torch is a CPU build"


def tests() -> int:
    """Run tests/gpu; pytest's exit code, 1 where they take too long."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "--durations", "5"]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=TEST_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return 1


def measurements() -> dict[str, Callable[[], Any]]:
    """By recording, what measures it here."""
    import gpu_measurements as here
    import torch

    def in_a_rank(measure: Callable[[], Any], ranks: int = 1) -> Callable[[], Any]:
        return lambda: launch(measure, ranks=ranks, timeout=MEASURING_SECONDS).results[0]

    found = {
        "gpu_arithmetic": in_a_rank(here.arithmetic),
        "gpu_transfers": in_a_rank(here.transfers),
        "gpu_levers": here.levers,
        "gpu_tokens": in_a_rank(here.tokens),
    }
    gpus = len(machine.gpus())
    if gpus != 1:
        found["gpu_all_reduce"] = in_a_rank(here.all_reduce, gpus or 2)
    if gpus:
        names: dict[str, Any] = {"torch": torch}
        cell = next(cell for cell in read(named_or_all(["07"])[0]).cells if cell.id == "fragmented")
        own = next(node for node in ast.parse(cell.source).body if isinstance(node, ast.FunctionDef))
        exec(ast.unparse(own), names)  # the notebook's own function: its cell shows what that returns
        found["gpu_allocator"] = in_a_rank(names["fragmented"])
        if here.serving_possible():
            found["gpu_serving"] = here.serving
    return found


def record(into: Path, only: Sequence[str] | None = None) -> list[str]:
    """Measure and write; the names of what failed."""
    from gpu_measurements import COLUMNS

    failed, possible = [], measurements()
    if unknown := sorted(set(only or ()) - set(possible)):
        raise SystemExit(f"{', '.join(unknown)} cannot be recorded here; {', '.join(possible)} can")
    for name in only or possible:
        begin = time.monotonic()
        try:
            values = json.loads(json.dumps(possible[name]()))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(name)
            continue
        recorded.write(name, {"columns": COLUMNS[name], "rows": values} if name in COLUMNS else values, into)
        print(f"{name}: {time.monotonic() - begin:.1f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
