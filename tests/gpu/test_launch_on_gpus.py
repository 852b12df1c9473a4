"""Ranks on GPUs: forked from a process that never touched CUDA, one GPU each, joined by NCCL.

The jobs run on whatever device they are given. Everything is judged by values and states, nothing by speed.
"""

import json
import os
import subprocess
import sys

import pytest

from helpers import LaunchError, RankFailed, launch, machine, preflight

TIMEOUT = 240  # seconds: the first use of CUDA and NCCL on a machine can be slow


def devices_open(pid: int) -> list[str]:
    """NVIDIA device files that a process holds open: a CUDA context needs nvidia-uvm."""
    folder = f"/proc/{pid}/fd"
    links = [os.readlink(f"{folder}/{entry}") for entry in os.listdir(folder) if os.path.islink(f"{folder}/{entry}")]
    return sorted({link for link in links if link.startswith("/dev/nvidia")})


def report_on_parent():
    """In a rank: threads and NVIDIA device files of the process it was forked from, and its own device."""
    parent = os.getppid()
    with open(f"/proc/{parent}/status") as status:
        threads = int(next(line.split()[1] for line in status if line.startswith("Threads:")))
    return threads, devices_open(parent), str(machine.device())


def multiply():
    """In a rank: a product computed on its device, the largest difference to the CPU's, and the bytes its device holds."""
    import torch

    a, b = torch.rand(256, 256), torch.rand(256, 256)
    on_device = a.to(machine.device()) @ b.to(machine.device())
    held = torch.cuda.memory_allocated() if on_device.is_cuda else 0
    return on_device.device.type, float((on_device.cpu() - a @ b).abs().max()), held


def collectives():
    """In a rank: sums, gathered ranks and this rank's part of a reduce-scatter."""
    import torch
    import torch.distributed as dist

    rank, ranks, device = dist.get_rank(), dist.get_world_size(), machine.device()
    total = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(total)
    gathered = torch.empty(ranks, device=device)
    dist.all_gather_single(gathered, torch.tensor([float(rank)], device=device))
    part = torch.empty(1, device=device)
    dist.reduce_scatter_single(part, torch.arange(ranks, dtype=torch.float32, device=device))
    return total.unique().tolist(), gathered.tolist(), part.item()


def train():
    """In a rank: three DDP steps on data of its own; the parameters' sum, equal on all ranks if gradients were averaged."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(machine.device()))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(int(os.environ["RANK"]))
    for _ in range(3):
        optimiser.zero_grad()
        model(torch.rand(8, 64, device=machine.device())).square().mean().backward()
        optimiser.step()
    return sum(float(parameter.detach().sum()) for parameter in model.parameters())


def sees_a_gpu():
    import torch

    return torch.cuda.is_available(), str(machine.device())


def fail_on_the_device():
    import torch

    torch.ones(2, device=machine.device()) @ torch.ones(3, device=machine.device())


def test_the_driver_and_torch_agree_on_the_gpus():
    code = """
import json, torch
seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([[one.name, one.total_memory] for one in seen]))
"""
    told = json.loads(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT).stdout
    )
    seen = machine.gpus()
    assert [gpu.name for gpu in seen] == [name for name, _ in told]
    for gpu, (_, usable) in zip(seen, told, strict=True):
        assert gpu.memory is None or 0.9 <= usable / gpu.memory <= 1.1  # the driver keeps a little for itself


def test_describing_the_machine_makes_no_cuda_context():
    code = """
import os, sys
from helpers import machine
print(machine.describe())
print(machine.placement(1))
open_files = [f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd")]
links = [os.readlink(entry) for entry in open_files if os.path.islink(entry)]
assert not any("nvidia-uvm" in link for link in links), links
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert machine.gpus()[0].name in done.stdout


def test_the_preflight_finds_the_gpus_usable():
    check = preflight.gpu()
    assert check.state == "ok", check


def test_a_rank_is_forked_from_one_thread_that_never_touched_cuda():
    run = launch(report_on_parent, ranks=1, timeout=TIMEOUT)
    assert run.results == [(1, [], "cuda:0")]
    again = launch(report_on_parent, ranks=1, timeout=TIMEOUT)  # nor do jobs leave anything behind in it
    assert again.results == [(1, [], "cuda:0")]


def test_a_single_rank_has_the_gpu():
    run = launch(multiply, ranks=1, timeout=TIMEOUT)
    assert (run.device, run.backend) == ("cuda", "nccl")
    kind, difference, held = run.results[0]
    assert kind == "cuda"
    assert difference < 1e-1  # TF32 may be on
    assert held >= 3 * 256 * 256 * 4


def test_nccl_at_as_many_ranks_as_gpus():
    ranks = len(machine.gpus())
    run = launch(collectives, ranks=ranks, timeout=TIMEOUT)
    assert (run.device, run.backend, run.oversubscribed) == ("cuda", "nccl", False)
    for rank, (total, gathered, part) in enumerate(run.results):
        assert total == [ranks * (ranks + 1) / 2]
        assert gathered == list(range(ranks))
        assert part == rank * ranks
    sums = [record for record in run.collectives if record.op == "all_reduce"]
    assert [record.bytes for record in sums] == [4096] * ranks
    assert {record.group for record in sums} == {tuple(range(ranks))}


def test_data_parallel_training_keeps_replicas_equal():
    run = launch(train, ranks=len(machine.gpus()), timeout=TIMEOUT)
    assert len(set(run.results)) == 1
    assert any(record.op == "all_reduce" for record in run.collectives)


def test_more_ranks_than_gpus_run_on_the_cpu_and_see_no_gpu():
    run = launch(sees_a_gpu, ranks=len(machine.gpus()) + 1, timeout=TIMEOUT)
    assert (run.device, run.backend) == ("cpu", "gloo")
    assert run.results == [(False, "cpu")] * (len(machine.gpus()) + 1)


def test_nccl_for_more_ranks_than_gpus_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="needs one GPU per rank"):
        launch(multiply, ranks=len(machine.gpus()) + 1, backend="nccl", timeout=TIMEOUT)


def test_a_failure_on_the_gpu_is_named_and_the_next_job_works():
    with pytest.raises(RankFailed, match=r"size mismatch|inconsistent tensor size|1D tensors expected") as caught:
        launch(fail_on_the_device, ranks=1, timeout=TIMEOUT)
    assert isinstance(caught.value, LaunchError)
    assert caught.value.rank == 0
    assert launch(multiply, ranks=1, timeout=TIMEOUT).results[0][0] == "cuda"


def test_ranks_work_although_the_notebook_has_used_cuda_itself():
    code = """
import torch
from helpers import launch, machine
mine = torch.ones(8, device=machine.device())
assert torch.cuda.is_initialized()
def job():
    return float(torch.ones(8, device=machine.device()).sum())
run = launch(job, ranks=1, timeout=240)
assert (run.device, run.results) == ("cuda", [8.0]), run
assert float(mine.sum()) == 8.0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
