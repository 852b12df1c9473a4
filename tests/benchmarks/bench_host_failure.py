"""How long a job on two hosts stands still when one of them fails."""

from __future__ import annotations

import tempfile
from pathlib import Path

from . import host_failure
from .framework import DoesNotRun, Findings, at_most, benchmark, interleaved

LIMIT = 30.0  # seconds from the failure to the next step


@benchmark
def resumed(repeats: int) -> Findings:
    """Seconds from a host's death to the error on the other host, and to the next training step, with 2 ranks or 4 again."""
    from helpers.two_nodes import two_nodes

    possible, why = two_nodes.available()
    if not possible:
        raise DoesNotRun(why)

    def seconds(replaced: bool) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            found = host_failure.run(Path(folder), replaced)
        return {f"{names[replaced]}, {what}": found[what] for what in ("noticed", "resumed")}

    names = {False: "on the host that is left", True: "host replaced at once"}
    timed = interleaved({name: lambda replaced=replaced: seconds(replaced) for replaced, name in names.items()}, repeats)
    claims = [at_most(f"{row.name}, slowest", max(row.samples), LIMIT, "s") for row in timed.rows()]
    middle = [timed[f"{name}, resumed"].median for name in names.values()]
    return Findings(
        timed.rows(), claims, f"Training goes on {middle[0]:.0f} s after a host has died, {middle[1]:.0f} s where it is replaced"
    )
