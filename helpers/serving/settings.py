"""How a server is asked for: `Settings`, and the command and environment variables that they make for vLLM on this machine."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers import machine, preflight

BIND = "VLLM_CPU_OMP_THREADS_BIND"
GIB = 2**30
_MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` command of the CPU build does not start; this takes the same flags
_AMX_WORKER = "helpers.serving.amx_worker.Worker"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server shall do; None leaves a choice to vLLM.

    replicas: data-parallel copies of the whole model, each on `tensor_parallel` ranks (vLLM's --data-parallel-size).
    dtype: "auto" (the stored one, float32 as bfloat16), "float32", "bfloat16", "float16".
    max_num_batched_tokens: of one step, over all requests; max_num_seqs: requests of one step.
    max_model_len: tokens of a prompt and its continuation.
    kv_cache_gib: KV cache of each rank; on the CPU None is 1 GiB, or what one request of the longest length needs.
    gpu_memory_utilization: share of each GPU's memory (or of the machine's) that the server may take.
    model_impl: "auto" (vLLM's own class where there is one), "vllm", "transformers".
    compile: torch.compile and graph capture; without them (--enforce-eager) the start is shorter and steps are slower.
    extra: more flags of `vllm serve`. env: more environment variables; they win over those chosen here.
    """

    tensor_parallel: int = 1
    replicas: int = 1
    dtype: str = "auto"
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float | None = None
    model_impl: str = "auto"
    compile: bool = False
    extra: Sequence[str] = ()
    env: Mapping[str, str] | None = None

    @property
    def ranks(self) -> int:
        """Processes that hold weights."""
        return self.tensor_parallel * self.replicas

    def flags(self, kv_cache_bytes: int | None, precision: str = "") -> list[str]:
        """The flags that stand for these settings; `kv_cache_bytes` is each rank's, `precision` that of weights and cache."""
        given = {
            "tensor-parallel-size": self.tensor_parallel,
            "data-parallel-size": self.replicas if self.replicas > 1 else None,
            "dtype": self.dtype,
            "max-num-batched-tokens": self.max_num_batched_tokens,
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_num_seqs,
            "kv-cache-memory-bytes": kv_cache_bytes,
            "gpu-memory-utilization": self.gpu_memory_utilization,
            "model-impl": self.model_impl if self.model_impl != "auto" else None,
            "worker-cls": _AMX_WORKER if precision == "bf16" and on_cpu() and _has_amx() else None,
        }
        found = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        return [*found, *(() if self.compile else ("--enforce-eager",)), *self.extra]

    def variables(self) -> dict[str, str]:
        """The environment variables of the server: loopback only, nothing sent anywhere, and on the CPU where threads run."""
        found = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        }
        if self.compile:
            found["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # each start compiles anew, so that its time means something
        if on_cpu():
            lists = binding(self.ranks)
            found |= {BIND: "|".join(lists), "OMP_NUM_THREADS": str(len(lists[0].split(",")))}
            if (given := os.environ.get(BIND, "auto")) != "auto":
                found[BIND] = given
        # vLLM's "auto" fails where ranks outnumber NUMA nodes
        return found | {name: value for name, value in (self.env or {}).items() if (name, value) != (BIND, "auto")}


def binding(ranks: int, cores: Sequence[int] | None = None) -> list[str]:
    """For each rank the cores that its threads stay on, such as ["0,1", "2,3"].

    Each rank has the same number of cores of its own; one core is left to the server and the scheduler where cores outnumber
    ranks. Where there are fewer cores than ranks, ranks share them in turn: all works, timings are oversubscribed.
    """
    cores = sorted(os.sched_getaffinity(0))[: machine.cores()] if cores is None else list(cores)
    usable = cores[:-1] if len(cores) > ranks else cores
    each = max(1, len(usable) // ranks)
    return [",".join(str(usable[(rank * each + place) % len(usable)]) for place in range(each)) for rank in range(ranks)]


def command(place: Path, name: str, port: int, flags: Sequence[str]) -> list[str]:
    """The words that start the server of the model in the folder `place`, which requests call `name`, without the Python."""
    shown = min(os.path.relpath(place), str(place), key=len)
    return ["-m", _MODULE, "--model", shown, "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *flags]


def shell(words: Sequence[str], variables: Mapping[str, str]) -> str:
    """The command for a shell, with its variables; `python` there is the Python of this environment."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), "python", *map(shlex.quote, words)])


def on_cpu() -> bool:
    """Whether the installed vLLM is its build for the CPU, or no GPU may be used."""
    return preflight.is_installed("vllm-cpu") or not machine.gpus()


def available() -> str:
    """Empty where vLLM can run here, else a sentence that says what is missing and how to get it.

    WORKSHOP_VLLM=no plays a machine without vLLM.
    """
    if os.environ.get("WORKSHOP_VLLM") == "no":
        return "vLLM is not used: WORKSHOP_VLLM=no is set. What helps: unset it, then make vllm."
    found = preflight.vllm()
    return "" if found.state == "ok" else f"vLLM cannot run here: {found.meaning}. What helps: {found.mend}."


def _has_amx() -> bool:
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "amx_tile" in processor.read_text()
