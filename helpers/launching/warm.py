"""The warm process: imports torch once, then forks one fresh process per rank for every job.

It runs no tensor operation and never touches CUDA, so a fork of it is safe as long as it has one thread; where it has more, or
where `WORKSHOP_START_METHOD=spawn` or the platform says so, ranks are started as new interpreters instead. It lives as long
as the kernel: when that ends, in whatever way, it kills every rank, removes the kernel's folders and leaves.
"""

import contextlib
import importlib
import os
import select
import signal
from typing import NoReturn

from helpers.launching import processes
from helpers.launching.hosts import HostsJob
from helpers.launching.warm_job import Job, Kernel

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


def main(pipe: int, kernel_pid: int, method: str, folders: list[str]) -> NoReturn:
    """Serve jobs until the kernel goes, then remove its `folders`. `pipe` leads to it, standard input comes from it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: a rank asked for its stack too early shall not die of it
    kernel = Kernel(pipe, folders)
    processes.adopt_orphans()  # a rank's orphans, to be ended with it
    processes.when_dead(kernel_pid, kernel.has_gone)  # also while a child of the kernel holds our pipe open
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    pending: list[str] = []
    if method == "fork":
        pending += LATER
        for name in FIRST:
            importlib.import_module(name)
    while True:
        if not select.select([kernel], [], [], IDLE if pending else None)[0]:
            _import(pending.pop(0))
        for request in kernel.requests():
            if request["do"] == "run":  # what else may come is too late: the job has ended
                kind = HostsJob if request["hosts"] else Job
                job = kind({**request, "ask_for": pending}, kernel, woken, method)
                job.follow()
                for name in job.imported:  # and not here yet: the next job shall not pay for it again
                    _import(name)
                    pending.remove(name)


def _import(name: str) -> None:
    with contextlib.suppress(Exception):  # what is not installed, or broken, is missed by the job that needs it
        importlib.import_module(name)
