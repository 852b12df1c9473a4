"""Figures: plain results in, a `matplotlib.figure.Figure` out. Nothing here measures, nothing touches pyplot's global state.

Each figure has a title that states its finding, axes with units, colours that colour-blind readers can tell apart (markers,
hatches and line styles too), a footer that says which machine was measured, alt text, and a one-line finding printed under it.
"""

from helpers.plots.charts import bars, compare, stacked, sweep
from helpers.plots.decisions import decisions
from helpers.plots.holdings import holdings
from helpers.plots.placement import placement
from helpers.plots.planning import plan
from helpers.plots.plans import shard_plan
from helpers.plots.schedule import schedule
from helpers.plots.style import Figure, amount, measured_on
from helpers.plots.timeline import shares, timeline

__all__ = [
    "Figure",
    "amount",
    "bars",
    "compare",
    "decisions",
    "holdings",
    "measured_on",
    "placement",
    "plan",
    "schedule",
    "shard_plan",
    "shares",
    "stacked",
    "sweep",
    "timeline",
]
