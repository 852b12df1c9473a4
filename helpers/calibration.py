"""What the learner's machine reaches, as `predict.Machines`: measured with real ranks, all of which work at the same time.

A layer of the model, forward and backward, alone and as tensor parallelism cuts it, by the tokens of a micro-batch; what stands
around the layers; an AdamW step; each collective by size, as an α–β link (helpers/predict/links.py). Nothing that is predicted
with the result is measured here: no step, no whole model.

Known misses: ranks that wait for each other's work in a real step arrive less evenly than behind a barrier; caches that a whole
model's weights push out.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from helpers import machine, models, shard_plan
from helpers.hardware import Hardware
from helpers.launching import launch
from helpers.predict import Layout, Machines, Workload, architecture, undivided
from helpers.predict.computing import head_flops, layer_flops
from helpers.predict.layout import divisors
from helpers.predict.links import fit_link
from helpers.predict.rank import rank_of
from helpers.predict.timing import KERNELS

__all__ = ["measure"]

_SIZES = [2**power for power in range(12, 25, 2)]  # bytes of a collective
_COPIED = 64 * 2**20  # bytes of a copy from host to device
_SAMPLES = 7
_DEEP = 4  # layers of the deeper of two models, whose difference is that of layers alone
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send")


def measure(config: Any = None, *, ranks: int = 2, sequence: int = 64, batches: Sequence[int] = (4, 16)) -> Machines:
    """Return this machine as `ranks` ranks find it, for models of `config`'s shape (None: the default model).

    Layers are measured at micro-batches of each of `batches` × `sequence` tokens; other sizes lie between them. Takes about 10 s
    for the small model on two cores. Raises what `launch` raises, and ValueError for no or empty batches, and on several ranks
    for models that are not dense with key-value heads, as Llama is.
    """
    if not batches or min(batches) < 1 or sequence < 1:
        raise ValueError(f"batches {list(batches)} of {sequence} tokens: at least one batch, and nothing in it below 1")
    config = copy.deepcopy(config or models.config())
    shape = architecture(config)
    tp = max(size for size in divisors(ranks) if not undivided(shape, size))
    if tp > 1 and (shape.experts or not all(hasattr(config, name) for name in ("num_key_value_heads", "intermediate_size"))):
        raise ValueError(f"{type(config).__name__}: on several ranks only dense models with key-value heads like Llama's")
    run = launch(building_blocks, config, tp, sequence, list(batches), ranks=ranks, record=False, timeout=120)
    found = {key: max(each[key] for each in run.results) for key in run.results[0]}  # the slowest rank counts
    rates = []
    for batch in batches:
        workload = Workload(batch, sequence)
        whole, cut = rank_of(shape, workload, None), rank_of(shape, workload, Layout(tp=tp))
        operations = {"layer": layer_flops(whole, 0), "shard": layer_flops(cut, 0), "head": head_flops(whole)}
        rates += [(part, flops, 3 * flops / found[part, batch]) for part, flops in operations.items()]
    for part in ("update", "update of shards"):
        rates.append((part, found[part, "bytes"], found[part, "bytes"] / found[part, "seconds"]))
    bandwidth = found["update", "bytes"] / found["update", "seconds"]
    fastest = max(rate for part, _, rate in rates if part == "layer")
    host, memory, sharing = bandwidth, machine.memory(), ranks  # ranks on CPUs share the memory, each GPU has its own
    if run.device != "cpu":
        sizes = [gpu.memory or memory for gpu in machine.gpus()[:ranks]]
        host, memory, sharing = _COPIED / found["host link", _COPIED], min(sizes), 1
    links = [(op, ranks, fit_link(_SIZES, [found[op, size] for size in _SIZES])) for op in _OPERATIONS if ranks > 1]
    return Machines(
        Hardware(run.machine, memory / 1e9, bandwidth / 1e9, bandwidth / 1e9), ranks, ranks, matmul_flops=fastest,
        attention_flops=fastest, memory_bandwidth=bandwidth, bus_bandwidth=bandwidth, inter_bandwidth=bandwidth,
        host_bandwidth=host, memory_bytes=memory // sharing, efficiency=1.0,
        kernel_seconds=found["layer", "one token"] / KERNELS[False], overlaps=run.device != "cpu", rates=tuple(rates),
        links=tuple(links),
    )  # fmt: skip


def building_blocks(config: Any, tp: int, sequence: int, batches: list[int]) -> dict[tuple[str, Any], float]:
    """Seconds by (what, size), the middle of several samples, each begun together."""
    import torch
    import torch.distributed as dist

    found: dict[tuple[str, Any], float] = {}
    whole, cut = ([_model(config, parts, layers) for layers in (1, _DEEP)] for parts in (1, tp))
    for batch in batches:
        ids = torch.zeros(batch, sequence, dtype=torch.long, device=machine.device())
        for part, pair in (("layer", whole), ("shard", cut)):
            shallow, deep = (_middle(partial(_forward_and_backward, model, ids)) for model in pair)
            found[part, batch] = max(deep - shallow, 1e-6) / (_DEEP - 1)
            if part == "layer":
                found["head", batch] = max(shallow - found[part, batch], 1e-6)
    token = torch.zeros(1, 1, dtype=torch.long, device=machine.device())
    with torch.no_grad():
        shallow, deep = (_middle(partial(model, input_ids=token, use_cache=False)) for model in whole)
    found["layer", "one token"] = max(deep - shallow, 0.0) / (_DEEP - 1)
    for part, (_, model) in (("update", whole), ("update of shards", cut)):
        found[part, "seconds"] = _middle(torch.optim.AdamW(model.parameters()).step)
        found[part, "bytes"] = 4 * 7 * sum(each.numel() for each in model.parameters())
    if machine.device().type == "cuda":
        pinned = torch.ones(_COPIED, dtype=torch.uint8, pin_memory=True)
        found["host link", _COPIED] = _middle(partial(torch.empty_like(pinned, device=machine.device()).copy_, pinned))
    for size in _SIZES if dist.get_world_size() > 1 else ():
        found |= {(op, size): _middle(work) for op, work in _collectives(size).items()}
    return found


def _forward_and_backward(model: Any, ids: Any) -> None:
    model(input_ids=ids, labels=ids).loss.backward()


def _model(config: Any, tp: int, layers: int) -> Any:
    """A model of few layers; with `tp` above 1, one rank's part of it, with all that tensor parallelism does but exchanging."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * layers
    if tp > 1:
        config.num_attention_heads //= tp
        config.num_key_value_heads //= tp
        config.intermediate_size //= tp
    model = AutoModelForCausalLM.from_config(config).to(machine.device())
    if tp == 1:
        return model
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    mesh = DeviceMesh.from_group(alone, machine.device().type)
    return shard_plan.apply(model, shard_plan.published_plan(model), mesh)


def _middle(work: Callable[[], Any]) -> float:
    """The median seconds of `work` on this rank; all ranks begin together."""
    import torch.distributed as dist

    from helpers.measuring import clock

    samples = []
    for _ in range(_SAMPLES + 2):
        dist.barrier()
        start = time.perf_counter()
        work()
        clock.synchronize()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])


def _collectives(size: int) -> dict[str, Callable[[], Any]]:
    """Each collective with a payload of `size` bytes, as `traffic` counts them; the receiver's time is a message's."""
    import torch
    import torch.distributed as dist

    ranks, rank, device = dist.get_world_size(), dist.get_rank(), machine.device()
    whole, part = torch.ones(size // 4, device=device), torch.ones(size // 4 // ranks, device=device)
    gathered = torch.ones(part.numel() * ranks, device=device)

    def send() -> None:
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(whole, 1 - rank)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(gathered, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, gathered),
        "send": send,
    }
