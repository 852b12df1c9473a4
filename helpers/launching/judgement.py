"""Which error a job deserves: the first cause is named, and what the other ranks were doing."""

import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from helpers.launching import rank, waits
from helpers.launching.errors import LaunchError, RankDied, RankFailed, RanksHung
from helpers.launching.job import LARGEST_LOG, Job
from helpers.launching.results import Run

_MEANING = {
    "SIGKILL": " (from outside, or by the system because memory ran out)",
    "SIGSEGV": " (a crash in compiled code)",
    "SIGABRT": " (compiled code gave up: its last lines say why)",
}


def judge(job: Job, run: Run) -> None:
    """Raise what the job deserves; nothing if every rank returned."""
    if job.printed_too_much is not None:
        number = job.printed_too_much
        raise LaunchError(f"rank {number} printed more than {LARGEST_LOG >> 20} MiB; the job was stopped", number, run)
    if job.hung is not None:
        _raise_hung(job, run, job.hung)
    if any(state != "finished" for state in job.states):
        _raise_failed(job, run)
    if job.unreadable:
        number, why = min(job.unreadable.items())
        message = (
            f"rank {number} returned a value that the notebook cannot rebuild ({why}). Return plain values, tensors or arrays."
        )
        raise LaunchError(message, number, run)


def _raise_failed(job: Job, run: Run) -> NoReturn:
    """The first cause: a lost peer is a consequence, and so is what came later."""
    reports = {
        number: _report(job, run, number)
        for number, exit in job.exits.items()
        if number in job.raised or not (exit["killed"] or (job.states[number] == "finished" and not exit["code"]))
    }
    if not reports:
        raise LaunchError("the ranks ended without saying why", None, run)
    number = min(reports, key=lambda n: (reports[n]["lost_peer"], reports[n]["time"]))
    report = reports[number]
    if "traceback" in report:  # where several raise the very same, the one named is the same on every run
        number = min(n for n in reports if reports[n].get("traceback") == report["traceback"])
    at_fault: int | None = number
    what = ""
    row = waits.first_difference(run.collectives) or {}
    mine = row.get(number)
    if mine is not None and mine.end is None and None not in row.values():  # it ended in an operation that did not match
        what = f"\nThe first place where their collectives differ:\n{waits.describe_difference(row)}"
        odd = waits.odd_one_out(row)
        at_fault = number if odd is None else odd
    elif report["lost_peer"]:
        waiting = {n: c for n, c in waits.in_flight(run.collectives).items() if n in reports}
        gone = waits.waited_for(run.collectives, waiting) or (set(range(run.ranks)) - reports.keys())
        at_fault = min(gone) if len(gone) == 1 else None
        what = (
            f"\n{_those(gone).capitalize()} closed the connection before {job.name} had returned on every rank." if gone else ""
        )
    others = _others(job, run, number)
    who = f"rank {number} of {run.ranks}{_on_host(job, number)}"
    if "traceback" in report:
        message = f"{who} raised {report['summary']}{what}{others}\n\n{report['traceback']}"
        raise RankFailed(message, at_fault, run, exception=report["type"], traceback=report["traceback"])
    code, name = report["code"], None
    how = f"exited with code {code}"
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        how = f"was killed by {name}{_MEANING.get(name, '')}"
    when = "after it had returned from" if job.states[number] == "finished" else "before it returned from"
    said = _last_lines(run.output(number))
    message = f"{who} {how} {when} {job.name}.{what}{others}" + (said and f"\n\nIts last lines:\n{said}")
    raise RankDied(message, at_fault, run, code=code if code >= 0 else None, signal=name)


def _report(job: Job, run: Run, number: int) -> dict[str, Any]:
    """What the rank said of its end; of one that said nothing, how it went."""
    if number in job.raised:
        return job.raised[number]
    exit = job.exits[number]
    aborted = exit["code"] == -signal.SIGABRT  # so ends an exception in a thread of compiled code
    return {**exit, "lost_peer": aborted and rank.says_peer_is_gone(_last_lines(run.output(number)))}


def _on_host(job: Job, number: int) -> str:
    """Where the rank ran, if there were several hosts, and whether that host has failed."""
    hosts = len(job.request["hosts"])
    if not hosts:
        return ""
    each = len(job.states) // hosts
    ranks = range(number // each * each, (number // each + 1) * each)
    failed = all(job.exits.get(rank, {}).get("code") == -signal.SIGKILL and not job.exits[rank]["killed"] for rank in ranks)
    return f" on host {number // each}" + (f", where {_those(ranks)} ended at once," if failed and each > 1 else "")


def _others(job: Job, run: Run, number: int) -> str:
    """What the other ranks were doing, a line each."""
    waiting = waits.in_flight(run.collectives)
    lines = [f"  rank {other} {_doing(job, other, waiting)}" for other in range(run.ranks) if other != number]
    return "\n".join(["\nMeanwhile:", *lines]) if lines else ""


def _doing(job: Job, number: int, waiting: dict[int, Any]) -> str:
    if job.states[number] == "finished":
        return f"had finished {job.name}"
    if number in waiting:
        return f"was in {waits.describe(waiting[number])}"
    if number in job.raised:
        return f"raised {job.raised[number]['type']} as well"
    if number not in job.started:
        return f"had not begun {job.name}"
    stack = _stack(job, number)
    return f"was at {' → '.join(stack[-2:])}" if stack else f"was in {job.name}"


def _stack(job: Job, number: int) -> list[str]:
    return waits.read_stack(Path(job.file("stack", number)).read_text(errors="replace"), rank.__file__)


def _raise_hung(job: Job, run: Run, hung: dict[str, Any]) -> NoReturn:
    stuck = set(hung["ranks"])
    stacks = {number: _stack(job, number) for number in hung["ranks"]}
    waiting = {number: issued for number, issued in waits.in_flight(run.collectives).items() if number in stuck}
    blocked = waiting.keys() | {number for number, stack in stacks.items() if stack and stack[-1].startswith(waits.IN_TORCH)}
    row = waits.first_difference(run.collectives)
    if hung["while_in"] == "join":
        missing = set(range(run.ranks)) - job.started.keys()
        message = f"{_those(missing)} did not join the process group"
    else:
        missing = (waits.waited_for(run.collectives, waiting) - blocked) or (stuck - blocked)
        if not (missing or run.collectives):  # nothing was recorded: those who have left are missing
            missing = set(range(run.ranks)) - stuck
        message = f"{job.name} did not return on {_those(stuck)} within {job.request['timeout']:g} s"
        if missing and blocked:
            left = ", which returned already" if not missing & stuck else ""
            message += f": {_those(blocked)} wait{'s' * (len(blocked) == 1)} for {_those(missing)}{left}"
    lines = []
    for number in range(run.ranks):
        doing = f"waits in {waits.describe(waiting[number])}" if number in waiting else _doing(job, number, waiting)
        lines += [f"  rank {number} {doing}", *(f"      {entry}" for entry in stacks.get(number, []))]
    message += ".\n" + "\n".join(lines)
    difference = waits.describe_difference(row) if row else None
    if difference:
        message += f"\nThe first place where their collectives differ:\n{difference}"
    alone = min(missing) if len(missing) == 1 else None
    at_fault = waits.odd_one_out(row) if row and not missing else alone
    facts = {"waiting": waiting, "stacks": stacks, "difference": difference, "timeout": job.request["timeout"]}
    raise RanksHung(message, at_fault, run, **facts)


def _those(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, sorted(ranks)))}"


def _last_lines(text: str) -> str:
    """The end of a dead rank's output, without what faulthandler says of frames outside the job."""
    lines = [line for line in text.rstrip().splitlines() if not line.startswith("Extension modules:")]
    inside = next((i for i, line in enumerate(lines) if f'"{rank.__file__}"' in line), len(lines))
    return "\n".join([line for line in lines[:inside] if line.strip()][-15:])
