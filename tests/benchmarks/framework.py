"""What a benchmark is made of: rows of samples, claims with a verdict, and contenders timed side by side.

A module `bench_<topic>.py` in this folder holds the benchmarks of one topic, each a function:

    @benchmark
    def latency(repeats: int) -> Findings:
        '''Seconds from a call to its value.'''
        timed = interleaved({"ours": run_ours, "theirs": run_theirs}, repeats)
        rows = timed.rows()
        return Findings(rows, [at_least("ours is 20 times as fast", rows["theirs"].median / rows["ours"].median, 20, "×")])

It is found by its name and runs as `python -m tests.benchmarks <topic>` or `<topic>.<function>`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

LEAST_REPEATS = 5  # samples below which a median is not worth recording


@dataclass(frozen=True)
class Row:
    """Samples of one quantity. `unit` is "s", "bytes", "%" … ; a row without samples stands for something that did not run."""

    name: str
    samples: tuple[float, ...]
    unit: str = "s"
    note: str = ""

    @property
    def median(self) -> float:
        """NaN without samples: a claim on it fails."""
        return statistics.median(self.samples) if self.samples else math.nan


@dataclass(frozen=True)
class Claim:
    """A requirement and what was measured of it; it holds if `least` ≤ `measured` ≤ `most`."""

    text: str
    measured: float
    least: float = -math.inf
    most: float = math.inf
    unit: str = ""

    @property
    def holds(self) -> bool:
        """False also for NaN."""
        return self.least <= self.measured <= self.most


def at_least(text: str, measured: float, least: float, unit: str = "") -> Claim:
    """A claim that holds from `least` on."""
    return Claim(text, measured, least=least, unit=unit)


def at_most(text: str, measured: float, most: float, unit: str = "") -> Claim:
    """A claim that holds up to `most`."""
    return Claim(text, measured, most=most, unit=unit)


def shown(text: str, true: bool) -> Claim:
    """A claim that something was so, without a number."""
    return Claim(text, float(true), least=1, unit="true")


@dataclass(frozen=True)
class Findings:
    """What a benchmark returns: `finding` is its result in one sentence, the title of its figure; `notes` are for people."""

    rows: Sequence[Row]
    claims: Sequence[Claim] = ()
    finding: str = ""
    notes: Sequence[str] = ()


class DoesNotRun(Exception):
    """Raised by a contender that cannot run on this machine, with the reason; the others go on."""


@dataclass
class Timed:
    """Samples by row name, and why contenders are missing."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Row:
        return Row(name, tuple(self.samples.get(name, ())), note=self.missing.get(name, ""))

    def rows(self) -> list[Row]:
        """A row per name, those that did not run last."""
        return [self[name] for name in [*self.samples, *(name for name in self.missing if name not in self.samples)]]


Contender = Callable[[], "float | Mapping[str, float]"]


def interleaved(contenders: Mapping[str, Contender], repeats: int) -> Timed:
    """Run every contender once a round, `repeats` rounds, each round beginning with another one: what disturbs, disturbs all.

    A contender returns the seconds that it measured, or several named ones.
    """
    timed = Timed()
    names = list(contenders)
    for turn in range(repeats):
        begin = turn % len(names) if names else 0
        for name in names[begin:] + names[:begin]:
            if name in timed.missing:
                continue
            try:
                measured = contenders[name]()
            except DoesNotRun as reason:
                timed.missing[name] = f"does not run here: {reason}"
                continue
            for row, seconds in (measured if isinstance(measured, Mapping) else {name: measured}).items():
                timed.samples.setdefault(row, []).append(seconds)
    order = [row for name in names for row in timed.samples if row == name or row.startswith(f"{name}, ")]
    timed.samples = {row: timed.samples[row] for row in dict.fromkeys([*order, *timed.samples])}
    return timed


@dataclass(frozen=True)
class Benchmark:
    """One function of a module `bench_<topic>.py`."""

    topic: str
    name: str
    function: Callable[[int], Findings]

    @property
    def full_name(self) -> str:
        return f"{self.topic}.{self.name}"

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]


def benchmark(function: Callable[[int], Findings]) -> Callable[[int], Findings]:
    """Mark a function `(repeats) -> Findings` as a benchmark."""
    function.is_benchmark = True  # type: ignore[attr-defined]
    return function


def discover(package: ModuleType) -> list[Benchmark]:
    """The benchmarks of all modules `bench_*` in `package`, by topic, in the order in which they are written."""
    found = []
    for module_name in sorted(info.name for info in pkgutil.iter_modules(package.__path__) if info.name.startswith("bench_")):
        module = importlib.import_module(f"{package.__name__}.{module_name}")
        for name, function in vars(module).items():
            if getattr(function, "is_benchmark", False) and function.__module__ == module.__name__:
                found.append(Benchmark(module_name.removeprefix("bench_"), name, function))
    return found


def select(benchmarks: Sequence[Benchmark], wanted: Sequence[str]) -> list[Benchmark]:
    """Those whose topic or full name is in `wanted`; all if it is empty. Raises ValueError for a name that names none."""
    known = {name for one in benchmarks for name in (one.topic, one.full_name)}
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no benchmark is called {', '.join(map(repr, unknown))}; there are {', '.join(sorted(known))}")
    return [one for one in benchmarks if not wanted or one.topic in wanted or one.full_name in wanted]
