"""A job of a notebook becomes a script that torchrun runs as it is."""

import os
import subprocess
import sys
import types

import pytest
import torch
from IPython.core import autocall, interactiveshell

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
input = 5
__share = 2
max = math.sqrt


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


def shadowing():
    return input + max(3) + __share, open, exit


def boxes(found):
    return sum(box.value for box in found["all"])


def surroundings():
    return torch.rand(1).item(), torch.get_num_threads(), os.environ["HELPERS_DEVICE"]


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


def torchrun(script, ranks, **environment):
    """What the ranks of a script print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(script)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=script.parent, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchrun_runs_the_script(notebook, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    script = export_job(notebook.job, 2, power=3, weights=torch.ones(2), path=tmp_path / "job.py")
    monkeypatch.undo()
    text = script.read_text()
    assert "def helper(x):" in text
    assert "SCALE = 3" in text
    assert "\nitem =" not in text
    assert "import torch.nn.functional as F" in text
    printed = torchrun(script, 2)
    per_rank = [3 * sum(max(i + rank, 0) + 1 for i in range(4)) + 8 + 2 for rank in range(2)]
    for rank in range(2):
        assert f"rank {rank} returned {float(sum(per_rank))}" in printed


def test_the_script_runs_where_a_process_cannot_ask_for_its_cores(notebook, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    script = export_job(notebook.affinity, path=tmp_path / "job.py")
    monkeypatch.undo()
    script.write_text(script.read_text().replace("import os\n", WITHOUT_AFFINITY, 1))
    assert "rank 0 returned False" in torchrun(script, 1)


def test_a_rank_finds_what_it_finds_in_a_notebook(notebook, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    script = export_job(notebook.surroundings, path=tmp_path / "job.py")
    monkeypatch.undo()
    first = torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    threads = max(1, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) // 2)
    printed = torchrun(script, 2, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS=str(threads + 1))
    for rank in range(2):
        assert f"rank {rank} returned {(first, threads, 'cpu')}" in printed


def test_what_shadows_a_builtin_is_exported_and_what_ipython_adds_is_not(notebook, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    notebook.open, notebook.exit = interactiveshell._modified_open, autocall.ZMQExitAutocall()
    text = export_job(notebook.shadowing, path=tmp_path / "job.py").read_text()
    assert "\ninput = 5\n" in text
    assert "\n__share = 2\n" in text
    assert "\nfrom math import sqrt as max\n" in text
    assert "IPython" not in text


def test_classes_of_the_notebook_are_exported_from_within_containers(notebook, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    script = export_job(notebook.boxes, {"all": [notebook.Box(1), notebook.Box(2)]}, path=tmp_path / "job.py")
    monkeypatch.undo()
    assert "rank 0 returned 3" in torchrun(script, 1)


def test_what_cannot_be_exported(notebook, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    with pytest.raises(TypeError, match="write it with def"):
        export_job(lambda: 1, path=tmp_path / "x.py")
    with pytest.raises(TypeError, match=r"argument_weights.*cannot be written"):
        export_job(notebook.job, 1, weights=(i for i in range(3)), path=tmp_path / "x.py")
    with pytest.raises(TypeError, match="missing a required argument"):
        export_job(notebook.job, path=tmp_path / "x.py")
    assert not (tmp_path / "x.py").exists()
