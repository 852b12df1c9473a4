"""Bytes that one rank allocates, by category, in training and inference.

Sources of the formulas
* states: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020; AdamW's step
  counter (4 bytes a tensor) is torch's; 8-bit moments with a scale per block of 256: Dettmers et al., ICLR 2022.
* activations: helpers/predict/activations.py.
* logits and loss: cross_entropy is log_softmax (kept in FP32) and nll_loss; each makes one FP32 gradient of that size.
* micro-batches in flight, GPipe m, 1F1B min(m, p − stage): Narayanan et al., "Efficient Large-Scale Language Model Training
  on GPU Clusters Using Megatron-LM", SC 2021.
* DDP's buckets hold a second copy of the gradients unless gradient_as_bucket_view: PyTorch's DistributedDataParallel page.
* serving: the widest moment of a forward pass without gradients, or the sampler's FP32 copy, probabilities and random numbers.

Range: dense and mixture-of-experts decoders that `architecture` understands. One step of a small model on the CPU: peak within
4 %, categories to the byte. Against 19 published training peaks (tools/predict_report.py) the median error is 4 %, against 48
more rows of the same two sources 7 %; worst 23 %, one row aside that contradicts its source (pipelines with tensor parallelism
come out low). Known misses: what an allocator reserves beyond what is allocated, CUDA context and NCCL buffers, workspaces of
matrix products, temporaries of an optimiser step, attention windows, scales of 8-bit weights, and what is rounded up tensor by
tensor: FSDP2's first dimensions to equal shards (0.5 % for three ranks of tiny-ERNIE), the last block of 8-bit moments.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from helpers.predict.activations import checkpoint_bytes, end_bytes, rotary_tables, saved_by_layer
from helpers.predict.architecture import architecture
from helpers.predict.layout import PRECISIONS, Layout, Workload, among
from helpers.predict.rank import Rank, rank_of

__all__ = ["Memory", "kv_bytes_per_token", "memory"]


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `peak` is the most that exists at one time and `moment` when; categories need not all exist then."""

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    master_weights: int = 0
    activations: int = 0  # training: all that backward needs, the FP32 log-softmax included; inference: the widest moment
    recomputation: int = 0  # one layer's activations, made again in backward
    logits: int = 0  # as the model returns them
    loss: int = 0  # gradients of the logits' size in backward; in serving the sampler's copies
    kv_cache: int = 0
    buffers: int = 0  # DDP's buckets, FSDP's gathered layers, autocast's 16-bit weights, a training code's own copies
    peak: int = 0
    moment: str = ""
    stage: int = 0  # the pipeline stage this is

    def __repr__(self) -> str:
        sizes = [(each.name, getattr(self, each.name)) for each in fields(self) if each.name not in ("moment", "stage")]
        lines = [f"{name:<16}{size / 2**20:>12,.2f} MiB" for name, size in sizes if size]
        return "\n".join([*lines, f"{'moment':<16}{self.moment}, stage {self.stage}"])


def memory(config: Any, workload: Workload, layout: Layout | None = None, *, stage: int | None = None) -> Memory:
    """Return what one rank of pipeline stage `stage` allocates; None is the stage with the highest peak.

    `config` is a transformers config or anything `architecture` reads. Raises ValueError for a config that is not understood and
    for layouts that cannot be: more stages than layers, heads that tensor parallelism does not divide.
    """
    stages = range((layout or Layout()).pp) if stage is None else [stage]
    predict = _training if workload.training else _inference
    return max((predict(rank_of(config, workload, layout, each)) for each in stages), key=lambda each: each.peak)


def kv_bytes_per_token(config: Any, *, precision: str = "bf16", tp: int = 1) -> int:
    """Return the bytes of keys and values that one rank keeps for one token: 2 × layers × key-value heads × head size × width.

    Where tp exceeds the key-value heads each rank keeps one head. Raises ValueError for an unknown precision.
    """
    among("precision", precision, PRECISIONS)
    shape = architecture(config)
    return 2 * shape.layers * math.ceil(shape.kv_heads / tp) * shape.head_dim * PRECISIONS[precision].compute


def _training(rank: Rank) -> Memory:
    workload, layout, code, width = rank.workload, rank.layout, rank.code, rank.width
    elements = rank.elements(rank.held)
    shard = [1 / layout.shards if layout.zero >= level else 1 for level in range(4)]
    sizes = {
        "parameters": width.weight * elements * shard[3],
        "gradients": width.gradient * elements * shard[2],
        "optimizer_state": rank.state * elements * shard[1] + 4 * len(rank.held) * workload.optimizer.startswith("adamw"),
        "master_weights": width.master * elements * shard[1],
        "buffers": _buffers(rank, elements, shard[1]),
    }

    flying = workload.micro_batches if layout.pp > 1 else 1
    if layout.schedule == "1f1b":
        flying = min(flying, layout.pp - rank.stage + code.spare_buffers)
    saved = [rank.tokens * saved_by_layer(rank, layer) + rotary_tables(rank) for layer in rank.layers]
    remakes = workload.checkpointing == "full" or (workload.checkpointing == "selective" and code.saves_some_products)
    kept = rank.tokens * checkpoint_bytes(rank) * len(saved) if remakes else sum(saved)
    layer = max(saved, default=0.0)
    logits = flying * rank.tokens * rank.vocabulary * width.compute * rank.last
    sizes["activations"] = flying * (kept + end_bytes(rank))
    sizes |= {"recomputation": layer * remakes, "logits": logits, "loss": rank.tokens * rank.vocabulary * 8 * rank.last}

    standing = sizes["gradients"] if code.standing_gradients or workload.micro_batches > 1 else 0
    moments = {
        "loss": standing + sizes["activations"] + logits + sizes["loss"],
        "backward of the last layer": standing + sizes["activations"] + sizes["recomputation"] + logits,
        "backward of the first layer": sizes["gradients"] + sizes["activations"] * (1 - 1 / flying) + layer + logits,
        "optimizer step": sizes["gradients"],
    }
    always = sum(sizes[name] for name in ("parameters", "optimizer_state", "master_weights", "buffers"))
    return _memory(rank, always, moments, sizes)


def _buffers(rank: Rank, elements: float, shard: float) -> float:
    """What stands beside the states: the training code's gradient copies, DDP's buckets, autocast's casts, FSDP's layers."""
    code, layout, compute = rank.code, rank.layout, rank.width.compute
    found = code.gradient_copy * elements + code.sharded_gradient_copy * elements * shard + code.reduce_bucket
    if rank.workload.implementation == "transformers" and layout.zero == 0 and layout.dp > 1:
        found += rank.width.gradient * elements
    if rank.workload.precision == "autocast":
        tied = rank.shape.tied and layout.pp == 1
        one_layer = [*rank.shape.layer_parameters(rank.layers[0]), *rank.ends]  # cast anew with each checkpointed layer
        cast = one_layer if rank.workload.checkpointing == "full" else rank.held
        found += compute * rank.elements([each for each in cast if each.inputs or (tied and each.name == "embedding")])
    if layout.zero == 3:  # embedding and head stay gathered until backward; two layers (one prefetched), two layers' gradients
        layer = max((rank.elements(rank.shape.layer_parameters(each)) for each in rank.layers), default=0.0)
        found += compute * (rank.elements(rank.ends) + 4 * layer)
    return found


def _inference(rank: Rank) -> Memory:
    shape, workload, width, tp = rank.shape, rank.workload, rank.width, rank.layout.tp
    serving, compute, h = workload.implementation == "vllm", width.compute, shape.hidden
    cached = workload.batch * (workload.sequence + workload.new_tokens) * (not serving)  # tokens; vLLM fills what is left
    cache = kv_bytes_per_token(shape, precision=workload.precision, tp=tp) * len(rank.layers) / shape.layers * cached
    tokens = workload.batched_tokens or rank.tokens
    wide = max(shape.intermediate, shape.experts_per_token * shape.expert_intermediate) / tp
    mlp = compute * (4 * h + (3 if shape.gated else 2) * wide)  # gate and up, or input alone, and their product
    scores = (4 + compute) * shape.heads * workload.sequence / tp if workload.attention == "eager" else 0
    attention = compute * (4 * h + 2 * (shape.query + shape.key) / tp) + scores
    logits = rank.last * (workload.batch if serving or workload.new_tokens else tokens) * shape.vocabulary * compute
    sampler = logits / compute * 12 * serving
    sizes = {
        "parameters": rank.stored(rank.held),
        "activations": tokens * max(mlp, attention),
        "logits": logits,
        "loss": sampler,
        "kv_cache": cache,
    }
    moments = {"a layer": sizes["activations"], "logits": 2 * tokens * h * compute + logits + sampler}
    return _memory(rank, sizes["parameters"] + cache, moments, sizes)


def _memory(rank: Rank, always: float, moments: dict[str, float], sizes: dict[str, float]) -> Memory:
    moment = max(moments, key=lambda name: moments[name])
    whole = {name: math.ceil(round(size, 3)) for name, size in (sizes | {"peak": always + moments[moment]}).items()}
    return Memory(**whole, moment=moment, stage=rank.stage)
