"""What a job itself shows of a fault, beyond any text: each function returns the evidence, or nothing where it does not apply."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from helpers.diagnosis.sequences import Mismatch
from helpers.launching import LaunchError, RankFailed, RanksHung, Run, waits
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
    def hung(self) -> RanksHung | None:
        """The error, where the job hung."""
        return self.error if isinstance(self.error, RanksHung) else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those at fault: the error's, or the one that differs from all others, else the absent ones."""
        one = self.error.rank if self.error else self.mismatch.odd if self.mismatch else None
        return tuple(sorted(self.absent)) if one is None else (one,)

    @property
    def absent(self) -> set[int]:
        """The ranks that did not come to where others wait: those that returned, or are waited for since long."""
        if self.mismatch is None or self.mismatch.what != "missing" or not (self.error is None or self.hung):
            return set()
        limit = self.hung.timeout if self.hung else 0.0
        begun = max((span[0] for span in self.run.spans if span), default=0.0)
        long = begun + limit - max(c.start for c in self.awaited) >= LONG * limit  # else it may be a job that is only slow
        return {rank for rank, issued in self.mismatch.rows.items() if issued is None and (long or self.returned(rank))}

    @property
    def awaited(self) -> list[Collective]:
        """What those who did come wait in."""
        return [c for c in self.mismatch.rows.values() if c is not None] if self.mismatch else []

    def stack(self, rank: int) -> list[str]:
        """Where the rank was when the job was ended because it hung, outermost line first."""
        return self.hung.stacks.get(rank, []) if self.hung else []

    def busy(self, rank: int) -> bool:
        """Whether the rank was in code of its own then, not in an operation."""
        stack = self.stack(rank)
        return bool(self.hung and rank not in self.hung.waiting and stack and not stack[-1].startswith(waits.IN_TORCH))

    def returned(self, rank: int) -> bool:
        """Whether the function had returned on that rank."""
        span = self.run.spans[rank] if rank < len(self.run.spans) else None
        return span is not None and span[1] is not None


def differs(what: str, case: Case) -> Evidence:
    """The ranks' operations first differ in `what`."""
    return (str(case.mismatch),) if case.mismatch is not None and case.mismatch.what == what else ()


def callbacks(case: Case) -> Evidence:
    """Operations without a line of the learner's, which callbacks of a communication hook issue, do not match."""
    if case.mismatch is None or case.mismatch.what not in ("op", "bytes", "missing"):
        return ()
    hooked = any(c.source is None and c.op == "all_reduce" for c in case.run.collectives)
    here = any(c.source is None for c in case.awaited)
    return (str(case.mismatch), "operations without a line of yours come from a hook's callbacks") if hooked and here else ()


def uneven(case: Case) -> Evidence:
    """The absent rank has passed the awaited line before, only less often, and has returned: its loop was shorter."""
    lines = {(c.source, c.op) for c in case.awaited}
    count = Counter(c.rank for c in case.run.collectives if (c.source, c.op) in lines)
    if not any(count[rank] and case.returned(rank) for rank in case.absent):
        return ()
    times = ", ".join(f"rank {rank} {count[rank]} times" for rank in range(case.run.ranks))
    return (str(case.mismatch), f"operations issued from that line: {times}")


def conditional(case: Case) -> Evidence:
    """The absent rank has never passed the awaited line, and has returned or waits elsewhere: it took another branch."""
    lines = {c.source for c in case.awaited}
    passed = {c.rank for c in case.run.collectives if c.source in lines}
    elsewhere = {rank for rank in case.absent if case.returned(rank) or (case.stack(rank) and not case.busy(rank))}
    return (str(case.mismatch),) if elsewhere - passed else ()


def works_alone(case: Case) -> Evidence:
    """The absent rank is at work in lines of its own."""
    alone = [f"rank {rank} was at {case.stack(rank)[-1]}" for rank in sorted(case.absent) if case.busy(rank)]
    return (*alone, str(case.mismatch)) if alone else ()


def pair_cycle(case: Case) -> Evidence:
    """Sends and receives that all wait for each other."""
    waiting = case.hung.waiting if case.hung else {}
    circle = all(c.op in waits.PAIRWISE and c.peer in waiting for c in waiting.values())
    return tuple(f"rank {rank} waits in {waits.describe(c)}" for rank, c in sorted(waiting.items())) if circle else ()


def making_a_group(case: Case) -> Evidence:
    """Ranks wait inside new_group, which every rank has to call with the same list."""
    lines = [(rank, line) for rank in range(case.run.ranks) for line in case.stack(rank)]
    return tuple(f"rank {rank} waits in {line}" for rank, line in lines if "new_group(" in line or "init_device_mesh(" in line)


def one_raised(case: Case) -> Evidence:
    """One rank raised an exception of its own while others waited for it."""
    said = str(case.error.args[0]) if isinstance(case.error, RankFailed) and case.error.rank is not None else ""
    waiting = [rank for rank in waits.in_flight(case.run.collectives) if rank not in case.ranks]
    if not said or not waiting or "closed the connection before" in said:
        return ()
    return (said.splitlines()[0], f"waiting meanwhile: rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}")


PREDICATES: dict[str, Callable[[Case], Evidence]] = {
    **{f"{what} differs": partial(differs, what) for what in ("op", "bytes", "dtype", "group", "source")},
    "callbacks differ": callbacks,
    "uneven": uneven,
    "conditional": conditional,
    "works alone": works_alone,
    "pair cycle": pair_cycle,
    "making a group": making_a_group,
    "one raised": one_raised,
}
