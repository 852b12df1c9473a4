"""Two hosts on one Linux machine, without root: `with two_nodes(rate="200mbit") as nodes: launch(job, ranks=4, nodes=nodes)`.

Each host is a network namespace within a user namespace of its own; the one link between them is a pair of virtual interfaces
that `tc` holds at a rate. What a host sends to itself stays on its loopback interface, unlimited. Both share the
machine's processors, memory, files and process numbers.

A guardian process holds the namespaces. When the block ends, or this process does in whatever way, it ends every process
in them, and with the last one the kernel removes namespaces, interfaces and addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from helpers import preflight
from helpers.launching import engine, processes

__all__ = ["Host", "TwoNodes", "available", "two_nodes"]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("link0", "link1")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LEAST_RATE, _MOST_RATE = 8e3, 100e9  # bits a second that the kernel can hold a link at
_MTU = 9000  # bytes in a packet, as in clusters: 1 % of what is sent are headers, not 5 %
_LEAST_BURST = 72_000  # bytes sent at once after a pause; the kernel hands over 64 KiB and their headers as one piece
_BURST_SECONDS = 0.002  # as long as the timer that feeds the link may be late
_PATIENCE = 10.0  # seconds to set up or to end; both take a fraction of one
_CLONE_NEWNET = 0x40000000


@functools.cache
def available() -> tuple[bool, str]:
    """Whether this machine can be two hosts, which is tried, and in a sentence why not and what would help."""
    check = preflight.two_hosts()
    return check.state == "ok", check.meaning + (f"; mend: {check.mend}" if check.mend else "")


@dataclass(frozen=True)
class Host:
    """One host: its number, its `address`, the `interface` of the link there, and the process that holds its namespaces."""

    number: int
    address: str
    interface: str
    pid: int

    @property
    def namespaces(self) -> list[str]:
        """Paths of its user and network namespace, in the order in which a process enters them."""
        return [f"/proc/{self.pid}/ns/{kind}" for kind in ("user", "net")]


class TwoNodes:
    """Two hosts joined by a link of `rate` ("200mbit", "1gbit": bits a second, each way), from `open` or `with` until `close`.

    Raises ValueError for a rate that is none, and on entry RuntimeError where this machine cannot be two hosts.
    """

    available = staticmethod(available)

    def __init__(self, rate: str = "1gbit") -> None:
        self.bytes_per_second = _bytes_per_second(rate)  # that the link carries, each way
        self.rate = rate
        self._guardian: subprocess.Popen[str] | None = None
        self._inside_of = 0  # the user namespace
        self._hosts: tuple[Host, ...] = ()

    def open(self) -> TwoNodes:
        """Make the hosts and their link. Raises RuntimeError where this machine cannot, and if they are open already."""
        if self._guardian is not None:
            raise RuntimeError("these two hosts are open already")
        possible, why = available()
        if not possible:
            raise RuntimeError(f"this machine cannot be two hosts: {why}")
        code = f"import sys; sys.path[:] = {engine.import_path()!r}; from helpers import two_nodes as here; "
        code += f"here.guard({os.getpid()}, {_own('user')})"
        command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", code]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._guardian = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        try:
            assert self._guardian.stdout is not None
            told = self._guardian.stdout.readline()
            if not told:
                _, said = self._guardian.communicate()
                raise RuntimeError(f"the two hosts could not be made: {said.strip()}")
            pids = (self._guardian.pid, int(told))
            self._inside_of = os.stat(f"/proc/{pids[0]}/ns/user").st_ino
            self._hosts = tuple(Host(number, ADDRESSES[number], INTERFACES[number], pids[number]) for number in (0, 1))
            self._set_up(0, f"ip link add {INTERFACES[0]} type veth peer name {INTERFACES[1]} netns {pids[1]}")
            for host in self._hosts:  # without an address of IPv6, which would send messages of its own over the link
                quiet = f"ip link set {host.interface} addrgenmode none 2>/dev/null || true"
                address = f"ip address add {host.address}/24 dev {host.interface}"
                self._set_up(host.number, f"ip link set lo up; {quiet}; {address}; ip link set {host.interface} mtu {_MTU} up")
            self.set_rate(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End every process of both hosts; nothing is left of them. A second time nothing happens."""
        guardian, self._guardian, self._hosts = self._guardian, None, ()
        if guardian is None:
            return
        try:
            guardian.communicate(timeout=_PATIENCE)  # closes its standard input
        except subprocess.TimeoutExpired:
            guardian.kill()
            guardian.communicate()
        _end_all("user", self._inside_of)  # by the guardian already, unless it was killed

    def __enter__(self) -> TwoNodes:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Both hosts. Raises RuntimeError while they do not exist."""
        if not self._hosts:
            raise RuntimeError("the two hosts are closed: use them inside `with two_nodes(...) as nodes:`, or call nodes.open()")
        if not all(os.path.exists(path) for host in self._hosts for path in host.namespaces):
            raise RuntimeError("a process that held the two hosts was killed; close and open them again")
        return self._hosts

    def set_rate(self, rate: str) -> None:
        """Hold the link at another rate from now on, also while a job runs. Raises ValueError for a rate that is none."""
        bytes_per_second = _bytes_per_second(rate)
        burst = max(_LEAST_BURST, math.ceil(bytes_per_second * _BURST_SECONDS))
        for host in self.hosts:
            self._set_up(host.number, f"tc qdisc replace dev {host.interface} root tbf rate {rate} burst {burst} latency 50ms")
        self.rate, self.bytes_per_second = rate, bytes_per_second

    def bytes_between(self) -> tuple[int, int]:
        """Bytes that the link has carried since it exists: from host 0 to host 1, and from host 1 to host 0; headers too."""
        listed = [Path(f"/proc/{host.pid}/net/dev").read_text() for host in self.hosts]
        fields = [text.partition(f"{name}:")[2].split() for text, name in zip(listed, INTERFACES, strict=True)]
        return int(fields[0][8]), int(fields[1][8])

    def popen(self, host: int, command: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, as `subprocess.Popen` does with these keywords. It ends with the hosts at the latest."""
        return subprocess.Popen(**self._inside(host, command, keywords))

    def run(self, host: int, command: Sequence[str], **keywords: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on a host to its end, as `subprocess.run` does with these keywords."""
        return subprocess.run(**self._inside(host, command, keywords))

    def fail(self, host: int) -> None:
        """Let a host fail: every process there is killed at once, elastic agent and ranks too. The host itself starts anew."""
        failing = self._host(host)
        _end_all("net", os.stat(failing.namespaces[1]).st_ino, spare=failing.pid)

    def __repr__(self) -> str:
        if self._guardian is None:
            return f"two hosts, closed (link of {self.rate})"
        ends = " and ".join(f"{host.address} ({host.interface})" for host in self.hosts)
        sent = " and ".join(f"{count:,} B" for count in self.bytes_between())
        rate = f"{self.rate} ({self.bytes_per_second / 1e6:g} MB/s each way)"
        return f"two hosts on this machine, {ends}, joined at {rate}; {sent} sent by each so far"

    def _host(self, number: int) -> Host:
        if not isinstance(number, int) or number not in (0, 1):
            raise ValueError(f"host is {number!r}; the hosts are 0 and 1")
        return self.hosts[number]

    def _inside(self, number: int, command: Sequence[str], keywords: dict[str, Any]) -> dict[str, Any]:
        """Keywords for a command on a host; in its environment gloo takes the link's interface, and `ip` and `tc` are found."""
        host = self._host(number)
        user, network = host.namespaces
        given = os.environ if keywords.get("env") is None else keywords["env"]
        variables = {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface, **given}
        variables["PATH"] = preflight.with_system_commands(given.get("PATH"))
        enter = ["nsenter", "--preserve-credentials", f"--user={user}", f"--net={network}"]
        return {**keywords, "args": [*enter, *command], "env": variables}

    def _set_up(self, host: int, script: str) -> None:
        done = self.run(host, ["sh", "-ec", script], capture_output=True, text=True, timeout=_PATIENCE)
        if done.returncode:
            raise RuntimeError(f"the link between the two hosts could not be set up: {done.stderr.strip()} ({script})")


two_nodes = TwoNodes


def guard(owner: int, outer: int) -> NoReturn:
    """Be the guardian: hold both hosts until standard input closes or `owner` dies; then end all that runs in them.

    Runs as root of a fresh user namespace (`outer` is the one around it), in the network namespace that is host 0. Prints
    the number of the process that is host 1.
    """
    inside = _own("user")
    assert inside != outer, "a guardian ends all that runs in its user namespace: it must be one of its own"

    def end() -> NoReturn:
        _end_all("user", inside)
        os._exit(0)

    processes.when_dead(owner, end)
    guardian, (ready, told) = os.getpid(), os.pipe()

    def hold_the_other() -> int:
        processes.die_with(guardian)
        if not ctypes.CDLL(None).unshare(_CLONE_NEWNET):
            os.write(told, b"1")
            while True:
                signal.pause()
        return 1

    other = processes.fork(hold_the_other)
    os.close(told)
    if os.read(ready, 1):
        print(other, flush=True)
        while os.read(0, 1):
            pass
    else:
        print("no second network namespace is allowed", file=sys.stderr, flush=True)
    end()


def _end_all(kind: str, inode: int, spare: int = 0) -> None:
    """Kill every process in a namespace (`kind` "user" or "net") but this one and `spare`, until none is left."""
    while found := [pid for pid in _inhabitants(kind, inode) if pid not in (os.getpid(), spare)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _inhabitants(kind: str, inode: int) -> list[int]:
    """Processes of this user in a namespace; a zombie is in no network namespace any more."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}/ns/{kind}").st_ino == inode and os.stat(f"/proc/{name}/ns/net"):
                found.append(int(name))
    return found


def _own(kind: str) -> int:
    return os.stat(f"/proc/self/ns/{kind}").st_ino


def _bytes_per_second(rate: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", rate) if isinstance(rate, str) else None
    bits = float(match[1]) * _UNITS[match[2]] if match else 0
    if not _LEAST_RATE <= bits <= _MOST_RATE:
        raise ValueError(
            f'rate is {rate!r}; it must be a number of kbit, mbit or gbit (a second), 8kbit to 100gbit, such as "200mbit"'
        )
    return bits / 8
