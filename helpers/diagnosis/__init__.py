"""`diagnose`: names the fault of a job that failed, of a job that returned, or of a log from elsewhere, or says "I don't know".

    diagnose(error)              # what `launch` raised: also there as error.diagnosis
    diagnose(run)                # a job that returned: do its ranks issue the same, from lines in the same order?
    diagnose(text)               # a pasted log or traceback: torchrun, accelerate, vLLM, NCCL, gloo
    diagnose(Path("job.log"))    # a log of any size, read in bounded memory

What is known stands in `data/faults.yaml`; a new fault is an entry there, and a test.
"""

from __future__ import annotations

import html
import os
import re
from dataclasses import dataclass
from pathlib import Path

from helpers.diagnosis import reading, sequences
from helpers.diagnosis.catalogue import SAYS, Fault, faults
from helpers.diagnosis.predicates import PREDICATES, Case
from helpers.diagnosis.sequences import Mismatch
from helpers.launching import LaunchError, RankDied, RankFailed, RanksHung, Run

__all__ = ["Diagnosis", "Fault", "Mismatch", "diagnose", "faults", "mismatch"]

TAIL = 1 << 16  # bytes of each rank's log that are searched beside the error's own message


@dataclass(frozen=True)
class Diagnosis:
    """What is known of the fault; `fault` is None where none was recognised.

    `ranks` are those at fault or those that show it, `section` is the part of a notebook that teaches it, `healthy` says that
    nothing was found and nothing looks wrong, `look_next` what to do where nothing is known.
    """

    fault: str | None = None
    name: str = ""
    evidence: tuple[str, ...] = ()
    explanation: str = ""
    mend: str = ""
    section: str = ""
    ranks: tuple[int, ...] = ()
    ruled_out: tuple[str, ...] = ()
    look_next: str = ""
    healthy: bool = False

    @property
    def line(self) -> str:
        """The end of an error's message: name, mend and section in two lines; nothing where no fault is known."""
        return f"Diagnosis: {self.name}. {self.mend}\nNotebook {self.section} teaches it." if self.fault else ""

    def _parts(self) -> list[tuple[str, tuple[str, ...]]]:
        if self.fault:
            told = [("", (self.explanation,)), ("Evidence", self.evidence), ("Mend", (self.mend,))]
            told += [("Ranks", (", ".join(map(str, self.ranks)),) if self.ranks else ()), ("Notebook", (self.section,))]
        else:
            told = [
                ("Seen", self.evidence),
                ("Ruled out", self.ruled_out),
                ("Look next", (self.look_next,) if self.look_next else ()),
            ]
        return [(title, texts) for title, texts in told if texts]

    def __str__(self) -> str:
        lines = [self.name + "."]
        for title, texts in self._parts():
            first, *rest = "\n".join(texts).splitlines()
            lines += [f"{title}: {first}" if title else first, *(f"    {line}" for line in rest)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = []
        for title, texts in self._parts():
            inner = "".join(f"<div style='white-space:pre-wrap'>{html.escape(text)}</div>" for text in texts)
            rows.append(f"<dt><b>{title}</b></dt><dd>{inner}</dd>" if title else f"<dd>{inner}</dd>")
        return f"<div><b>{html.escape(self.name)}.</b><dl>{''.join(rows)}</dl></div>"


def diagnose(x: LaunchError | Run | str | os.PathLike[str]) -> Diagnosis:
    """Name the fault that an error, a run or a log shows.

    Raises TypeError for anything else, OSError where a log cannot be read.
    """
    if isinstance(x, LaunchError):
        return _of_error(x)
    if isinstance(x, Run):
        return _of_run(x)
    if isinstance(x, (str, os.PathLike)):
        return _of_log(reading.read(x if isinstance(x, str) else Path(x)))
    kind = f"an exception ({type(x).__name__})" if isinstance(x, BaseException) else type(x).__name__
    raise TypeError(f"diagnose takes what launch raised or returned, a log's text or its Path, not {kind}")


def mismatch(x: Run | LaunchError) -> Mismatch | None:
    """The first place where a group's ranks differ in order, operation, size, dtype, group or source line; None where they agree.

    Raises TypeError for what has no recorded operations.
    """
    run = x.run if isinstance(x, LaunchError) else x
    if run is None:
        return None
    if not isinstance(run, Run):
        raise TypeError(f"mismatch takes what launch returned or raised, not {type(run).__name__}")
    return sequences.find(run.collectives, ended=x is run)


def _of_run(run: Run) -> Diagnosis:
    case = Case(run, None, mismatch(run))
    found = _by_predicate(case)
    if found:
        return found
    if case.mismatch:
        return Diagnosis(name="I don't know what this means", evidence=(str(case.mismatch),), look_next="The lines of this place")
    return Diagnosis(name="Nothing found: the job returned on every rank", ruled_out=(_agreement(run),), healthy=True)


def _of_error(error: LaunchError) -> Diagnosis:
    run = error.run
    case = Case(run, error, mismatch(error)) if run is not None else None
    by_predicate = _by_predicate(case) if case else None
    tails = [f"[rank{number}]: {line}" for number in range(run.ranks) for line in _tail(run, number)] if run else []
    read = reading.read("\n".join([str(error.args[0]), *tails]))
    sighting = read.best
    rank = () if error.rank is None else (error.rank,)
    if by_predicate and (sighting is None or _weight(by_predicate.fault) <= SAYS.index(sighting.fault.says)):
        return by_predicate
    if sighting:
        extra = (str(case.mismatch),) if case and case.mismatch and sighting.fault.says != "cause" else ()
        evidence = (*sighting.texts, *_where(error), *extra)
        return _named(sighting.fault, evidence, rank or tuple(sorted(sighting.ranks)))
    how = {RankFailed: "an exception left the function", RankDied: "a rank's process ended", RanksHung: "the timeout passed"}
    ruled_out = [_no_sign(read), *([_agreement(run)] if run and case and case.mismatch is None else [])]
    ruled_out += [f"{text}: no" for kind, text in how.items() if not isinstance(error, kind)]
    look = (
        "the last line of the traceback, in the code it names"
        if isinstance(error, RankFailed)
        else "what each rank was doing, above"
    )
    first = str(error.args[0]).splitlines()[0]
    return Diagnosis(
        name="I don't know this fault",
        evidence=(first,),
        ruled_out=tuple(ruled_out),
        ranks=rank,
        look_next=look[0].upper() + look[1:],
    )


def _of_log(read: reading.Reading) -> Diagnosis:
    sighting = read.best
    own = {rank: line for rank, line in read.exceptions.items() if rank is not None}
    besides = (f"besides: {read.exceptions[None]}",) if None in read.exceptions else ()
    if sighting and sighting.fault.says == "consequence" and own:
        signs = [other.ranks for other in read.sightings.values() if other.fault.says == "consequence"]
        raised = next(fault for fault in faults() if fault.predicate == "one raised")
        if len(own) == 1 or set().union(*signs) - own.keys():  # the others only say that this rank is gone
            culprit = read.failed_rank if read.failed_rank in own else next(iter(own))
            evidence = (f"rank {culprit} raised {own[culprit]}", f"line {sighting.line}: {sighting.texts[0]}")
            return _named(raised, evidence, (culprit,))
        sighting = None if sighting.fault is raised else sighting  # all raise alike: an error of the code, not of one rank
    if sighting:
        times = f" ({sighting.count} times)" if sighting.count > 1 else ""
        ranks = sighting.ranks or ({read.failed_rank} if read.failed_rank is not None else set())
        first, *rest = sighting.texts
        evidence = (f"line {sighting.line}{times}: {first}", *rest, *(besides if sighting.fault.says == "consequence" else ()))
        return _named(sighting.fault, evidence, tuple(sorted(ranks)))
    if read.blank:
        return Diagnosis(name="I don't know: there is nothing to read", look_next="The log's text, or a Path to its file")
    if not (read.trouble or read.exceptions):
        return Diagnosis(name="Nothing found: no line looks like a fault", ruled_out=(_no_sign(read),), healthy=True)
    seen = tuple(f"rank {rank}: {line}" if rank is not None else line for rank, line in list(read.exceptions.items())[:4])
    return Diagnosis(
        name="I don't know this fault",
        evidence=seen or (read.trouble,),
        ranks=tuple(sorted(own)),
        ruled_out=(_no_sign(read),),
        look_next="The first traceback in the log, not the last: later ones are often its consequences",
    )


def _by_predicate(case: Case) -> Diagnosis | None:
    """The first fault, causes before symptoms, whose predicate the job fulfils."""
    for fault in sorted(faults(), key=lambda fault: SAYS.index(fault.says)):
        evidence = PREDICATES[fault.predicate](case) if fault.predicate else ()
        if evidence:
            one = case.error.rank if case.error else case.mismatch.odd if case.mismatch else None
            return _named(fault, evidence, (one,) if one is not None else tuple(sorted(case.absent)))
    return None


def _weight(id: str | None) -> int:
    return next(SAYS.index(fault.says) for fault in faults() if fault.id == id)


def _named(fault: Fault, evidence: tuple[str, ...], ranks: tuple[int, ...]) -> Diagnosis:
    return Diagnosis(fault.id, fault.name, evidence, fault.explanation, fault.mend, fault.section, ranks)


def _agreement(run: Run) -> str:
    if not run.collectives:
        return f"nothing was recorded to compare the ranks by{f': {run.problem}' if run.problem else ''}"
    return f"all ranks issue the same {len(run.collectives):,} operations in the same order, from lines in the same order"


def _no_sign(read: reading.Reading) -> str:
    known = [fault for fault in faults() if fault.patterns]
    return f"none of {sum(len(f.patterns) for f in known)} known signs of {len(known)} faults stands in {read.lines:,} lines"


def _where(error: LaunchError) -> tuple[str, ...]:
    """The learner's line that the traceback begins with."""
    frame = re.search(r'File "(.+)", line (\d+), in .*\n +(.+)', error.traceback) if isinstance(error, RankFailed) else None
    return (f"raised in {os.path.basename(frame[1]).strip('<>')}, line {frame[2]}: {frame[3]}",) if frame else ()


def _tail(run: Run, number: int) -> list[str]:
    """The last lines that a rank printed."""
    return run.logs[number].last(TAIL).splitlines() if number < len(run.logs) else []
