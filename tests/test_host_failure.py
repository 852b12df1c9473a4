"""A host dies in mid-training: noticed and named, training goes on from the checkpoint, and ends where it would have ended."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.two_nodes import available
from tests.benchmarks.host_failure import EVERY, FAILS_AFTER, JOB, STEPS, command, environment, run

SAVED = FAILS_AFTER // EVERY * EVERY


@pytest.mark.slow
@pytest.mark.skipif(not available()[0], reason=f"needs two hosts: {available()[1]}")
@pytest.mark.parametrize("replaced", [False, True], ids=["on the host that is left", "host replaced"])
def test_training_goes_on_and_ends_where_it_would_have(replaced, tmp_path):
    import torch

    found = run(tmp_path, replaced)
    assert "10.77.0.2" in found["error"]  # the host that failed is named
    (ranks, step), (ranks_after, resumed_at) = found["starts"]
    assert (ranks, step) == (4, 0)
    assert ranks_after == (4 if replaced else 2)
    assert resumed_at >= SAVED
    assert resumed_at % EVERY == 0
    before, after = found["losses"]
    assert sorted(after) == list(range(resumed_at + 1, STEPS + 1))
    for again in before.keys() & after.keys():  # the same samples, whatever the number of ranks
        assert math.isclose(before[again], after[again], rel_tol=1e-3)
    alone = tmp_path / "uninterrupted"
    alone.mkdir()
    (alone / "job.py").write_text(JOB)
    shutil.copy(tmp_path / f"step{resumed_at:04}.pt", alone)
    once = [*command("--standalone", "--nproc-per-node", str(ranks_after)), str(alone / "job.py"), str(alone)]
    subprocess.run(once, check=True, env=environment(), timeout=200, capture_output=True)
    ends = [torch.load(folder / f"step{STEPS:04}.pt")["model"] for folder in (tmp_path, alone)]
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-6, atol=1e-7)
