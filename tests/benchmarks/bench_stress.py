"""The launcher under stress: many faults and interrupts, none of which may blame the wrong rank or leave anything behind."""

from __future__ import annotations

import subprocess
import sys
import time

from .framework import Findings, Row, benchmark, shown
from .kernels import ROOT, environment_of_a_learner

LIMIT = 3600.0  # seconds
LINES = 12  # of its report that are kept


@benchmark
def faults_and_interrupts(repeats: int) -> Findings:
    """200 faulted launches, all kinds mixed, and 100 interrupts at random moments, once each."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress_launch"],
        cwd=ROOT,
        env=environment_of_a_learner(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    return Findings(
        [Row("all of them", (time.perf_counter() - begin,))],
        [shown("the right rank each time, the next launch works, nothing is left", done.returncode == 0)],
        "Faults and interrupts at random moments",
        done.stdout.splitlines()[-LINES:],
    )
