"""A notebook cell becomes a job: `launch` starts real ranks, streams what they print, and returns their values.

The kernel talks through pipes to a warm process, which has imported torch and forks one fresh process per rank.
"""

from helpers.launching.errors import LaunchError, RankDied, RankFailed, RanksHung
from helpers.launching.results import Run
from helpers.launching.verb import launch

__all__ = ["LaunchError", "RankDied", "RankFailed", "RanksHung", "Run", "launch"]
