"""Pure arithmetic about parallel jobs: what they move and what they hold, from shapes and layouts alone.

Nothing here imports torch or touches a device. `traffic` and `step_traffic` count bytes on the wire, `memory` bytes per rank.
"""

from helpers.hardware import Hardware
from helpers.predict.architecture import Architecture, architecture
from helpers.predict.layout import IMPLEMENTATIONS, PRECISIONS, Layout, Workload
from helpers.predict.memory import Memory, kv_bytes_per_token, memory
from helpers.predict.rank import stages
from helpers.predict.step import Exchange, step_traffic
from helpers.predict.traffic import Traffic, traffic

__all__ = [
    "IMPLEMENTATIONS", "PRECISIONS", "Architecture", "Exchange", "Hardware", "Layout", "Memory", "Traffic", "Workload",
    "architecture", "kv_bytes_per_token", "memory", "stages", "step_traffic", "traffic",
]  # fmt: skip
