"""What goes wrong in a job, as exceptions that name the rank at fault. They show their message in a notebook, not our frames."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helpers.launching.results import Run

diagnosers: list[Callable[[LaunchError], Any]] = []  # filled from above; the first that answers makes every error's `diagnosis`


class LaunchError(RuntimeError):
    """A job did not return a value on every rank.

    `rank` is the rank at fault (None where none can be named), `run` the partial `Run`, `diagnosis` what `diagnose` makes of it;
    `facts` are the attributes that the classes below add.
    """

    def __init__(self, message: str, rank: int | None = None, run: Run | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.rank = rank
        self.run = run
        vars(self).update(facts)

    @cached_property
    def diagnosis(self) -> Any:
        """What is known of the fault; None where nobody reads errors, or where reading this one fails."""
        for diagnose in diagnosers:
            with contextlib.suppress(Exception):  # an error must be shown, whatever becomes of its diagnosis
                return diagnose(self)
        return None

    def __str__(self) -> str:
        """The message, and at its end the fault, where it is known."""
        message, line = super().__str__(), getattr(self.diagnosis, "line", "")
        return f"{message}\n\n{line}" if line else message

    def _render_traceback_(self) -> list[str]:
        """Asked by IPython: the message alone, which holds the rank's own traceback."""
        return [f"{type(self).__name__}: {self}"]


class RankFailed(LaunchError):
    """An exception left the function on one rank; `exception` is its type's name, `traceback` that rank's own.

    Where the exception only says that another rank has gone, or met another collective, `rank` is that other one.
    """

    exception: str
    traceback: str


class RankDied(LaunchError):
    """A rank's process ended without an exception: `signal` is the name of the signal that killed it, or `code` its exit code."""

    code: int | None
    signal: str | None


class RanksHung(LaunchError):
    """The function did not return on every rank within the timeout.

    `waiting` maps each rank that sits in a collective to it, `stacks` each unfinished rank to its Python stack
    (outermost first), `difference` says where the ranks' sequences of collectives first differ (None where they do not),
    `timeout` is the time in seconds that was over, counted from when the last rank began.
    """

    waiting: dict[int, Any]
    stacks: dict[int, list[str]]
    difference: str | None
    timeout: float
