"""The warm process: imports torch once, then forks one fresh process per rank for every job.

It runs no tensor operation and never touches CUDA, so a fork of it is safe as long as it has one thread; where it has more, or
where `WORKSHOP_START_METHOD=spawn` or the platform says so, ranks are started as new interpreters instead. It lives as long
as the kernel: when the kernel's end of the pipe closes, it kills every rank and leaves.
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
from typing import NoReturn

from helpers.launching import wire
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
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "transformers.models.ernie4_5.modeling_ernie4_5",
    "accelerate",
    "helpers.models",
)
IDLE = 0.3  # seconds without a request before the next of LATER is imported
_PR_SET_CHILD_SUBREAPER = 36


def main(kernel: int, method: str, folders: list[str]) -> NoReturn:
    """Serve jobs until the kernel goes, then remove its `folders`. `kernel` is the pipe to it, standard input that from it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a rank's orphans become ours, to be ended with it
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    pending = deque([*FIRST, *LATER] if method == "fork" else [])
    while pending and pending[0] in FIRST:
        importlib.import_module(pending.popleft())
    requests = wire.Reader(0)
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    lifeline = _lifeline(waiting)
    used: set[str] = set()  # by a job, and not imported here yet: the next job shall not pay for it again
    while True:
        for name in [name for name in pending if name in used]:
            _import(name)
            pending.remove(name)
        ready = waiting.select(IDLE if pending else None)
        if not ready:
            _import(pending.popleft())
            continue
        messages = [] if any(key.fd == lifeline for key, _ in ready) else requests.read()
        if not messages:
            leave(folders)
        for message in messages:
            if message["do"] == "quit":
                os._exit(0)
            if message["do"] == "run":
                job = Job({**message, "ask_for": list(pending)}, kernel, requests, woken, lifeline, method, folders)
                job.follow()
                used |= job.imported


def _import(name: str) -> None:
    with contextlib.suppress(ImportError):  # a part that is not installed is missed by the job that needs it
        importlib.import_module(name)


def _lifeline(selector: selectors.BaseSelector) -> int | None:
    """A descriptor that becomes readable when the kernel dies, even if a child of the kernel holds our pipe open."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        descriptor = os.pidfd_open(os.getppid())
    except OSError:
        return None
    selector.register(descriptor, selectors.EVENT_READ)
    return descriptor
