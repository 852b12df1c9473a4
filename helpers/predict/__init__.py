"""Pure arithmetic about parallel jobs: what they move and what they hold, from shapes and layouts alone.

Nothing here imports torch or touches a device. `traffic` and `step_traffic` count bytes on the wire, `memory` bytes per rank,
`step_time` and `decode_latency` seconds on `Machines`; `plan` chooses a layout.
"""

from helpers.hardware import Hardware
from helpers.predict.architecture import Architecture, architecture
from helpers.predict.layout import IMPLEMENTATIONS, PRECISIONS, Layout, Workload
from helpers.predict.machines import Machines, collective_time, machines
from helpers.predict.memory import Memory, kv_bytes_per_token, memory
from helpers.predict.planning import GOALS, plan, problem
from helpers.predict.plans import Candidate, Plan, Rejection
from helpers.predict.rank import stages, undivided
from helpers.predict.step import Exchange, step_traffic
from helpers.predict.timing import StepTime, decode_latency, step_time, tokens_per_second
from helpers.predict.traffic import Traffic, traffic

__all__ = [
    "GOALS", "IMPLEMENTATIONS", "PRECISIONS", "Architecture", "Candidate", "Exchange", "Hardware", "Layout", "Machines", "Memory",
    "Plan", "Rejection", "StepTime", "Traffic", "Workload", "architecture", "collective_time", "decode_latency",
    "kv_bytes_per_token", "machines", "memory", "plan", "problem", "stages", "step_time", "step_traffic", "tokens_per_second",
    "traffic", "undivided",
]  # fmt: skip
