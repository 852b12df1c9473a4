"""A job of a notebook becomes a script that torchrun runs as it is."""

import subprocess
import sys
import types

import pytest

from helpers.launching.export import export_job

NOTEBOOK = """
import math
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

SCALE = 3
table = torch.arange(4.0)
item = object()  # no part of the job, though a method has its name


class Box:
    def __init__(self, value=SCALE):
        self.value = value


class Layer(nn.Module):
    def forward(self, x):
        return helper(x) * SCALE


def helper(x):
    return F.relu(x) + math.floor(1.5)


def job(start, power=1, weights=None):
    total = Layer()(Box(table).value + dist.get_rank()).sum() + start**power + weights.sum()
    dist.all_reduce(total)
    return total.item()


def affinity():
    return hasattr(os, "sched_getaffinity")
"""


WITHOUT_AFFINITY = """import os
vars(os).pop("sched_getaffinity", None)  # as on macOS
"""


@pytest.fixture
def notebook(tmp_path):
    """A module named __main__ with a source, as a notebook's is."""
    path = tmp_path / "cells.py"
    path.write_text(NOTEBOOK)
    module = types.ModuleType("__main__")
    exec(compile(NOTEBOOK, str(path), "exec"), module.__dict__)
    return module


def test_torchrun_runs_the_script(notebook, tmp_path, monkeypatch):
    import torch

    monkeypatch.setitem(sys.modules, "__main__", notebook)
    script = export_job(notebook.job, 2, power=3, weights=torch.ones(2), path=tmp_path / "job.py")
    monkeypatch.undo()
    text = script.read_text()
    assert "def helper(x):" in text
    assert "SCALE = 3" in text
    assert "\nitem =" not in text
    assert "import torch.nn.functional as F" in text
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    per_rank = [3 * sum(max(i + rank, 0) + 1 for i in range(4)) + 8 + 2 for rank in range(2)]
    for rank in range(2):
        assert f"rank {rank} returned {float(sum(per_rank))}" in done.stdout


def test_the_script_runs_where_a_process_cannot_ask_for_its_cores(notebook, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    script = export_job(notebook.affinity, path=tmp_path / "job.py")
    monkeypatch.undo()
    script.write_text(script.read_text().replace("import os\n", WITHOUT_AFFINITY, 1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 returned False" in done.stdout


def test_what_cannot_be_exported(notebook, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    with pytest.raises(TypeError, match="write it with def"):
        export_job(lambda: 1, path=tmp_path / "x.py")
    with pytest.raises(TypeError, match=r"argument_weights.*cannot be written"):
        export_job(notebook.job, 1, weights=(i for i in range(3)), path=tmp_path / "x.py")
    with pytest.raises(TypeError, match="missing a required argument"):
        export_job(notebook.job, path=tmp_path / "x.py")
    assert not (tmp_path / "x.py").exists()
