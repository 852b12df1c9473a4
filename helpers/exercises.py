"""Exercises: `check` an answer, ask for a `hint`, see a `solution`, look at one's `progress`.

Each `notebooks/solutions/NN.py` lists the exercises of notebook NN as `EXERCISES = [Exercise("NN.1", …), …]`. The name that a
stub cell passes to `check` is the name of the answer in that file, and an answer needs nothing but what the notebook's set-up
imports: then a test can put the answer into the stub. Such a file is read when one of its exercises is first asked for.
"""

import difflib
import dis
import html
import inspect
import math
import re
import runpy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from numbers import Real
from pathlib import Path
from types import FunctionType
from typing import Any

from helpers import record
from helpers.launching.errors import LaunchError
from helpers.launching.shipping import cell_name

SOLUTIONS = record.ROOT / "notebooks" / "solutions"
MARKS = {"solved": "✔", "wrong": "✘", "not answered yet": "…"}
_STUB_OPERATIONS = {"RESUME", "NOP", "COPY_FREE_VARS", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}

_hints_given: dict[str, int] = {}
_checked_here: set[str] = set()  # notebooks whose answers this process has checked


class Wrong(Exception):
    """Raised by an exercise's check: what the answer did, and what to do about it."""


@dataclass(frozen=True)
class Exercise:
    """One exercise. `check(answer)` returns what a right answer has shown, and raises `Wrong` with a teaching message otherwise.

    `answer` is a function (its source is the solution) or a value that `repr` can write; `wrong` holds at least two plausible
    wrong answers, each with a part of the message it must get.
    """

    id: str  # "04.2": the second of notebook 04
    task: str  # in a few words, for `progress`
    answer: Any
    hints: Sequence[str]
    check: Callable[[Any], str]
    wrong: Sequence[tuple[Any, str]]

    @property
    def source(self) -> str:
        """The answer as a learner would write it."""
        return inspect.getsource(self.answer) if isinstance(self.answer, FunctionType) else repr(self.answer)


@dataclass(frozen=True)
class Judgement:
    """What a check makes of an answer: `state` is "solved", "wrong" or "not answered yet", `error` that of the learner's job."""

    state: str
    message: str
    error: str = ""


def check(id: str, answer: Any) -> None:
    """Judge an answer and say what it shows or what to change; note the result in the learner's record.

    Never raises for a wrong, failing or missing answer. Raises ValueError for an exercise that does not exist.
    """
    found = judge(id, answer)
    _checked_here.add(_notebook(id))
    if found.state != "not answered yet":
        record.note("exercise", id, state=found.state)
    title = f"{MARKS[found.state]} {id} {found.state}"
    text, markup = f"{title}. {found.message}", f"<p><b>{title}.</b> {html.escape(found.message)}</p>"
    if found.error:
        text, markup = f"{text}\n{found.error}", f"{markup}<pre>{html.escape(found.error)}</pre>"
    record.Card(text, markup).show()


def judge(id: str, answer: Any) -> Judgement:
    """What `check` finds, without showing or noting it. Raises ValueError for an exercise that does not exist."""
    exercise = find(id)
    if unanswered(answer):
        return Judgement("not answered yet", f'Replace the ... above, then run this cell again; hint("{id}") helps.')
    if isinstance(exercise.answer, FunctionType) and not callable(answer):
        return Judgement("wrong", f"The answer is a function, itself and not its result; yours is a {type(answer).__name__}.")
    try:
        return Judgement("solved", exercise.check(answer))
    except Wrong as wrong:
        return Judgement("wrong", str(wrong))
    except LaunchError as error:
        return Judgement("wrong", "The check ran your job, and the job failed:", str(error))
    except Exception as error:
        told = f"{_learners_line(error)}{type(error).__name__}: {error}"
        return Judgement("wrong", "Your answer could not be judged, it raised:", told)


def _learners_line(error: Exception) -> str:
    """The innermost line outside this package and the solutions, where the error passed one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(Path(frame.filename).is_relative_to(ours) for ours in (SOLUTIONS, Path(__file__).parent)):
            return f"{cell_name(frame.filename)}, line {frame.lineno}: {frame.line}\n"
    return ""


def hint(id: str) -> None:
    """Show the next hint; after the last one, say so. Raises ValueError for an exercise that does not exist."""
    hints = find(id).hints
    number = min(_hints_given.get(id, 0), len(hints) - 1)
    _hints_given[id] = number + 1
    rest = "another call shows the next" if number + 1 < len(hints) else f'the last one; solution("{id}") shows an answer'
    title = f"Hint {number + 1} of {len(hints)} ({rest})"
    record.Card(f"{title}: {hints[number]}", f"<p><b>{html.escape(title)}:</b> {html.escape(hints[number])}</p>").show()


def solution(id: str) -> None:
    """Show an answer that passes the check. Raises ValueError for an exercise that does not exist."""
    source = find(id).source.rstrip()
    record.Card(source, f"<p><b>{id}, one way:</b></p><pre>{html.escape(source)}</pre>").show()


def progress() -> None:
    """Show how far the learner has come: each exercise of the notebook at work here, one line for each other.

    Where nothing was checked in this kernel yet, all exercises are listed.
    """
    notes = record.notes("exercise")
    tried = {note["name"] for note in notes}
    solved = {note["name"] for note in notes if note["state"] == "solved"}  # once is enough: experiments may follow
    rows: list[tuple[str, str, str]] = []
    for notebook, group in groupby(listed(), key=lambda exercise: _notebook(exercise[0])):
        exercises = list(group)
        if _checked_here and notebook not in _checked_here:
            rows.append((notebook, "", f"– {sum(id in solved for id, _ in exercises)} of {len(exercises)} solved"))
            continue
        for id, task in exercises:
            rows.append((id, task, "✔ solved" if id in solved else "✘ not solved yet" if id in tried else "– not tried yet"))
    title = f"{sum(id in solved for id, _ in listed())} of {len(listed())} exercises solved"
    width = max((len(task) for _, task, _ in rows), default=0)
    text = "\n".join(f"{id:<4}  {task:<{width}}  {state}" for id, task, state in rows)
    record.Card(f"{title}\n{text}", f"<p><b>{title}</b></p>{record.table(rows)}").show()


def find(id: str) -> Exercise:
    """The exercise with this id. Raises ValueError naming the nearest ids where there is none."""
    known = [name for name, _ in listed()]
    if id not in known:
        near = difflib.get_close_matches(str(id), known, n=3, cutoff=0.4) or known
        raise ValueError(f"there is no exercise {id!r}; nearest: {', '.join(near) or 'none, no solutions are here'}")
    return next(exercise for exercise in load(_notebook(id)) if exercise.id == id)


def _notebook(id: str) -> str:
    return id.split(".")[0]


@cache
def listed() -> tuple[tuple[str, str], ...]:
    """(id, task) of every exercise, read from the solutions' source without running it."""
    sources = [file.read_text("utf-8") for file in sorted(SOLUTIONS.glob("[0-9][0-9].py"))]
    return tuple(found for source in sources for found in re.findall(r'\bExercise\(\s*"([^"]+)",\s*"([^"]+)"', source))


@cache
def load(notebook: str) -> list[Exercise]:
    """The exercises of notebook "04". Not registered as a module: its functions then travel to ranks by value, like a cell's."""
    return list(runpy.run_path(str(SOLUTIONS / f"{notebook}.py"), run_name=f"solutions_{notebook}")["EXERCISES"])


def as_number(answer: Any) -> Real | None:
    """The finite number that an answer is, also one of numpy or a tensor of one element; None where it is none."""
    value = answer.item() if getattr(answer, "ndim", None) == 0 else answer
    try:
        return value if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) else None
    except OverflowError:  # larger than any float
        return None


def unanswered(answer: Any) -> bool:
    """Whether an answer is still the stub: `...`, None, a collection that holds `...`, or a function of nothing but `...`."""
    if isinstance(answer, FunctionType):
        operations = {step.opname for step in dis.get_instructions(answer)}
        return operations <= _STUB_OPERATIONS and set(answer.__code__.co_consts) <= {None, ..., answer.__doc__}
    if isinstance(answer, Mapping):
        answer = list(answer.values())
    return answer is None or any(part is ... for part in (answer if isinstance(answer, (list, tuple)) else [answer]))
