"""Ranks on several hosts: on each, PyTorch's elastic agent starts them, and they meet over TCP at the agents' store.

A host is a network namespace of this machine. The warm process forks one agent into each, the agent forks a keeper per rank,
and the keeper the rank, whose end it reports: an agent would end the other ranks of its host before they can say why.
"""

import ctypes
import functools
import os
import signal
from typing import Any

from helpers.launching import processes, wire
from helpers.launching import rank as rank_side
from helpers.launching.warm_job import JOIN_LIMIT, Job, Rank, fork_rank

_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that systems hand out; each job has its own
_FROM_AGENT = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def port(job: int) -> int:
    """Where the agents of this process's job of that number meet, on the first host."""
    return _FIRST_PORT + job % _PORTS


class HostsJob(Job):
    """A job on `request["hosts"]`: of each its `namespaces` (paths), `address` and network `interface`."""

    def _start(self, method: str) -> None:
        hosts = len(self.request["hosts"])
        ranks = list(self._new_ranks())
        each = len(ranks) // hosts
        self.agents: dict[int, list[Rank]] = {}
        for host in range(hosts):
            agent = functools.partial(_agent, self.request, host, each, [rank.ends for rank in ranks], os.getpid())
            self.agents[processes.fork(agent)] = ranks[host * each : (host + 1) * each]
        for rank in ranks:
            rank.close_ends()

    def _reap(self) -> None:
        """A rank's keeper says when it has left; where its agent has gone, nobody says so any more."""
        for agent in list(self.agents):
            try:
                gone = os.waitpid(agent, os.WNOHANG)[0]
            except ChildProcessError:  # ended by `end_descendants`
                gone = agent
            for rank in self.agents.pop(agent) if gone else ():
                self._listen_to_rank(rank)
                if rank.exit is None:
                    self._left(rank, -signal.SIGKILL)

    def _kill(self, ranks: list[Rank]) -> None:
        processes.end_descendants()


def _agent(request: dict[str, Any], number: int, each: int, ends: list[tuple[int, int]], parent: int) -> int:
    """Be the elastic agent of host `number`, which starts `each` ranks; `ends` are all ranks' ends of their pipes."""
    hosts = request["hosts"]
    try:
        _enter(hosts[number]["namespaces"])
        rank_side.set_apart(rank_side.file_of(request, "agent", number), parent, *(end for pair in ends for end in pair))
        os.environ.clear()
        os.environ.update(request["environment"])

        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig, launch_agent

        config = LaunchConfig(
            min_nodes=len(hosts),
            max_nodes=len(hosts),
            nproc_per_node=each,
            run_id=str(request["run"]),
            rdzv_backend="static",  # rank numbers follow the order of the hosts
            rdzv_endpoint=f"{hosts[0]['address']}:{port(request['run'])}",
            rdzv_configs={"rank": number, "timeout": int(JOIN_LIMIT)},
            local_addr=hosts[number]["address"],
            logs_specs=DefaultLogsSpecs(os.devnull),
            start_method="fork",
            max_restarts=0,
        )
        launch_agent(config, lambda: _keep_a_rank(request, hosts[number]["interface"], ends), [])
    except BaseException as error:
        first = number * each
        wire.send(ends[first][0], {"event": "raised", "rank": first, **rank_side.report(error)})
        return 1
    return 0


def _keep_a_rank(request: dict[str, Any], interface: str, ends: list[tuple[int, int]]) -> None:
    """What the agent runs in a process per rank: fork the rank, and report its birth and its end."""
    number = int(os.environ["RANK"])
    processes.die_with(os.getppid())
    elastic = {name: value for name, value in os.environ.items() if name.startswith(_FROM_AGENT)}
    elastic |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    pid = fork_rank({**request, "elastic": elastic}, number, ends[number])
    wire.send(ends[number][0], {"event": "born", "pid": pid})
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    wire.send(ends[number][0], {"event": "left", "code": code})
    while code:
        signal.pause()  # until the job ends all


def _enter(namespaces: list[str]) -> None:
    """Move this process, which has one thread, into the namespaces with these paths. Raises OSError."""
    descriptors = [os.open(path, os.O_RDONLY) for path in namespaces]
    libc = ctypes.CDLL(None, use_errno=True)
    for path, descriptor in zip(namespaces, descriptors, strict=True):
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: entering {path}")
        os.close(descriptor)
