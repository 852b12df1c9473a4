"""The warm process: imports torch once, then forks one fresh process per rank for every job.

It runs no tensor operation and never touches CUDA, so a fork of it is safe as long as it has one thread; where it has more, or
where `WORKSHOP_START_METHOD=spawn` or the platform says so, ranks are started as new interpreters instead. It lives as long
as the kernel: when that ends, in whatever way, it kills every rank, removes the kernel's folders and leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import selectors
import signal
import sys
from collections import deque
from typing import Any, NoReturn

from helpers.launching import wire
from helpers.launching.hosts import HostsJob
from helpers.launching.warm_job import Job, leave

FIRST = ("torch", "torch.distributed", "cloudpickle", "helpers.measuring.collectives")
LATER = (  # imported one by one when nothing is asked for, or after the first job that used them
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.launcher.api",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "transformers.models.ernie4_5.modeling_ernie4_5",
    "accelerate",
    "transformers.models.auto.tokenization_auto",
    "helpers.models",
    "helpers.corpus",
    "torch.profiler._cupti_monitor",
)
IDLE = 0.3  # seconds without a request before the next of LATER is imported
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(kernel: int, kernel_pid: int, method: str, folders: list[str]) -> NoReturn:
    """Serve jobs until the kernel goes, then remove its `folders`. `kernel` is the pipe to it, standard input that from it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: a rank asked for its stack too early shall not die of it
    if sys.platform == "linux":
        _follow_the_kernel(kernel_pid, folders)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    pending = deque([*FIRST, *LATER] if method == "fork" else [])
    while pending and pending[0] in FIRST:
        importlib.import_module(pending.popleft())
    requests, inbox = wire.Reader(0), deque[dict[str, Any]]()
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    used: set[str] = set()  # by a job, and not imported here yet: the next job shall not pay for it again
    while True:
        for name in [name for name in pending if name in used]:
            _import(name)
            pending.remove(name)
        if not inbox:
            if not waiting.select(IDLE if pending else None):
                _import(pending.popleft())
                continue
            inbox.extend(requests.read())
            if requests.closed:
                leave(folders)
        while inbox:
            message = inbox.popleft()
            if message["do"] == "quit":
                leave([])
            if {"do": "cancel", "run": message["run"]} in inbox:
                wire.send(kernel, {"run": message["run"], "event": "done"})
            elif message["do"] == "run":
                kind = HostsJob if message["hosts"] else Job
                job = kind({**message, "ask_for": list(pending)}, kernel, requests, inbox, woken, method, folders)
                job.follow()
                used |= job.imported


def _follow_the_kernel(kernel_pid: int, folders: list[str]) -> None:
    """Leave when the kernel has died, also in the middle of an import, or while a child of the kernel holds our pipe open."""

    def parent_died(*_: object) -> None:
        if os.getppid() != kernel_pid:  # else only the kernel's thread that started this process has ended
            leave(folders)

    signal.signal(signal.SIGHUP, parent_died)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a rank's orphans become ours, to be ended with it
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    parent_died()


def _import(name: str) -> None:
    with contextlib.suppress(Exception):  # what is not installed, or broken, is missed by the job that needs it
        importlib.import_module(name)
