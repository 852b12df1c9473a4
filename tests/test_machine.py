"""What this computer is and where ranks run: decided from cores, control groups and an imitated NVIDIA driver."""

import os
import re
import subprocess
import sys
import types

import numpy
import pytest

from helpers import machine

GIB = 2**30


class NoDriver(Exception):
    """Stands for pynvml.NVMLError."""


def imitate_driver(monkeypatch, gpus=2, nvlink=True, installed=True, memory=80 * GIB, lost=None):
    """Put a module in pynvml's place that reports `gpus` alike GPUs, of which number `lost` does not answer.

    Returns the list of its calls to init and shutdown.
    """
    calls = []

    def init():
        calls.append("init")
        if not installed:
            raise NoDriver

    def memory_info(handle):
        if memory is None:
            raise NoDriver
        return types.SimpleNamespace(total=memory)

    def by_index(index):
        if index == lost:
            raise NoDriver
        return index

    def by_uuid(uuid):
        if uuid == "MIG-gone":
            raise NoDriver
        return uuid

    uuids = [f"GPU-{index}{index}aa-bb" for index in range(gpus)]
    nvml = types.SimpleNamespace(
        NVMLError=NoDriver,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        nvmlInit=init,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda handle: uuids[handle] if isinstance(handle, int) else handle,
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=memory_info,
        nvmlDeviceGetP2PStatus=lambda a, b, capability: 0 if nvlink else 5,
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: 50,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return calls


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No variable of the caller's shell decides, and no answer of an earlier driver is kept."""
    for name in ("WORKSHOP_DEVICE", "CUDA_VISIBLE_DEVICES", machine.DEVICE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    machine._ask_driver.cache_clear()
    yield
    machine._ask_driver.cache_clear()


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")


def test_cores_are_those_the_process_may_use():
    assert 1 <= machine.cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("900000 100000", 8)],
)
def test_cpu_quota_of_an_outer_group_caps_the_cores(tmp_path, monkeypatch, quota, expected):
    inner = tmp_path / "fs" / "pod" / "container"
    inner.mkdir(parents=True)
    (inner.parent / "cpu.max").write_text(quota + "\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "membership").write_text("0::/pod/container\n")
    groups = machine._control_groups(tmp_path / "fs", tmp_path / "membership")
    assert groups == [tmp_path / "fs", inner.parent, inner]
    monkeypatch.setattr(machine, "_control_groups", lambda: groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert machine.cores() == expected


def test_version_1_groups_cap_cores_and_memory(tmp_path, monkeypatch):
    cpu, limited = tmp_path / "cpu,cpuacct", tmp_path / "memory" / "docker"
    cpu.mkdir()
    limited.mkdir(parents=True)
    (tmp_path / "cpu").symlink_to(cpu)
    (cpu / "cpu.cfs_quota_us").write_text("300000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    (limited / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (limited.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "membership").write_text("4:memory:/docker\n2:cpu,cpuacct:/\n1:pids:/\n0::/\n")
    groups = machine._control_groups(tmp_path, tmp_path / "membership")
    monkeypatch.setattr(machine, "_control_groups", lambda: groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert machine.cores() == 3
    assert machine.memory() == GIB


@pytest.mark.parametrize("text", ["-1\n", "", "max\n"])
def test_a_group_without_a_quota_sets_no_limit(tmp_path, monkeypatch, text):
    (tmp_path / "cpu.cfs_quota_us").write_text(text)
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(machine, "_control_groups", lambda: [tmp_path, tmp_path / "absent"])
    assert machine.cores() == len(os.sched_getaffinity(0))


def test_no_driver_means_no_gpu(monkeypatch):
    imitate_driver(monkeypatch, installed=False)
    assert machine.gpus() == ()


def test_gpus_are_read_once_and_the_driver_is_let_go(monkeypatch):
    calls = imitate_driver(monkeypatch)
    assert machine.gpus() == machine.gpus()
    assert [gpu.index for gpu in machine.gpus()] == [0, 1]
    assert machine.gpus()[0] == machine.Gpu(0, "NVIDIA H200", "GPU-00aa-bb", 80 * GIB)
    assert calls == ["init", "shutdown"]


def test_a_gpu_that_does_not_answer_is_passed_over(monkeypatch, cuda_build):
    calls = imitate_driver(monkeypatch, gpus=3, lost=1)
    assert [gpu.uuid for gpu in machine.gpus()] == ["GPU-00aa-bb", "GPU-22aa-bb"]
    assert machine.placement(1).device == "cuda"
    assert calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []),
        ("1,0", ["GPU-11aa-bb", "GPU-00aa-bb"]),
        (" 2 ", ["GPU-22aa-bb"]),
        ("GPU-11", ["GPU-11aa-bb"]),
        ("GPU-", []),  # ambiguous
        ("0,7,1", ["GPU-00aa-bb"]),  # an entry that names no GPU hides those after it
        ("-1,0", []),
        ("0,0", []),
        ("MIG-77", ["MIG-77"]),
        ("MIG-gone", []),
    ],
)
def test_cuda_visible_devices_hides_and_orders_gpus(monkeypatch, visible, expected):
    imitate_driver(monkeypatch, gpus=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in machine.gpus()] == expected
    assert [gpu.index for gpu in machine.gpus()] == list(range(len(expected)))


def test_workshop_device_forces_the_cpu_and_refuses_other_words(monkeypatch, cuda_build):
    imitate_driver(monkeypatch)
    monkeypatch.setenv("WORKSHOP_DEVICE", "cpu")
    assert machine.gpus() == ()
    assert machine.placement(2).device == "cpu"
    with pytest.raises(ValueError, match="WORKSHOP_DEVICE=cpu forces CPU ranks"):
        machine.placement(2, "nccl")
    monkeypatch.setenv("WORKSHOP_DEVICE", "gpu")
    with pytest.raises(ValueError, match="WORKSHOP_DEVICE is 'gpu'"):
        machine.gpus()


@pytest.mark.parametrize(
    ("gpus", "ranks", "backend", "expected"),
    [
        (0, 1, None, ("cpu", "gloo")),
        (1, 1, None, ("cuda", "nccl")),
        (1, 2, None, ("cpu", "gloo")),
        (2, 2, None, ("cuda", "nccl")),
        (4, 3, "nccl", ("cuda", "nccl")),
        (4, 5, None, ("cpu", "gloo")),
        (4, 2, "gloo", ("cpu", "gloo")),
    ],
)
def test_each_rung_of_the_ladder(monkeypatch, cuda_build, gpus, ranks, backend, expected):
    imitate_driver(monkeypatch, gpus=gpus)
    chosen = machine.placement(ranks, backend)
    assert (chosen.device, chosen.backend) == expected


def test_more_ranks_than_cores_are_flagged_on_the_cpu_only(monkeypatch, cuda_build):
    monkeypatch.setattr(machine, "cores", lambda: 2)
    imitate_driver(monkeypatch, gpus=4)
    assert not machine.placement(4).oversubscribed
    assert not machine.placement(2, "gloo").oversubscribed
    assert machine.placement(8).oversubscribed


def test_nccl_without_enough_gpus_says_what_is_right(monkeypatch, cuda_build):
    imitate_driver(monkeypatch, gpus=2)
    with pytest.raises(
        ValueError, match=r"3 ranks asked for, but this machine has 2 GPUs. Right: ranks=2 or fewer, or backend=\"gloo\""
    ):
        machine.placement(3, "nccl")
    imitate_driver(monkeypatch, installed=False)
    machine._ask_driver.cache_clear()
    with pytest.raises(ValueError, match=r"1 rank asked for, but this machine has no GPU. Right: backend=\"gloo\""):
        machine.placement(1, "nccl")


def test_a_cpu_build_of_torch_leaves_the_gpus_idle(monkeypatch):
    imitate_driver(monkeypatch, gpus=2)
    monkeypatch.setattr(machine, "torch_cuda", lambda: None)
    assert machine.placement(2).device == "cpu"
    assert "the GPU is idle" in machine.describe().rung
    with pytest.raises(ValueError, match="the installed torch is a CPU build"):
        machine.placement(2, "nccl")


@pytest.mark.parametrize(
    ("ranks", "error"),
    [(0, ValueError), (-1, ValueError), (2.5, TypeError), (numpy.float64(2), TypeError), ("two", TypeError), (True, TypeError)],
)
def test_a_wrong_number_of_ranks_is_named(ranks, error):
    with pytest.raises(error, match=re.escape(f"ranks is {ranks!r}")):
        machine.placement(ranks)


def test_a_whole_number_of_numpy_is_one():
    assert machine.placement(numpy.int64(2), "gloo").backend == "gloo"


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match="backend is 'mpi'"):
        machine.placement(2, "mpi")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ('cuda: _Optional[str] = "12.8"', "12.8"),
        ("cuda: Optional[str] = None", None),
    ],
)
def test_torchs_cuda_version_is_read_without_importing_it(tmp_path, monkeypatch, line, expected):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(f"__all__ = ['cuda']\ndebug = False\n{line}\nhip: Optional[str] = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert machine.torch_cuda() == expected


def test_device_is_what_the_launcher_selected(monkeypatch, cuda_build):
    import torch

    imitate_driver(monkeypatch, gpus=2)
    assert machine.device() == torch.device("cuda:0")
    monkeypatch.setenv(machine.DEVICE_VARIABLE, "cuda:1")
    assert machine.device() == torch.device("cuda:1")
    monkeypatch.setenv(machine.DEVICE_VARIABLE, "cpu")
    assert machine.device() == torch.device("cpu")
    monkeypatch.delenv(machine.DEVICE_VARIABLE)
    monkeypatch.setenv("WORKSHOP_DEVICE", "cpu")
    assert machine.device() == torch.device("cpu")


def test_a_machine_describes_itself_in_text_html_and_one_line(monkeypatch, cuda_build):
    imitate_driver(monkeypatch, gpus=2)
    monkeypatch.setattr(machine, "cores", lambda: 16)
    monkeypatch.setattr(machine, "memory", lambda: 128 * GIB)
    monkeypatch.setattr(machine, "_cpu_name", lambda: "Some <fast> CPU")
    here = machine.describe()
    assert here.line == "16 cores (Some <fast> CPU), 128 GiB, 2 × NVIDIA H200"
    assert here.links == ((0, 1, "NVLink"),)
    assert here.backend == "nccl"
    text = repr(here)
    assert "cuda:1" in text
    assert "NVIDIA H200, 80 GiB" in text
    assert "up to 2 ranks with one GPU each" in text
    assert "Some &lt;fast&gt; CPU" in here._repr_html_()
    assert here._repr_html_().count("<tr>") == len(text.splitlines())


def test_gpus_joined_by_pcie_and_with_shared_memory(monkeypatch, cuda_build):
    imitate_driver(monkeypatch, gpus=2, nvlink=False, memory=None)
    here = machine.describe()
    assert here.links == ((0, 1, "different NUMA nodes"),)
    assert "NVIDIA H200, memory shared with the CPU" in repr(here)


def test_one_gpu_serves_single_ranks(monkeypatch, cuda_build):
    imitate_driver(monkeypatch, gpus=1)
    assert machine.describe().rung.startswith("a single rank has the GPU")
    assert machine.describe().line.endswith("1 × NVIDIA H200")


def test_this_machine_without_importing_torch():
    code = "import sys; from helpers import machine; print(machine.describe().line); assert 'torch' not in sys.modules"
    environment = {**os.environ, "WORKSHOP_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("GiB, no GPU")
