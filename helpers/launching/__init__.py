"""A notebook cell becomes a job: `launch` starts real ranks, streams what they print, and returns their values.

The kernel talks through pipes to a warm process, which has imported torch and forks one fresh process per rank.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helpers.launching.errors import LaunchError, RankDied, RankFailed, RanksHung
    from helpers.launching.results import Run
    from helpers.launching.verb import launch

__all__ = ["LaunchError", "RankDied", "RankFailed", "RanksHung", "Run", "launch"]

_FROM = {"Run": "results", "launch": "verb"}  # all others: errors


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded when first used, so that `helpers` can tell errors who reads them at no cost
        return getattr(importlib.import_module(f"helpers.launching.{_FROM.get(name, 'errors')}"), name)
    raise AttributeError(f"helpers.launching has no {name!r}; it has {', '.join(__all__)}")
