"""What a job itself shows of a fault, beyond any text: each function returns the evidence, or nothing where it does not apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from helpers.diagnosis.sequences import Mismatch
from helpers.launching import LaunchError, RankDied, RankFailed, RanksHung, Run, waits
from helpers.measuring.records import Collective

LONG = 0.25  # of the timeout: for how long others have waited for a rank before it is held to be stuck
Evidence = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A job to be judged: its run, the error it ended with (None where it returned) and where its ranks differ."""

    run: Run
    error: LaunchError | None
    mismatch: Mismatch | None

    @property
    def absent(self) -> set[int]:
        """The ranks that did not come to where others wait: those that returned, or are waited for since long."""
        if not (self.mismatch and self.mismatch.what == "missing" and (self.error is None or isinstance(self.error, RanksHung))):
            return set()
        limit = self.error.timeout if isinstance(self.error, RanksHung) else 0.0
        begun = max((span[0] for span in self.run.spans if span), default=0.0)
        long = begun + limit - max(c.start for c in self.awaited) >= LONG * limit  # else it may be a job that is only slow
        return {rank for rank, issued in self.mismatch.rows.items() if issued is None and (long or self.returned(rank))}

    @property
    def awaited(self) -> list[Collective]:
        """What those who did come wait in."""
        return [c for c in self.mismatch.rows.values() if c is not None] if self.mismatch else []

    def busy(self, rank: int) -> bool:
        """Whether the rank was in code of its own, not in an operation, when the job was ended."""
        stack = self.error.stacks.get(rank) if isinstance(self.error, RanksHung) and rank not in self.error.waiting else None
        return bool(stack and not stack[-1].startswith(waits.IN_TORCH))

    def returned(self, rank: int) -> bool:
        """Whether the function had returned on that rank."""
        span = self.run.spans[rank] if rank < len(self.run.spans) else None
        return span is not None and span[1] is not None

    def elsewhere(self, rank: int) -> bool:
        """Whether the rank had returned, or sat in another operation."""
        stuck = isinstance(self.error, RanksHung) and not self.busy(rank) and bool(self.error.stacks.get(rank))
        return stuck or self.returned(rank)


def differs(what: str) -> Callable[[Case], Evidence]:
    """The predicate that holds where the ranks' operations first differ in `what`."""

    def predicate(case: Case) -> Evidence:
        return (str(case.mismatch),) if case.mismatch is not None and case.mismatch.what == what else ()

    return predicate


def callbacks(case: Case) -> Evidence:
    """Operations without a line of the learner's, which callbacks of a communication hook issue, do not match."""
    if case.mismatch is None or case.mismatch.what not in ("op", "bytes", "missing"):
        return ()
    hooked = any(c.source is None and c.op == "all_reduce" for c in case.run.collectives)
    here = any(c is not None and c.source is None for c in case.mismatch.rows.values())
    return (str(case.mismatch), "operations without a line of yours come from a hook's callbacks") if hooked and here else ()


def uneven(case: Case) -> Evidence:
    """The absent rank has passed the awaited line before, only less often, and has returned: its loop was shorter."""
    count = dict.fromkeys(range(case.run.ranks), 0)
    lines = {(c.source, c.op) for c in case.awaited}
    for collective in case.run.collectives:
        count[collective.rank] += (collective.source, collective.op) in lines
    if not any(count[rank] and case.returned(rank) for rank in case.absent):
        return ()
    times = ", ".join(f"rank {rank} {count[rank]} times" for rank in sorted(count))
    return (str(case.mismatch), f"operations issued from that line: {times}")


def conditional(case: Case) -> Evidence:
    """The absent rank has never passed the awaited line, and is in no work of its own: it took another branch."""
    lines = {c.source for c in case.awaited}
    passed = {c.rank for c in case.run.collectives if c.source in lines}
    return (str(case.mismatch),) if any(rank not in passed and case.elsewhere(rank) for rank in case.absent) else ()


def works_alone(case: Case) -> Evidence:
    """The absent rank is at work in lines of its own."""
    if not isinstance(case.error, RanksHung):
        return ()
    alone = [rank for rank in case.absent if case.busy(rank)]
    return tuple(f"rank {rank} was at {case.error.stacks[rank][-1]}" for rank in alone) + ((str(case.mismatch),) if alone else ())


def pair_cycle(case: Case) -> Evidence:
    """Sends and receives that all wait for each other."""
    if not isinstance(case.error, RanksHung):
        return ()
    waiting = case.error.waiting
    if not waiting or any(c.op not in waits.PAIRWISE for c in waiting.values()):
        return ()
    circle = all(c.peer in waiting for c in waiting.values())
    return tuple(f"rank {rank} waits in {waits.describe(c)}" for rank, c in sorted(waiting.items())) if circle else ()


def making_a_group(case: Case) -> Evidence:
    """Ranks wait inside new_group, which every rank has to call with the same list."""
    stacks = case.error.stacks if isinstance(case.error, RanksHung) else {}
    where = {
        rank: line for rank, stack in stacks.items() for line in stack if "new_group(" in line or "init_device_mesh(" in line
    }
    return tuple(f"rank {rank} waits in {line}" for rank, line in sorted(where.items()))


def never_joined(case: Case) -> Evidence:
    """Some ranks did not come to the process group."""
    first = str(case.error.args[0]).splitlines()[0] if case.error else ""
    return (first,) if "did not join the process group" in first else ()


def killed(case: Case) -> Evidence:
    """The system, or somebody, killed a rank."""
    return _died(case, "SIGKILL", "SIGTERM")


def crashed(case: Case) -> Evidence:
    """Compiled code crashed."""
    return _died(case, "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")


def _died(case: Case, *signals: str) -> Evidence:
    if isinstance(case.error, RankDied) and case.error.signal in signals:
        return (str(case.error.args[0]).splitlines()[0],)
    return ()


def exited(case: Case) -> Evidence:
    """A rank's process left by itself."""
    return (str(case.error.args[0]).splitlines()[0],) if isinstance(case.error, RankDied) and case.error.code is not None else ()


def one_raised(case: Case) -> Evidence:
    """One rank raised an exception of its own while others waited for it."""
    if not isinstance(case.error, RankFailed) or case.error.rank is None or peer_gone(case):
        return ()
    waiting = [r for r in waits.in_flight(case.run.collectives) if r != case.error.rank]
    first = str(case.error.args[0]).splitlines()[0]
    return (first, f"waiting meanwhile: rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}") if waiting else ()


def peer_gone(case: Case) -> Evidence:
    """A rank says that another one has closed the connection."""
    if not isinstance(case.error, RankFailed) or "closed the connection before" not in str(case.error.args[0]):
        return ()
    return tuple(line for line in str(case.error.args[0]).splitlines() if "closed the connection before" in line)


PREDICATES: dict[str, Callable[[Case], Evidence]] = {
    "op differs": differs("op"),
    "bytes differ": differs("bytes"),
    "dtype differs": differs("dtype"),
    "group differs": differs("group"),
    "order of lines differs": differs("source"),
    "callbacks differ": callbacks,
    "uneven": uneven,
    "conditional": conditional,
    "works alone": works_alone,
    "pair cycle": pair_cycle,
    "making a group": making_a_group,
    "never joined": never_joined,
    "killed": killed,
    "crashed": crashed,
    "exited": exited,
    "one raised": one_raised,
    "peer gone": peer_gone,
}
