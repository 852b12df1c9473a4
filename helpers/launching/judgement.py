"""Which error a job deserves: the first cause is named, and what the other ranks were doing."""

from __future__ import annotations

import json
import os
import signal
from typing import Any, NoReturn

from helpers.launching import rank, waits
from helpers.launching.errors import LaunchError, RankDied, RankFailed, RanksHung
from helpers.launching.job import Job
from helpers.launching.results import Run

_MEANING = {
    "SIGKILL": " (from outside, or by the system because memory ran out)",
    "SIGSEGV": " (a crash in compiled code)",
    "SIGABRT": " (compiled code gave up: its last lines say why)",
}


def judge(job: Job, run: Run) -> None:
    """Raise what the job deserves; nothing if every rank returned."""
    if job.stopped:
        raise LaunchError(job.stopped, None, run)
    if job.hung is not None:
        _raise_hung(job, run, job.hung)
    faulty = [
        number
        for number, exit in job.exits.items()
        if not (exit["killed"] or job.states[number] == "finished") or os.path.exists(job.file("error", number))
    ]
    if any(state != "finished" for state in job.states):
        _raise_failed(job, run, faulty)


def _raise_failed(job: Job, run: Run, faulty: list[int]) -> NoReturn:
    """The first cause: a lost peer is a consequence, and so is what came later."""
    reports = {number: _report(job, number) for number in faulty}
    if not reports:
        raise LaunchError("the ranks ended without saying why", None, run)
    number = min(reports, key=lambda n: (reports[n].get("lost_peer", False), reports[n]["time"]))
    report, others = reports[number], _others(job, run, number)
    if "traceback" in report:
        raised = f"{report['type']}: {report['message']}"
        message = f"rank {number} of {run.ranks} raised {raised}{others}\n\n{report['traceback'].rstrip()}"
        raise RankFailed(message, number, run, report["type"], report["traceback"])
    code, name = report["code"], None
    how = f"exited with code {code} before {job.name} returned"
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        how = f"was killed by {name}{_MEANING.get(name, '')}"
    said = "\n".join(_last_lines(run.output(number)))
    message = f"rank {number} of {run.ranks} {how}.{others}" + (f"\n\nIts last lines:\n{said}" if said else "")
    raise RankDied(message, number, run, code if code >= 0 else None, name)


def _report(job: Job, number: int) -> dict[str, Any]:
    path = job.file("error", number)
    if not os.path.exists(path):
        return job.exits[number]
    with open(path) as file:
        return json.load(file)


def _others(job: Job, run: Run, number: int) -> str:
    """What the other ranks were doing, a line each."""
    waiting = waits.in_flight(run.collectives)
    lines = [f"  rank {other} {_doing(job, other, waiting)}" for other in range(run.ranks) if other != number]
    return "\nMeanwhile:\n" + "\n".join(lines) if lines else ""


def _doing(job: Job, number: int, waiting: dict[int, Any]) -> str:
    if job.states[number] == "finished":
        return f"had finished {job.name}"
    if number in waiting:
        return f"was in {waits.describe(waiting[number])}"
    if job.started[number] is None:
        return f"had not begun {job.name}"
    stack = _stack(job, number)
    return f"was at {stack[-1]}" if stack else f"was in {job.name}"


def _stack(job: Job, number: int) -> list[str]:
    path = job.file("stack", number)
    if not os.path.exists(path):
        return []
    with open(path, errors="replace") as file:
        return waits.read_stack(file.read(), rank.__file__)


def _raise_hung(job: Job, run: Run, hung: dict[str, Any]) -> NoReturn:
    waiting = waits.in_flight(run.collectives)
    stacks = {number: _stack(job, number) for number in hung["ranks"]}
    row = waits.first_difference(run.collectives)
    missing = waits.waited_for(run.collectives) or {n for n in hung["ranks"] if n not in waiting}
    guilty = min(missing) if len(missing) == 1 else None
    at_fault = waits.odd_one_out(row) if row and not missing else guilty
    if hung["while_in"] == "join":
        late = [n for n in range(run.ranks) if job.started[n] is None]
        message = f"ranks {late} did not join the process group"
    else:
        message = f"{job.name} did not return on ranks {hung['ranks']} within {job.request['timeout']:g} s"
    if guilty is not None and run.ranks > 1:
        message += f": the others wait for rank {guilty}"
        if job.states[guilty] == "finished":
            message += f", which has left {job.name} already"
    lines = []
    for number in range(run.ranks):
        if number in waiting and number in hung["ranks"]:
            lines.append(f"  rank {number} waits in {waits.describe(waiting[number])}")
        else:
            lines.append(f"  rank {number} {_doing(job, number, waiting)}")
        lines += [f"      {entry}" for entry in stacks.get(number, [])]
    message += ".\n" + "\n".join(lines)
    difference = waits.describe_difference(row) if row else None
    if difference:
        message += f"\nThe first place where their collectives differ:\n{difference}"
    raise RanksHung(message, at_fault, run, {n: c for n, c in waiting.items() if n in hung["ranks"]}, stacks, difference)


def _last_lines(text: str) -> list[str]:
    """The end of a dead rank's output, without what faulthandler says of frames outside the job."""
    lines = [line for line in text.rstrip().splitlines() if not line.startswith("Extension modules:")]
    inside = next((i for i, line in enumerate(lines) if f'"{rank.__file__}"' in line), len(lines))
    return [line for line in lines[:inside] if line.strip()][-15:]
