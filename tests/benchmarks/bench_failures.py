"""How soon a learner hears of a failure, and how soon nothing is left after an interrupt or a killed kernel."""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from .framework import Findings, Row, at_most, benchmark, interleaved, shown
from .kernels import Kernel
from .processes import gone_within

TELL_LIMIT, CLEAN_LIMIT = 1.0, 3.0  # seconds required
GIVE_UP = 120.0  # seconds after which a benchmark stops waiting

FAULTS = {  # what rank 1 does while rank 0 sits in a collective -> (statement, the error's name)
    "raises": ("raise ValueError('on purpose')", "RankFailed"),
    "os._exit(3)": ("os._exit(3)", "RankDied"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "RankDied"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "RankDied"),
}
FAULTY_JOB = """
import os, signal, time, torch, torch.distributed as dist
from helpers import launch
def {name}(path):
    dist.barrier()
    if dist.get_rank() == 1:
        with open(path, "w") as file:
            file.write(repr(time.perf_counter()))
        {statement}
    dist.all_reduce(torch.ones(1))
"""

ENDLESS_JOBS = {  # what both ranks do -> body
    "in a collective": "    if dist.get_rank() == 0: dist.recv(torch.ones(1), 1)\n    dist.recv(torch.ones(1), 0)\n",
    "in a Python loop, deaf to SIGTERM and SIGINT": "    while True: pass\n",
}
ENDLESS_JOB = """
import os, signal, torch, torch.distributed as dist
from helpers import launch
def {name}(folder):
    for number in {deaf}:
        signal.signal(number, signal.SIG_IGN)
    dist.barrier()
    open(os.path.join(folder, f"{{os.getpid()}}"), "w").close()
{body}
"""


@benchmark
def told(repeats: int) -> Findings:
    """From the fault of one rank, while the other sits in a collective, to the error in the notebook."""
    right: list[bool] = []
    with tempfile.TemporaryDirectory() as folder, Kernel() as kernel:
        numbers = itertools.count()

        def contender(name: str, error: str) -> Callable[[], float]:
            def seconds() -> float:
                path = Path(folder, str(next(numbers)))
                answer = kernel.run(f"launch({name}, {str(path)!r})", GIVE_UP)
                right.append(answer.error == error and "rank 1" in answer.message)
                return answer.replied - float(path.read_text())

            return seconds

        contenders = {}
        for number, (what, (statement, error)) in enumerate(FAULTS.items()):
            kernel.check(FAULTY_JOB.format(name=f"fault{number}", statement=statement) + "print('ready')", "ready")
            contenders[f"rank 1: {what}"] = contender(f"fault{number}", error)
        kernel.check("print(launch(lambda: 1).results)", "[1, 1]")
        kernel.settle()
        timed = interleaved(contenders, repeats)
    slowest = max(max(row.samples) for row in timed.rows())
    claims = [at_most(f"error shown, {row.name}: slowest", max(row.samples), TELL_LIMIT, "s") for row in timed.rows()]
    claims.append(shown("each error names rank 1 and its kind", all(right)))
    return Findings(timed.rows(), claims, f"A failed rank is named within {slowest * 1000:.0f} ms")


@benchmark
def stopped(repeats: int) -> Findings:
    """From an interrupt of the kernel to its KeyboardInterrupt with no rank left, the next launch working."""
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, Kernel() as kernel:
        contenders = {}
        for number, (what, body) in enumerate(ENDLESS_JOBS.items()):
            deaf = "(signal.SIGTERM, signal.SIGINT)" if "deaf" in what else "()"
            kernel.check(ENDLESS_JOB.format(name=f"endless{number}", deaf=deaf, body=body) + "print('ready')", "ready")
            contenders[f"ranks {what}"] = lambda name=f"endless{number}": _interrupt(kernel, name, folder, chance)
        kernel.check("print(launch(lambda: 1).results)", "[1, 1]")
        kernel.settle()
        timed = interleaved(contenders, repeats)
    claims = [at_most(f"interrupted, {row.name}: slowest", max(row.samples), CLEAN_LIMIT, "s") for row in timed.rows()]
    slowest = max(max(row.samples) for row in timed.rows())
    return Findings(timed.rows(), claims, f"After an interrupt no rank is left within {slowest * 1000:.0f} ms")


@benchmark
def killed(repeats: int) -> Findings:
    """From a SIGKILL of the kernel to the end of all that it started: ranks deaf to SIGTERM, and the warm process."""
    name, body = list(ENDLESS_JOBS.items())[1]
    samples = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder, Kernel() as kernel:
            job = ENDLESS_JOB.format(name="endless", deaf="(signal.SIGTERM, signal.SIGINT)", body=body)
            kernel.begin(f"{job}\nlaunch(endless, {folder!r}, timeout=None)")
            _ranks_in(folder)
            begin = time.perf_counter()
            samples.append(_until_gone(kernel.kill(), begin))
    row = Row(f"ranks {name}", tuple(samples))
    slowest = max(samples)
    claims = [at_most("kernel killed: nothing is left, slowest", slowest, CLEAN_LIMIT, "s")]
    return Findings([row], claims, f"After a killed kernel nothing is left within {slowest * 1000:.0f} ms")


def _interrupt(kernel: Kernel, name: str, folder: str, chance: random.Random) -> float:
    with _empty(folder):
        begun = kernel.begin(f"launch({name}, {folder!r}, timeout=None)")
        ranks = _ranks_in(folder)
        time.sleep(chance.uniform(0, 0.05))  # at any moment of the kernel's loop
        begin = time.perf_counter()
        kernel.interrupt()
        gone = _until_gone(ranks, begin)
        answer = kernel.finish(begun, GIVE_UP)
    if answer.error != "KeyboardInterrupt":
        raise RuntimeError(f"an interrupted launch gave {answer.error or answer.text!r}")
    kernel.check("print(launch(lambda: 1).results)", "[1, 1]")
    return max(gone, answer.replied - begin)


@contextlib.contextmanager
def _empty(folder: str) -> Iterator[None]:
    for path in Path(folder).iterdir():
        path.unlink()
    yield


def _ranks_in(folder: str) -> list[psutil.Process]:
    """The 2 ranks, as soon as both have left their numbers in `folder`."""
    deadline = time.monotonic() + GIVE_UP
    while len(found := list(Path(folder).iterdir())) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks did not start")
        time.sleep(0.002)
    return [psutil.Process(int(path.name)) for path in found]


def _until_gone(processes: list[psutil.Process], begin: float) -> float:
    if not gone_within(processes, GIVE_UP):
        raise RuntimeError(f"{GIVE_UP:g} s later there are still {processes}")
    return time.perf_counter() - begin
