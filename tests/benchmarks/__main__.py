"""Run benchmarks: `python -m tests.benchmarks [names]`; exit code 0 if every requirement holds.

    python -m tests.benchmarks --list              what there is
    python -m tests.benchmarks launch              one topic
    python -m tests.benchmarks launch.latency      one benchmark
    python -m tests.benchmarks --wait 600 --record wait until nothing else runs, then keep the results in data/recorded

Tables go to the terminal, figures and samples to build/bench. Exit codes: 0 all requirements hold, 1 one does not or a
benchmark failed, 2 nothing was run (a wrong name, or other processes use the machine).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import tests.benchmarks
from helpers import machine

from . import report
from .framework import LEAST_REPEATS, Benchmark, Findings, discover, select
from .processes import Watch, busiest, contained, end_all
from .report import Outcome

ROOT = Path(__file__).parents[2]
QUIET = 0.15  # cores used by other processes above which nothing is started
LOOK = 2.0  # seconds of looking at what other processes do


def main(
    arguments: Sequence[str] | None = None,
    package: ModuleType = tests.benchmarks,
    build: Path = ROOT / "build" / "bench",
    recorded: Path = ROOT / "data" / "recorded",
) -> int:
    """Run the benchmarks of `package` that the command line names; returns the exit code."""
    options = _options(arguments)
    try:
        chosen = select(discover(package), options.names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{one.full_name:<28} {one.summary}" for one in chosen))
        return 0
    if options.record and any("." in name for name in options.names):
        print("--record keeps whole topics: name topics, not single benchmarks", file=sys.stderr)
        return 2
    if options.record and (options.repeats < LEAST_REPEATS or options.anyway):
        print(f"--record needs {LEAST_REPEATS} repeats or more and a quiet machine", file=sys.stderr)
        return 2
    if (busy := wait_until_quiet(options.wait)) and not options.anyway:
        print(
            f"Not run, because {busy}. Ratios mean something only when nothing else runs: end that, wait for it", file=sys.stderr
        )
        print("with --wait SECONDS, or try the benchmarks out with --anyway.", file=sys.stderr)
        return 2
    print(f"{machine.describe().line}; {options.repeats} repeats" + (f"; disturbed: {busy}" if busy else ""), flush=True)
    outcomes = []
    with contained():
        for one in chosen:
            outcomes.append(run(one, options.repeats))
            print(f"\n{report.table(outcomes[-1])}", flush=True)
    written = report.save(outcomes, build)
    if options.record and all(outcome.quiet for outcome in outcomes):
        written += report.save(outcomes, recorded, "bench_")
    elif options.record:
        print("\nNothing was recorded: other processes ran meanwhile.", file=sys.stderr)
    print("\nwritten: " + ", ".join(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path) for path in written))
    failed = [outcome.benchmark.full_name for outcome in outcomes if not outcome.passed]
    print("every requirement holds" if not failed else f"not as required: {', '.join(failed)}")
    return 1 if failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks", description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="topics or benchmarks; all if none is given")
    parser.add_argument("--list", action="store_true", help="say what there is and run nothing")
    parser.add_argument("--repeats", type=int, default=LEAST_REPEATS, help="samples of each (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="keep the results in data/recorded as well")
    parser.add_argument("--wait", type=float, default=0, metavar="SECONDS", help="wait so long for a quiet machine")
    parser.add_argument("--anyway", action="store_true", help="run on a busy machine; times are disturbed, nothing is recorded")
    return parser.parse_args(arguments)


def wait_until_quiet(limit: float) -> str:
    """Wait up to `limit` seconds until other processes use next to no CPU; returns "" or who uses it."""
    deadline = time.monotonic() + limit
    while True:
        watch = Watch()
        top = busiest(LOOK)
        used = watch.others()
        if used <= QUIET:
            return ""
        if time.monotonic() >= deadline:
            return f"other processes use {used:.2f} cores" + (f": {', '.join(top)}" if top else "")


def run(one: Benchmark, repeats: int) -> Outcome:
    """Run a benchmark, and end every process that it leaves."""
    watch, begin = Watch(), time.monotonic()
    findings, error = Findings(()), ""
    try:
        findings = one.function(repeats)
    except Exception as problem:
        error = "".join(traceback.format_exception(problem)).strip()
    finally:
        seconds = time.monotonic() - begin
        end_all()
    return Outcome(one, seconds, watch.others(), findings, error)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
