"""What this computer is and where ranks run on it; decided without touching CUDA and without importing torch.

The ladder of machines: ranks are processes on cores (gloo), or one process per GPU (nccl) where every rank has a GPU of its own.
`WORKSHOP_DEVICE=cpu` forces CPU ranks, `CUDA_VISIBLE_DEVICES` hides GPUs as it does for CUDA itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import numbers
import os
import platform
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from helpers import record

if TYPE_CHECKING:
    import torch

__all__ = ["Gpu", "Machine", "Placement", "cores", "describe", "device", "gpus", "memory", "placement", "torch_cuda"]

DEVICE_VARIABLE = "HELPERS_DEVICE"  # set by the launcher in each rank: "cpu", "cuda:0", "cuda:1" …
_LINKS = {0: "one board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "one PCIe host bridge", 40: "one NUMA node"}


@dataclass(frozen=True)
class Gpu:
    """One GPU that CUDA would see. `memory` in bytes, None where the driver does not say (memory shared with the CPU)."""

    index: int  # as in "cuda:0"
    name: str
    uuid: str
    memory: int | None


@dataclass(frozen=True)
class Placement:
    """Where the ranks of one job run."""

    device: str  # "cpu" or "cuda"
    backend: str  # "gloo" or "nccl"
    oversubscribed: bool  # more CPU ranks than cores: times are not those of a machine with enough of them


@dataclass(frozen=True, repr=False)
class Machine:
    """This computer as ranks see it. `memory` in bytes; `links` holds (GPU, GPU, how they are joined)."""

    cores: int
    cpu: str
    memory: int
    gpus: tuple[Gpu, ...]
    links: tuple[tuple[int, int, str], ...]
    backend: str  # of a job with as many ranks as the machine has places for
    rung: str  # the rung of the ladder, in one line

    @property
    def line(self) -> str:
        """One line for figure footers: "2 cores (AMD EPYC 7B13), 24 GiB, no GPU"."""
        names = Counter(gpu.name for gpu in self.gpus)
        gpus = ", ".join(f"{count} × {name}" for name, count in names.items()) or "no GPU"
        return f"{_count(self.cores, 'core')} ({self.cpu}), {_gib(self.memory)}, {gpus}"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("CPU", f"{_count(self.cores, 'usable core')}, {self.cpu}"), ("memory", _gib(self.memory))]
        rows += [(f"cuda:{gpu.index}", f"{gpu.name}, {_gib(gpu.memory)}") for gpu in self.gpus] or [("GPU", "none")]
        rows += [(f"cuda:{a} – cuda:{b}", kind) for a, b, kind in self.links]
        return [*rows, ("backend", self.backend), ("ranks", self.rung)]

    def __repr__(self) -> str:
        return "\n".join(record.columns(self._rows()))

    def _repr_html_(self) -> str:
        return record.table(self._rows())


def cores() -> int:
    """Cores this process may use: its affinity, capped by the CPU quota of its control groups; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = (_numbers(group, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us") for group in _control_groups())
    quotas = [found[0] // found[1] for found in limits if len(found) == 2]  # a group without a quota has a period only
    return max(1, min([affinity, *quotas]))


def memory() -> int:
    """Bytes of memory this process may use: the machine's, capped by the limits of its control groups."""
    limits = [limit for group in _control_groups() for limit in _numbers(group, "memory.max", "memory.limit_in_bytes")]
    return min([psutil.virtual_memory().total, *limits])


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA would see, asked of the driver (NVML): no CUDA context is made; empty without a driver.

    Raises ValueError where WORKSHOP_DEVICE is neither empty nor "cpu".
    """
    wanted = os.environ.get("WORKSHOP_DEVICE", "")
    if wanted not in ("", "cpu"):
        raise ValueError(f'WORKSHOP_DEVICE is {wanted!r}; "cpu" forces CPU ranks, unset leaves the choice to the machine')
    return () if wanted == "cpu" else _ask_driver(os.environ.get("CUDA_VISIBLE_DEVICES"))[0]


def torch_cuda() -> str | None:
    """The CUDA version the installed torch was built for, None for a CPU build or no torch; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return found.group(1) if found else None


def placement(ranks: int, backend: str | None = None) -> Placement:
    """Where `ranks` ranks run: nccl where every rank has its own GPU, else gloo on CPU ranks.

    Raises TypeError or ValueError for a number of ranks that is no whole number of at least 1, an unknown backend, or
    `backend="nccl"` without a GPU for every rank.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, numbers.Integral):  # as numpy's whole numbers are
        raise TypeError(f"ranks is {ranks!r}; it must be a whole number of at least 1")
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; a job needs at least 1")
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(
            f'backend is {backend!r}; it must be "gloo" (CPU ranks), "nccl" (one GPU per rank) or None (chosen for you)'
        )
    seen = gpus()
    usable = len(seen) if torch_cuda() else 0
    short = "" if usable >= ranks else _why_no_gpu(seen, usable)
    if not short and backend != "gloo":
        return Placement("cuda", "nccl", False)
    if backend == "nccl":
        right = f'ranks={usable} or fewer, or backend="gloo"' if usable else 'backend="gloo" (CPU ranks), or no backend at all'
        raise ValueError(
            f'backend="nccl" needs one GPU per rank: {_count(ranks, "rank")} asked for, but {short}. Right: {right}.'
        )
    return Placement("cpu", "gloo", ranks > cores())


def device() -> torch.device:
    """The device to compute on: in a rank the one `launch` selected for it, elsewhere the first GPU, else the CPU."""
    import torch

    return torch.device(os.environ.get(DEVICE_VARIABLE) or ("cuda:0" if torch_cuda() and gpus() else "cpu"))


def describe() -> Machine:
    """What this computer is, and which rung of the ladder of machines it stands on."""
    seen, room = gpus(), cores()
    usable = len(seen) if torch_cuda() else 0
    if usable > 1:
        rung = f"up to {usable} ranks with one GPU each (nccl); more than that are processes on {_count(room, 'core')} (gloo)"
    elif usable:
        rung = f"a single rank has the GPU (nccl); several ranks are processes on {_count(room, 'core')} (gloo)"
    else:
        rung = f"processes on {_count(room, 'core')}, joined by gloo on loopback; times are CPU times"
        rung += "; the GPU is idle: this torch is a CPU build" if seen else ""
    links = _ask_driver(os.environ.get("CUDA_VISIBLE_DEVICES"))[1] if seen else ()
    return Machine(room, _cpu_name(), memory(), seen, links, "nccl" if usable > 1 else "gloo", rung)


def _why_no_gpu(seen: tuple[Gpu, ...], usable: int) -> str:
    """Why not every rank gets a GPU."""
    if os.environ.get("WORKSHOP_DEVICE") == "cpu":
        return "WORKSHOP_DEVICE=cpu forces CPU ranks"
    if seen and not usable:
        return "the installed torch is a CPU build"
    return f"this machine has {_count(usable, 'GPU') if usable else 'no GPU'}"


def _control_groups(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Folders of the control groups (v2, and v1's cpu and memory) that limit this process, outermost first."""
    folders = []
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, group = line.split(":", 2)
        for base in [root / name for name in controllers.split(",") if name in ("cpu", "memory")] if controllers else [root]:
            inner = base / group.lstrip("/")
            folders += [folder for folder in reversed([inner, *inner.parents]) if folder.is_relative_to(base) and folder.is_dir()]
    return folders


def _numbers(group: Path, *names: str) -> list[int]:
    """The numbers in control files of a group; a file that is absent, or a word there ("max"), sets no limit."""
    words: list[str] = []
    for name in names:
        with contextlib.suppress(OSError):
            words += (group / name).read_text().split()
    return [int(word) for word in words if word.isdigit()]


@lru_cache(maxsize=4)
def _ask_driver(visible: str | None) -> tuple[tuple[Gpu, ...], tuple[tuple[int, int, str], ...]]:
    """GPUs and how each pair is joined, as NVML reports them; `visible` is CUDA_VISIBLE_DEVICES."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), ()
    try:
        handles = _visible_handles(pynvml, visible)
        pairs = [(a, b) for b in range(len(handles)) for a in range(b)]
        links = tuple((a, b, _link(pynvml, handles[a], handles[b])) for a, b in pairs)
        return tuple(_gpu(pynvml, index, handle) for index, handle in enumerate(handles)), links
    finally:
        pynvml.nvmlShutdown()


def _visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """NVML handles in the order CUDA numbers them; as in CUDA, an entry that names no GPU hides itself and all after it."""
    every = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):  # lost, or given to another job
            every.append(nvml.nvmlDeviceGetHandleByIndex(index))
    if visible is None:
        return every
    names = [(handle, str(index), nvml.nvmlDeviceGetUUID(handle)) for index, handle in enumerate(every)]
    chosen: list[Any] = []
    for entry in map(str.strip, visible.split(",")):
        named = [handle for handle, index, uuid in names if entry == index or (len(entry) > 3 and uuid.startswith(entry))]
        if entry.startswith("MIG-"):
            with contextlib.suppress(nvml.NVMLError):  # it is gone
                named = [nvml.nvmlDeviceGetHandleByUUID(entry)]
        if len(named) != 1:
            break
        if named[0] in chosen:
            return []  # CUDA shows no GPU at all where one is listed twice
        chosen += named
    return chosen


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    try:
        total = nvml.nvmlDeviceGetMemoryInfo(handle).total
    except nvml.NVMLError:
        total = None
    return Gpu(index, nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle), total)


def _link(nvml: Any, a: Any, b: Any) -> str:
    """How two GPUs are joined: "NVLink", or what of the PCIe tree they share."""
    try:
        if nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        return _LINKS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b), "different NUMA nodes")
    except nvml.NVMLError:
        return "unknown"


@lru_cache(maxsize=1)
def _cpu_name() -> str:
    """The processor's name as its maker gives it, without trade marks; else its architecture."""
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return " ".join(re.sub(r"\((R|TM)\)", "", found.group(1)).split()) if found else platform.machine()
    if platform.system() == "Darwin":
        return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True).stdout.strip()
    return platform.processor() or platform.machine()


def _gib(size: int | None) -> str:
    return "memory shared with the CPU" if size is None else f"{size / 2**30:.0f} GiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
