"""Many faulted jobs and many interrupts, all kinds mixed: is it always the right rank, soon, and is nothing left?

python tests/stress_launch.py --faults 200 --interrupts 100
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from helpers import LaunchError, launch

sys.path.insert(0, os.path.dirname(__file__))  # also when run as a module
from launch_support import Kernel, descendants, kernel, wait_until, warm_processes, working_in

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as with the functions of a cell

FAULTS = {  # how the culprit ends -> the error that names it
    "raises": "RankFailed",
    "raises in a hook": "RankFailed",
    "raises and closes its group": "RankFailed",
    "closes its group and returns": "RankFailed",
    "returns a lock": "RankFailed",
    "exits": "RankDied",
    "sys.exit": "RankDied",
    "SIGKILL": "RankDied",
    "SIGKILL from a thread": "RankDied",
    "SIGSEGV": "RankDied",
    "SIGABRT": "RankDied",
    "other size": "RankDied",
    "other operation": "RanksHung",
    "never joins": "RanksHung",
    "returns early": "RanksHung",
    "stuck in C": "RanksHung",
}
SETTINGS = ("all_reduce", "stream", "receive", "DDP", "compute")  # what the others do meanwhile
NEED_PEERS = ("closes its group and returns", "other size", "other operation", "never joins", "returns early", "stuck in C")


@dataclass
class Outcome:
    """What a stress gave; `seconds` from each fault until its error was raised, or from each interrupt until all was over."""

    runs: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        line = f"{self.right} of {self.runs} right"
        if self.seconds:
            line += f"; median {statistics.median(self.seconds):.3f} s, longest {max(self.seconds):.3f} s"
        return "\n".join([line, *self.wrong])


def faulty_job(fault: str, setting: str, culprit: int, delay: float) -> None:
    """One rank ends as `fault` says, after `delay` seconds, while the others do what `setting` says."""
    import ctypes
    import signal

    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    guilty = rank == culprit
    x = torch.ones(16)

    def end_now() -> Any:
        if fault == "SIGKILL from a thread":
            threading.Timer(delay, lambda: (note(), os.kill(os.getpid(), signal.SIGKILL))).start()
            return None
        time.sleep(delay)
        note()
        if fault.startswith("raises"):
            raise ArithmeticError(f"fault of rank {rank}")
        if fault == "closes its group and returns":
            dist.destroy_process_group()
        elif fault == "returns a lock":
            return threading.Lock()
        elif fault == "exits":
            os._exit(3)
        elif fault == "sys.exit":
            sys.exit(3)
        elif fault == "SIGSEGV":
            ctypes.string_at(0)
        elif fault in ("SIGKILL", "SIGABRT"):
            os.kill(os.getpid(), getattr(signal, fault))
        elif fault == "other size":
            dist.all_reduce(torch.ones(800))
        elif fault == "other operation":
            dist.broadcast(x, 0)
        elif fault == "never joins":
            time.sleep(1000)
        elif fault == "stuck in C":
            ctypes.PyDLL(None).usleep(1_000_000_000)
        return "over"

    def note() -> None:
        print("fault at", time.perf_counter(), flush=True)

    def step(number: int) -> Any:
        if setting == "DDP":
            model(torch.ones(2, 8)).sum().backward()
        elif setting == "receive":
            if rank == culprit:
                for other in set(range(ranks)) - {culprit}:
                    dist.send(x, other)
            else:
                dist.recv(x, culprit)
        elif setting == "compute":
            sum(range(10_000))
        else:
            dist.all_reduce(x)

    if setting == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    turn = 0
    while setting != "all_reduce" or turn < 1:
        if guilty and turn == (3 if setting in ("stream", "DDP", "receive") else 0):
            try:
                if fault == "raises in a hook":
                    y = torch.ones(2, requires_grad=True)
                    y.register_hook(lambda gradient: end_now())
                    y.sum().backward()
                value = end_now()
                if value is not None:
                    return value
            except ArithmeticError:
                if "closes" in fault:
                    dist.destroy_process_group()
                raise
        try:
            step(turn)
        except RuntimeError as error:
            raise ValueError("wrapped by the learner's own code") from error
        turn += 1
    time.sleep(1000)


def trains() -> None:
    """One step of DDP."""
    import torch

    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))(torch.ones(2, 8)).sum().backward()


def faulted_runs(count: int, seed: int = 0, limit: float = 60.0, say: Callable[[str], object] = lambda line: None) -> Outcome:
    """Run `count` jobs that fail, each kind as often, with settings, culprits, ranks and moments drawn at random."""
    draw, outcome = random.Random(seed), Outcome()
    faults = [list(FAULTS)[number % len(FAULTS)] for number in range(count)]
    draw.shuffle(faults)
    launch(trains)  # the warm process then knows what DDP needs; otherwise each job that fails early would import it
    for fault in faults:
        hangs = FAULTS[fault] == "RanksHung"
        setting = draw.choice([s for s in SETTINGS if s != "compute" or fault not in NEED_PEERS])
        if fault in ("other size", "other operation"):
            setting = draw.choice(("all_reduce", "stream"))
        ranks = draw.randint(3 if fault.startswith("other") else 2, 5)
        culprit, delay = draw.randrange(ranks), draw.uniform(0, 0.05)
        case = f"{fault}, {ranks} ranks, culprit {culprit}, others: {setting}"
        outcome.runs += 1
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    launch(faulty_job, fault, setting, culprit, delay, ranks=ranks, timeout=1.0 if hangs else limit)
                outcome.wrong.append(f"{case}: no error")
            except LaunchError as error:
                raised, left = time.perf_counter(), working_in(folder)
                said = error.run.output(culprit).splitlines() if error.run else []
                noted = [float(line.split()[-1]) for line in said if line.startswith("fault at")]
                if not hangs and noted:
                    outcome.seconds.append(raised - noted[0])
                if (type(error).__name__, error.rank) == (FAULTS[fault], culprit) and noted and not left:
                    outcome.right += 1
                else:
                    outcome.wrong.append(f"{case}: {type(error).__name__} of rank {error.rank}, left {left}\n{error}")
        say(f"{outcome.runs:4} {case}")
    return outcome


JOBS = {  # cells to interrupt at a random moment
    "short jobs, one after another": "while True:\n    launch(short)",
    "collectives": "launch(collectives)",
    "asleep": "launch(asleep, ranks=3)",
    "prints": "launch(prints)",
    "ignores signals": "launch(stubborn)",
    "failing jobs": "while True:\n    try:\n        launch(failing)\n    except LaunchError:\n        pass",
}
PLAIN = "print('waits', flush=True)\nwhile True:\n    time.sleep(0.01)"  # a signal just before a long sleep waits for its end
DEFINITIONS = """
import os, signal, time
import torch.distributed as dist, torch
def short():
    dist.barrier()
def collectives():
    while True:
        dist.all_reduce(torch.ones(1000))
def asleep():
    time.sleep(1000)
def prints():
    while True:
        print("x" * 100)
def failing():
    if dist.get_rank() == 1:
        raise ValueError
    dist.barrier()
def stubborn():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
    while True:
        time.sleep(1)
def add_up():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
"""


def interrupt_once(notebook: Kernel, code: str, moment: float | str, patience: float = 60.0) -> float:
    """Interrupt the cell `code` after `moment` seconds, or once it has printed the text `moment`.

    Returns the seconds from the interrupt until the cell had ended and no process of its job was left. Raises AssertionError
    if it ends otherwise than by KeyboardInterrupt, or leaves a process.
    """
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        notebook.interrupt()

    folder = notebook.run("import os, tempfile\nos.chdir(tempfile.mkdtemp())\nprint(os.getcwd())").text.strip()
    execution = notebook.start(code)
    if isinstance(moment, str):
        reply = notebook.finish(execution, printed=lambda text: press() if moment in text and not pressed else None)
    else:
        timer = threading.Timer(moment, press)
        timer.start()
        reply = notebook.finish(execution)
        timer.join()
    assert reply.error is not None, f"the cell ended before the interrupt: {reply.text}"
    assert reply.error[0] == "KeyboardInterrupt", reply.error
    wait_until(lambda: working_in(folder) == [notebook.pid], "no process of the job is left", patience)
    seconds = time.monotonic() - pressed[0]
    notebook.run("home = os.getcwd()\nos.chdir('/')\nos.rmdir(home)")
    return seconds


def interrupts(count: int, seed: int = 0, say: Callable[[str], object] = lambda line: None) -> Outcome:
    """Interrupt `count` cells of one kernel; after each, a job and an interrupt of a plain cell must work."""
    draw, outcome = random.Random(seed), Outcome()
    while outcome.runs < count:
        with kernel() as notebook:  # another one only after something went wrong
            notebook.run(DEFINITIONS)
            handler = notebook.run("print(signal.getsignal(signal.SIGINT))").text
            while outcome.runs < count:
                name, moment = list(JOBS)[outcome.runs % len(JOBS)], draw.uniform(0, 0.5)
                case = f"{name}, interrupted after {moment:.3f} s"
                outcome.runs += 1
                try:
                    outcome.seconds.append(interrupt_once(notebook, JOBS[name], moment))
                    assert notebook.run("print(launch(add_up).results)").text == "[2.0, 2.0]\n"
                    interrupt_once(notebook, PLAIN, "waits")
                    assert notebook.run("print(signal.getsignal(signal.SIGINT))").text == handler
                    assert [p.pid for p in descendants(notebook.pid)] == [p.pid for p in warm_processes(notebook.pid)]
                    outcome.right += 1
                except AssertionError as error:
                    outcome.wrong.append(f"{case}: {error}")
                    break
                say(f"{outcome.runs:4} {case}")
    return outcome


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--faults", type=int, default=200)
    arguments.add_argument("--interrupts", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    faults = faulted_runs(chosen.faults, chosen.seed, say=print)
    print(f"faulted runs: {faults}", flush=True)
    stops = interrupts(chosen.interrupts, chosen.seed, say=print)
    print(f"interrupts: {stops}")
    sys.exit(bool(faults.wrong or stops.wrong))


if __name__ == "__main__":
    main()
