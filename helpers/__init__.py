"""Parallel jobs from notebook cells: real ranks, recorded traffic, predictions beside measurements.

Importing this package loads neither torch nor matplotlib; each name below is loaded when first used.
Inside a notebook kernel the import also starts the warm process that `launch` forks ranks from.
"""

import importlib
import os
import pkgutil
import sys
from typing import Any

from helpers.launching import errors

_FROM = {  # public name -> module that defines it
    "LaunchError": "launching",
    "RankDied": "launching",
    "RankFailed": "launching",
    "RanksHung": "launching",
    "Run": "launching",
    "launch": "launching",
    "check": "exercises",
    "diagnose": "diagnosis",
    "export_job": "launching.export",
    "hint": "exercises",
    "progress": "exercises",
    "solution": "exercises",
    "verdict": "claims",
}
_MODULES = [info.name for info in pkgutil.iter_modules(__path__)]  # public too, each by its own name

__all__ = sorted([*_FROM, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(f"helpers.{_FROM[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"helpers.{name}")
    raise AttributeError(f"helpers has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__


def _diagnose(error: errors.LaunchError) -> Any:
    """What `error.diagnosis` is: launching knows nothing of the floors above, so the reader of errors is named to it here."""
    return importlib.import_module("helpers.diagnosis").diagnose(error)


errors.diagnosers.append(_diagnose)


def _start_in_the_background() -> None:
    """In a notebook kernel the warm process imports torch while the learner still reads."""
    ipython = sys.modules.get("IPython")
    if "ipykernel" in sys.modules and ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None:
        from helpers.launching.engine import workplace

        workplace().engine(dict(os.environ))


_start_in_the_background()
