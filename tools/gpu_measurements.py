"""What `make gpu-check` measures, one function a recording; each runs inside a rank on whatever device that has.

A function returns rows, each a list of values under the names in `COLUMNS`. Numbers of a GPU come from CUDA's own counters.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from helpers import launch, machine, models, offload
from helpers.measuring import clock, memory

Rows = list[list[Any]]
COLUMNS = {
    "gpu_arithmetic": ["matrix product in", "TFLOP/s"],
    "gpu_transfers": ["copy of 64 MiB", "GB/s"],
    "gpu_levers": ["training step", "ms", "MiB of tensors", "MiB allocated", "MiB reserved"],
    "gpu_tokens": ["layers", "ms to the first token", "ms a later token", "tokens/s"],
    "gpu_all_reduce": ["bytes", "ms", "GB/s on the bus"],
    "gpu_serving": ["vLLM with tiny-ERNIE", "seconds"],
}
MIB = 2**20
LEVERS: dict[str, dict[str, Any]] = {
    "plain, FP32": {},
    "BF16 autocast": {"precision": torch.bfloat16},
    "full checkpointing": {"checkpointing": True},
    "4 micro-batches": {"micro_batches": 4},
    "eager attention": {"attention": "eager"},
}


def on_gpu() -> bool:
    """Whether this process computes on a GPU; on a CPU everything is smaller."""
    return machine.device().type == "cuda"


def arithmetic() -> Rows:
    """Rates of square matrix products by number format: 2·n³ operations each, in TFLOP/s."""
    n, rows = 8192 if on_gpu() else 256, []
    for name, dtype, precision in (
        ("FP32", torch.float32, "highest"),
        ("FP32 inputs, TF32 products", torch.float32, "high"),
        ("BF16", torch.bfloat16, "highest"),
        ("FP16", torch.float16, "highest"),
    ):
        if precision == "high" and not on_gpu():
            continue
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(n, n, device=machine.device()).to(dtype) for _ in range(2))  # (n, n)
        rows.append([name, 2 * n**3 / clock.measure(lambda a=a, b=b: a @ b, repeats=9, warmup=3).median / 1e12])
    return rows


def transfers() -> Rows:
    """Rates of copies between host and device, from ordinary and from page-locked memory, and within the device, in GB/s."""
    here = torch.ones(64 * MIB, dtype=torch.uint8, device=machine.device())
    there = torch.ones_like(here)
    pairs = {"within the device": (there, here)}  # name: (to, from)
    if on_gpu():
        for kind, pinned in (("ordinary memory", False), ("page-locked memory", True)):
            host = torch.ones(64 * MIB, dtype=torch.uint8, pin_memory=pinned)
            pairs |= {f"host to device, {kind}": (here, host), f"device to host, {kind}": (host, here)}
    return [
        [name, to.nbytes / clock.measure(lambda to=to, source=source: to.copy_(source), repeats=9, warmup=2).median / 1e9]
        for name, (to, source) in pairs.items()
    ]


def lever(
    micro_batches: int = 1, precision: torch.dtype | None = None, checkpointing: bool = False, attention: str = "sdpa"
) -> list[Any]:
    """One training step: milliseconds, and MiB at its peak as tensors, as CUDA's allocator handed out, and as it held."""
    name, rows, tokens = ("ernie-0.3b", 4, 512) if on_gpu() else ("tiny-ernie", 4, 64)
    model, _ = models.load(name, weights="random", dtype=torch.float32, device=machine.device())
    model.config.use_cache = False
    model.set_attn_implementation(attention)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)
    ids = torch.randint(10, 1000, (rows, tokens), device=machine.device())  # (rows, tokens)

    def step() -> None:
        optimizer.zero_grad()
        for part in ids.chunk(micro_batches):
            with torch.autocast(ids.device.type, precision, enabled=precision is not None):
                loss = model(input_ids=part, labels=part).loss / micro_batches
            loss.backward()
        optimizer.step()

    step()  # makes the optimiser's state
    with memory.track(model, optimizer) as use:
        step()
    seconds = clock.measure(step, repeats=9 if on_gpu() else 2).median
    return [1e3 * seconds, *(None if size is None else size / MIB for size in (use.peak, use.allocated, use.reserved))]


def levers() -> Rows:
    """`lever` for each of `LEVERS`, each in a process of its own: what an allocator holds is not given back."""
    return [[name, *launch(lever, ranks=1, timeout=120, **settings).results[0]] for name, settings in LEVERS.items()]


def tokens() -> Rows:
    """Latency of generated tokens with layers of the 0.3B shape on the device, in host memory and on the disk."""
    from transformers import AutoModelForCausalLM

    shape, fast = models.config("ernie-0.3b"), 0 if on_gpu() else "cpu"
    shape.num_hidden_layers, shape.vocab_size, shape.dtype = 18 if on_gpu() else 2, 1024, torch.bfloat16
    torch.manual_seed(0)
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(Path(folder, "model"))
        rungs = {"on the device": fast, "in host memory": "cpu", "on the disk": "disk"}
        for number, (name, tier) in enumerate(rungs.items()):
            if number and tier == fast:
                continue  # without a GPU, host memory is the device
            layers = {f"model.layers.{n}": tier for n in range(shape.num_hidden_layers)}
            places = {"model.embed_tokens": fast, **layers, "model.norm": fast, "lm_head": fast}
            model = offload.load(Path(folder, "model"), places, Path(folder, f"rung{number}"))
            found = offload.evaluate(model, [list(range(10, 42))], new_tokens=6, memory=False)
            rows.append([name, 1e3 * statistics.median(found.first_token), 1e3 * found.latency, found.throughput])
            del model
    return rows


def all_reduce() -> Rows:
    """Times of all-reduces by size, and bus bandwidth: size ÷ time × 2(n − 1)/n."""
    import torch.distributed as dist

    rows: Rows = []
    for power in range(10, 29 if on_gpu() else 21, 3):
        data = torch.zeros(2**power // 4, device=machine.device())
        taken = torch.tensor(clock.measure(lambda data=data: dist.all_reduce(data), repeats=9, warmup=3).median)
        taken = taken.to(machine.device())
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        seconds, ranks = taken.item(), dist.get_world_size()
        rows.append([2**power, 1e3 * seconds, 2**power / seconds * 2 * (ranks - 1) / ranks / 1e9])
    return rows


def serving_possible() -> bool:
    """Whether vLLM is installed and can run here."""
    from helpers import serving as vllm

    return not vllm.available()


def serving() -> Rows:
    """Seconds until vLLM serves, and for requests one after another."""
    from helpers import serving as vllm

    prompt = [[1, 10, 11, 12]]  # token ids
    with vllm.serve("tiny-ernie", show=False) as server:
        server.complete(prompt, max_tokens=16)
        begin = time.perf_counter()
        for _ in range(4):
            server.complete(prompt, max_tokens=32)
        taken = time.perf_counter() - begin
        return [["until it serves", server.facts.started_seconds], ["4 requests of at most 32 tokens", taken]]
