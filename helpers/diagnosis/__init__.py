"""`diagnose`: names the fault of a job that failed, of a job that returned, or of a log from elsewhere, or says "I don't know".

    diagnose(error)              # what `launch` raised: also there as error.diagnosis
    diagnose(run)                # a job that returned: do its ranks issue the same, from lines in the same order?
    diagnose(text)               # a pasted log or traceback: torchrun, accelerate, vLLM, NCCL, gloo
    diagnose(Path("job.log"))    # a log of any size, read in bounded memory

What is known stands in `data/faults.yaml`; a new fault is an entry there, and a test.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from helpers.diagnosis import reading, sequences
from helpers.diagnosis.catalogue import Fault, faults
from helpers.diagnosis.predicates import PREDICATES, Case
from helpers.diagnosis.sequences import Mismatch
from helpers.launching import LaunchError, RankDied, RankFailed, RanksHung, Run

__all__ = ["Diagnosis", "Fault", "Mismatch", "diagnose", "faults", "mismatch"]

TAIL = 1 << 16  # bytes of each rank's log that are searched beside the error's own message


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What is known of the fault; `fault` is None where none was recognised.

    `ranks` are those at fault or those that show it, `section` is the part of a notebook that teaches it, `healthy` says that
    nothing was found and nothing looks wrong, `look_next` what to do where nothing is known.
    """

    name: str
    evidence: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    fault: str | None = None
    explanation: str = ""
    mend: str = ""
    section: str = ""
    ruled_out: tuple[str, ...] = ()
    look_next: str = ""
    healthy: bool = False

    @property
    def line(self) -> str:
        """The end of an error's message: name, mend and section in two lines; nothing where no fault is known."""
        return f"Diagnosis: {self.name}. {self.mend}\nNotebook {self.section} teaches it." if self.fault else ""

    def __repr__(self) -> str:
        told = {
            "Evidence" if self.fault else "Seen": "\n".join(self.evidence),
            "Mend": self.mend,
            "Ranks": ", ".join(map(str, self.ranks)) if self.fault else "",
            "Notebook": self.section,
            "Ruled out": "\n".join(self.ruled_out),
            "Look next": self.look_next,
        }
        parts = [f"{title}: {text}".replace("\n", "\n    ") for title, text in told.items() if text]
        return "\n".join([f"{self.name}.", *([self.explanation] if self.explanation else []), *parts])


def diagnose(x: LaunchError | Run | str | os.PathLike[str]) -> Diagnosis:
    """Name the fault that an error, a run or a log shows.

    Raises TypeError for anything else, ValueError for a path as text, OSError where a log cannot be read.
    """
    if isinstance(x, LaunchError):
        return _of_error(x)
    if isinstance(x, Run):
        return _of_run(x)
    if isinstance(x, str) and re.fullmatch(r"\S+\.(log|txt|out|err)", x.strip()):
        raise ValueError(f"this text is the name of a file: diagnose(Path({x.strip()!r})) reads what stands in it")
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
    if found := _by_predicate(case):
        return _named(*found, case.ranks)
    if case.mismatch:
        return Diagnosis("I don't know what this means", (str(case.mismatch),), look_next="The lines of this place")
    return Diagnosis("Nothing found: the job returned on every rank", ruled_out=(_agreement(run),), healthy=True)


def _of_error(error: LaunchError) -> Diagnosis:
    run = error.run or Run(0, "", "")
    case = Case(run, error, mismatch(error))
    message = str(error.args[0])
    tails = [f"[rank{rank}]: {line}" for rank in range(run.ranks) for line in _tail(run, rank)]
    read = reading.read("\n".join([message, *tails, ""]))
    found, sighting = _by_predicate(case), read.best
    if found and (sighting is None or found[0].weight <= sighting.fault.weight):
        return _named(*found, case.ranks)
    ranks = () if error.rank is None else (error.rank,)
    own = isinstance(error, RankFailed) and error.rank is not None and "closed the connection before" not in message
    if own and sighting and sighting.fault.says == "consequence" and sighting.ranks and error.rank not in sighting.ranks:
        return _named(_raised(), (message.splitlines()[0], sighting.texts[0], *_where(error)), ranks)
    if sighting:
        difference = (str(case.mismatch),) if case.mismatch and sighting.fault.says != "cause" else ()
        return _named(sighting.fault, (*sighting.texts, *_where(error), *difference), ranks or tuple(sorted(sighting.ranks)))
    how = {RankFailed: "an exception left the function", RankDied: "a rank's process ended", RanksHung: "the timeout passed"}
    failed = isinstance(error, RankFailed)
    return Diagnosis(
        "I don't know this fault",
        (message.splitlines()[0],),
        ranks,
        ruled_out=(
            _no_sign(read),
            *([] if case.mismatch else [_agreement(run)]),
            *(f"{text}: no" for kind, text in how.items() if not isinstance(error, kind)),
        ),
        look_next="The last line of the traceback, in the code it names" if failed else "What each rank was doing, above",
    )


def _of_log(read: reading.Reading) -> Diagnosis:
    sighting = read.best
    own = {rank: line for rank, line in read.exceptions.items() if rank is not None}
    if sighting and sighting.fault.says == "consequence" and own:
        victims = [other.ranks for other in read.sightings.values() if other.fault.says == "consequence"]
        raised = _raised()
        if len(own) == 1 or set().union(*victims) - own.keys():  # the others only say that this rank is gone
            culprit = read.failed_rank if read.failed_rank in own else next(iter(own))
            told = (f"rank {culprit} raised {own[culprit]}", f"line {sighting.line}: {sighting.texts[0]}")
            return _named(raised, told, (culprit,))
        sighting = None if sighting.fault is raised else sighting  # all raise alike: an error of the code, not of one rank
    if sighting:
        times = f" ({sighting.count} times)" if sighting.count > 1 else ""
        evidence = [f"line {sighting.line}{times}: {sighting.texts[0]}", *sighting.texts[1:]]
        if sighting.fault.says == "consequence" and None in read.exceptions:
            evidence.append(f"besides: {read.exceptions[None]}")
        ranks = sighting.ranks or ({read.failed_rank} if read.failed_rank is not None else set())
        return _named(sighting.fault, tuple(evidence), tuple(sorted(ranks)))
    if read.blank:
        return Diagnosis("I don't know: there is nothing to read", look_next="The log's text, or a Path to its file")
    ruled_out = (_no_sign(read),)
    if not (read.trouble or read.exceptions):
        return Diagnosis("Nothing found: no line looks like a fault", ruled_out=ruled_out, healthy=True)
    seen = [f"rank {rank}: {line}" if rank is not None else line for rank, line in read.exceptions.items()]
    look_next = "The first traceback in the log, not the last: later ones are often its consequences"
    return Diagnosis(
        "I don't know this fault",
        tuple(seen[:4]) or (read.trouble,),
        tuple(sorted(own)),
        ruled_out=ruled_out,
        look_next=look_next,
    )


def _by_predicate(case: Case) -> tuple[Fault, tuple[str, ...]] | None:
    """The first fault, causes before symptoms, whose predicate the job fulfils, and the evidence."""
    for fault in sorted(faults(), key=lambda fault: fault.weight):
        if fault.predicate and (evidence := PREDICATES[fault.predicate](case)):
            return fault, evidence
    return None


def _raised() -> Fault:
    """The fault of a rank that raised, of which the others only say that it is gone."""
    return next(fault for fault in faults() if fault.predicate == "one raised")


def _named(fault: Fault, evidence: tuple[str, ...], ranks: tuple[int, ...]) -> Diagnosis:
    return Diagnosis(fault.name, evidence, ranks, fault.id, fault.explanation, fault.mend, fault.section)


def _agreement(run: Run) -> str:
    if not run.collectives:
        return f"nothing was recorded to compare the ranks by{f': {run.problem}' if run.problem else ''}"
    lines = "from lines in the same order" if sequences.same_lines(run.collectives) else "though not all from the same lines"
    return f"all ranks issue the same {len(run.collectives):,} operations in the same order, {lines}"


def _no_sign(read: reading.Reading) -> str:
    known = [fault for fault in faults() if fault.patterns]
    lines = f"{read.lines:,} line{'s' * (read.lines != 1)}"
    return f"none of {sum(len(f.patterns) for f in known)} known signs of {len(known)} faults stands in {lines}"


def _where(error: LaunchError) -> tuple[str, ...]:
    """The learner's line that the traceback begins with."""
    frame = re.search(r'File "(.+)", line (\d+), in .*\n +(.+)', getattr(error, "traceback", ""))
    return (f"raised in {os.path.basename(frame[1]).strip('<>')}, line {frame[2]}: {frame[3]}",) if frame else ()


def _tail(run: Run, rank: int) -> list[str]:
    """The last lines that a rank printed."""
    return run.logs[rank].last(TAIL).splitlines() if run.logs else []
