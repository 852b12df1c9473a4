"""vLLM's CPU worker for processors with AMX: asks the system for leave to use its tiles before vLLM does.

Linux grants them to a process that asks (arch_prctl, ARCH_REQ_XCOMP_PERM); vLLM 0.32's attention in bfloat16 uses them without
having asked, which ends a worker by SIGILL unless one of its matrix products has asked before. Named by --worker-cls.
"""

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):
    """A CPU worker that may use AMX tiles."""

    def init_device(self) -> None:
        torch.cpu._init_amx()
        super().init_device()
