"""`launch`: the one verb. A function from a notebook cell runs on real ranks and its values come back."""

import dataclasses
import inspect
import math
import os
import time
from collections.abc import Callable
from typing import Any

from helpers import machine
from helpers.launching import shipping, slots
from helpers.launching.engine import Interrupts, import_path, workplace
from helpers.launching.job import Job
from helpers.launching.judgement import judge
from helpers.launching.results import Run

MOST_RANKS = 256
GLOO_SLACK = 300.0  # seconds by which gloo's own timeout lies behind ours: ours says which rank and which line
NO_LIMIT = 20 * 24 * 3600.0  # seconds; more milliseconds than that the system cannot wait for


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    timeout: float | None = 60,
    backend: str | None = None,
    record: bool = True,
    nodes: Any = None,
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> Run:
    """Run `fn(*args, **kwargs)` on `ranks` fresh processes that share a process group, and return their values as a `Run`.

    Arguments:
        fn: any function, also one defined in a cell or a lambda. Within it the default process group is initialised, the
            device is `machine.device()`, the seed is 0 on every rank, and torch's threads are cores // ranks (at least 1; where
            cores are limited to a number of slots, no more than each slot's share).
        ranks: how many; more than there are cores is allowed and flagged.
        timeout: seconds from the moment every rank is inside `fn`; None waits for ever. Waiting for a slot (GPUs, and cores
            where an instructor has limited them: see `slots`) does not count.
        backend: "nccl" (one GPU per rank), "gloo" (CPU ranks), or None: nccl where every rank has its own GPU, else gloo.
        record: record every collective, send and receive in `run.collectives`.
        nodes: hosts to run on, as `with two_nodes(...) as nodes` gives them: the first half of the ranks on host 0, the rest
            on host 1, started by PyTorch's elastic agents. CPU ranks only.
        env: variables for the ranks; those that libraries read when they start (OMP_*, MALLOC_*, NCCL_*, TORCH*, HF_*,
            TRANSFORMERS_*, …) make a warm process of their own, which takes seconds once.

    Raises:
        RankFailed: an exception left `fn`; the message ends with that rank's own traceback.
        RankDied: a rank's process was killed or exited.
        RanksHung: the timeout passed; the message says who waits for whom, and where.
        TypeError, ValueError: something in the call cannot work; nothing was started.
        KeyboardInterrupt: the kernel was interrupted; no rank is left.
    """
    _validate(fn, args, kwargs, timeout, env)
    placement = machine.placement(ranks, backend if nodes is None else backend or "gloo")
    ranks = int(ranks)  # numpy's numbers are whole numbers too
    hosts = _hosts(nodes, ranks, placement.backend)
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks is {ranks}; at most {MOST_RANKS} can be started on one machine")
    call = shipping.dumps(fn, args, kwargs)
    asked = time.perf_counter()
    choices = slots.choices(placement.device)
    placement = dataclasses.replace(placement, oversubscribed=placement.oversubscribed or 0 < len(choices) < ranks)
    seconds = NO_LIMIT if timeout is None else min(float(timeout), NO_LIMIT)
    environment = {**os.environ, **(env or {})}
    environment.pop("PYTEST_CURRENT_TEST", None)  # libraries that see it take the rank for a test
    with workplace().lock, Interrupts() as interrupts, workplace().new_job() as (number, folder, memory):
        request = {
            "do": "run",
            "run": number,
            "folder": folder,
            "memory": memory,
            "call": shipping.write_where_room((memory, folder), "call", lambda file: file.write(call)),
            "ranks": ranks,
            "threads": max(1, machine.cores() // max(ranks, len(choices) if placement.device == "cpu" else 0)),
            "hosts": hosts,
            "timeout": seconds,
            "group_timeout": seconds + GLOO_SLACK,
            "device": placement.device,
            "record": record,
            "environment": environment,
            "directory": os.getcwd(),
            "path": import_path(),
        }
        job = Job(request, shipping.name_of(fn), placement, asked)
        with slots.held(choices, ranks, job.name, job.display.wait, lambda: interrupts.asked) as held:
            if placement.device == "cuda" and held.slots != choices:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(held.slots)  # rank n has the n-th of them
            job.asked += held.waited
            request["ticket"] = held.path
            job.follow(workplace().engine(environment), interrupts)
        run = job.run()
        job.display.close(run)
        if not interrupts.asked:
            judge(job, run)
    return run


def _validate(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: Any, env: dict[str, str] | None) -> None:
    if "HELPERS_DEVICE" in os.environ and "RANK" in os.environ:
        raise RuntimeError("launch was called inside a rank: a job cannot start another; call it in a cell")
    if not callable(fn):
        raise TypeError(f"launch needs a function as its first argument, not {type(fn).__name__}: launch(job), not launch(job())")
    if timeout is not None and (not isinstance(timeout, (int, float)) or timeout is True or not 0 < timeout < math.inf):
        raise ValueError(f"timeout is {timeout!r}; it must be a number of seconds above 0; timeout=None means no limit")
    if env is not None and not (isinstance(env, dict) and all(isinstance(text, str) for item in env.items() for text in item)):
        raise TypeError(f'env is {env!r}; it must be a dictionary of texts, such as {{"OMP_NUM_THREADS": "1"}}')
    if taken := {"WORKSHOP_DEVICE", "CUDA_VISIBLE_DEVICES"} & (env or {}).keys():
        raise ValueError(f"env sets {min(taken)}, which decides where ranks run: set it in os.environ, or choose backend=")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # some built-in functions have none
    own = {name for name, p in inspect.signature(launch).parameters.items() if p.kind is p.KEYWORD_ONLY}
    clash = [name for name, p in signature.parameters.items() if name in own and p.kind is not p.POSITIONAL_ONLY]
    name = shipping.name_of(fn)
    if clash:
        raise TypeError(f"{name} has a parameter {clash[0]!r}, and so has launch: the two could not be told apart. Rename it.")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}{signature} does not take these arguments: {error}") from None


def _hosts(nodes: Any, ranks: int, backend: str) -> list[dict[str, Any]]:
    """What the warm process needs to know of each host; empty for this machine as it is."""
    if nodes is None:
        return []
    hosts = getattr(nodes, "hosts", None)
    if not isinstance(hosts, tuple):  # also a class that nobody has called
        raise TypeError(f"nodes is {nodes!r}; it must be what `with two_nodes(...) as nodes` gives")
    if ranks % len(hosts):
        raise ValueError(f"ranks is {ranks}; on {len(hosts)} hosts it must be a multiple of {len(hosts)}: they get equally many")
    if backend != "gloo":
        raise ValueError(
            'backend="nccl" does not go with nodes: the two hosts are parts of one machine, their ranks run on its CPU'
        )
    return [{"namespaces": host.namespaces, "address": host.address, "interface": host.interface} for host in hosts]
