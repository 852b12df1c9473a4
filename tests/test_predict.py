"""Predictions against what is recorded: bytes on a wire, bytes that autograd saves, real models."""

import contextlib
import itertools
import math
import os
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import transformers
import yaml
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from helpers import predict
from helpers.predict import Layout, Workload, architecture, memory, step_traffic, traffic
from helpers.predict.activations import layer_bytes
from helpers.predict.traffic import ALGORITHMS

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import published

TINY = transformers.Ernie4_5Config(
    hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=768,
    vocab_size=1024,
)  # fmt: skip
SMALL = transformers.Ernie4_5Config()  # the shape of ERNIE-4.5-0.3B
PARAMETERS = 3_279_104
SHAPES = yaml.safe_load((published.DATA / "model_configs.yaml").read_text(encoding="utf-8"))


# --- traffic ---------------------------------------------------------------------------------------------------------------


def ring_messages(n, size, turns):
    """Each rank hands a chunk to the next one, `turns` times."""
    return [(rank, (rank + 1) % n, size / n) for _ in range(turns) for rank in range(n)]


def exchange_messages(n, sizes):
    """In round k each rank exchanges `sizes[k]` bytes with the rank whose number differs in bit k."""
    return [(rank, rank ^ (1 << k), size) for k, size in enumerate(sizes) for rank in range(n)]


def tree_messages(n, size):
    """Binomial tree from rank 0: in round k the 2^k ranks that have the data send to the next 2^k."""
    rounds = math.ceil(math.log2(n))
    return [(rank, rank + 2**k, size) for k in range(rounds) for rank in range(2**k) if rank + 2**k < n]


def simulated(op, algorithm, n, size):
    """All messages (source, destination, bytes) of an algorithm, played through rank by rank."""
    back = [(b, a, s) for a, b, s in tree_messages(n, size)]
    halves = [size / 2 ** (k + 1) for k in range(n.bit_length() - 1)]
    pairs = [(a, b) for a, b in itertools.permutations(range(n), 2)]
    return {
        ("all_reduce", "ring"): lambda: ring_messages(n, size, 2 * (n - 1)),
        ("all_reduce", "halving_doubling"): lambda: exchange_messages(n, halves) + exchange_messages(n, halves),
        ("all_reduce", "recursive_doubling"): lambda: exchange_messages(n, [size] * len(halves)),
        ("all_reduce", "tree"): lambda: back + tree_messages(n, size),
        ("all_reduce", "direct"): lambda: [(a, b, size) for a, b in pairs],
        ("all_gather", "ring"): lambda: ring_messages(n, size, n - 1),
        ("all_gather", "recursive_doubling"): lambda: exchange_messages(n, halves),
        ("all_gather", "direct"): lambda: [(a, b, size / n) for a, b in pairs],
        ("reduce_scatter", "ring"): lambda: ring_messages(n, size, n - 1),
        ("reduce_scatter", "recursive_halving"): lambda: exchange_messages(n, halves),
        ("reduce_scatter", "direct"): lambda: [(a, b, size / n) for a, b in pairs],
        ("reduce_scatter", "all_reduce"): lambda: ring_messages(n, size, 2 * (n - 1)),
        ("broadcast", "tree"): lambda: tree_messages(n, size),
        ("broadcast", "chain"): lambda: [(rank, rank + 1, size) for rank in range(n - 1)],
        ("reduce", "tree"): lambda: back,
        ("reduce", "chain"): lambda: [(rank + 1, rank, size) for rank in range(n - 1)],
        ("reduce", "ring"): lambda: ring_messages(n, size, n - 1) + [(rank, 0, size / n) for rank in range(1, n)],
        ("all_to_all", "pairwise"): lambda: [(a, b, size / n) for a, b in pairs],
        ("all_to_all", "direct"): lambda: [(a, b, size / n) for a, b in pairs],
        ("gather", "direct"): lambda: [(rank, 0, size / n) for rank in range(1, n)],
        ("scatter", "direct"): lambda: [(0, rank, size / n) for rank in range(1, n)],
        ("send", "direct"): lambda: [(0, 1, size)],
    }[op, algorithm]()


PLAYED = [
    (op, name) for op, names in ALGORITHMS.items() for name in names if op not in ("recv", "barrier") and name != "double_tree"
]


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize(("op", "algorithm"), PLAYED)
def test_formulas_equal_the_algorithms_played_through(op, algorithm, n):
    size = 8 * 5 * 7 * 64
    sent, received, count = Counter(), Counter(), Counter()
    for source, destination, part in simulated(op, algorithm, n, size):
        sent[source] += part
        received[destination] += part
        count[source] += 1
    found = traffic(op, size, n, algorithm=algorithm)
    assert found.total == sum(sent.values())
    assert found.sent == max(sent.values())
    assert found.messages == max(count.values())
    if op != "send":  # `received` of a send is the sender's
        assert found.received == max(received.values())


@given(st.integers(2, 1024), st.integers(0, 10**12))
def test_no_all_reduce_moves_less_than_the_lower_bound(n, size):
    for algorithm in ("ring", "tree", "double_tree", "direct"):
        found = traffic("all_reduce", size, n, algorithm=algorithm)
        assert found.sent >= math.floor(2 * (n - 1) / n * size)  # Patarasuk and Yuan 2009
        assert found.total >= math.floor(2 * (n - 1) * size)


def test_one_rank_moves_nothing_and_mistakes_are_explained():
    assert traffic("all_reduce", 100, 1).total == 0
    assert traffic("barrier", 0, 8).messages == 3
    with pytest.raises(ValueError, match="ring takes any number"):
        traffic("all_reduce", 100, 6, algorithm="halving_doubling")
    with pytest.raises(ValueError, match="there are ring"):
        traffic("all_gather", 100, 4, algorithm="tree")
    with pytest.raises(ValueError, match="all_reduce"):
        traffic("allreduce", 100, 4)
    with pytest.raises(ValueError, match="gloo"):
        traffic("all_reduce", 100, 4, backend="mpi")


WIRE = """
import os, sys, torch, torch.distributed as dist
n, store = 4, sys.argv[1]
torch.set_num_threads(1)
rank = 0
for other in range(1, n):
    if os.fork() == 0:
        rank = other
        break
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=n)
numbers = 1 << 20
whole, part = torch.ones(numbers), torch.ones(numbers // n)
def parts(): return list(torch.empty(numbers).chunk(n))
operations = {
    "all_reduce": lambda: dist.all_reduce(whole),
    "broadcast": lambda: dist.broadcast(whole, 0),
    "reduce": lambda: dist.reduce(whole, 0),
    "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(numbers), part),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(numbers // n), torch.ones(numbers)),
    "all_to_all": lambda: dist.all_to_all_single(torch.empty(numbers), torch.ones(numbers)),
    "gather": lambda: dist.gather(part, parts() if rank == 0 else None, 0),
    "scatter": lambda: dist.scatter(torch.empty(numbers // n), parts() if rank == 0 else None, 0),
}
def on_the_wire():
    line = next(line for line in open("/proc/net/dev") if line.strip().startswith("lo:"))
    return int(line.split()[9])
for name, operation in operations.items():
    dist.barrier()
    before = on_the_wire()
    dist.barrier()  # nobody starts before rank 0 has looked
    operation()
    dist.barrier()
    if rank == 0:
        print(name, on_the_wire() - before, flush=True)
    dist.barrier()
if rank == 0:
    for _ in range(1, n):
        os.wait()
"""


@pytest.mark.slow
def test_gloo_puts_on_the_wire_what_is_predicted(tmp_path):
    """Four ranks in a network namespace of their own, whose loopback counts every byte."""
    if subprocess.run(["unshare", "-Urn", "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("no user namespaces here: the bytes of a loopback of one's own cannot be counted")
    (tmp_path / "job.py").write_text(WIRE)
    script = f"ip link set lo up; exec {sys.executable} -W ignore {tmp_path}/job.py {tmp_path}/store"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = ["unshare", "-Urn", "--kill-child", "bash", "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    measured = {name: int(size) for name, size in (line.split() for line in run.stdout.splitlines())}
    assert len(measured) == 8, run.stderr
    for op, size in measured.items():
        assert size == pytest.approx(traffic(op, 4 << 20, 4, backend="gloo").total, rel=0.02), op


def test_recorded_steps_of_tiny_ernie():
    """The figures that the recorder showed: DDP, tensor parallelism on DTensor, FSDP2."""
    step = Workload(2, 64)
    (ddp,) = step_traffic(TINY, step, Layout(dp=2))
    assert (ddp.op, ddp.count, ddp.bytes) == ("all_reduce", 1, 13_116_416)
    tensor = step_traffic(TINY, step, Layout(tp=2))
    assert {(each.op, each.bytes) for each in tensor} == {("all_reduce", 131_072)}
    assert sum(each.count for each in tensor) == 28
    sharded = Counter()
    for each in step_traffic(TINY, step, Layout(dp=2, zero=3)):
        sharded[each.op] += each.count
    assert sharded == {"all_gather": 9, "reduce_scatter": 5}


def test_accumulation_synchronises_once_and_zero_2_each_time():
    once = step_traffic(TINY, Workload(2, 64, micro_batches=4), Layout(dp=2))
    assert once == step_traffic(TINY, Workload(2, 64), Layout(dp=2))
    each_time = step_traffic(TINY, Workload(2, 64, micro_batches=4), Layout(dp=2, zero=2))
    assert {(each.op, each.count) for each in each_time} == {("reduce_scatter", 4), ("all_gather", 1)}


def test_sequence_parallelism_moves_the_bytes_of_tensor_parallelism():
    step = Workload(1, 4096, precision="mixed", implementation="nanotron")
    shape, wire = SHAPES["nanotron-8B"], []
    for sequence_parallel in (False, True):
        found = step_traffic(shape, step, Layout(tp=8, sequence_parallel=sequence_parallel))
        layers = [each for each in found if each.count >= 32]
        wire.append(sum(each.count * traffic(each.op, each.bytes, 8, backend="nccl").sent for each in layers))
    assert wire[0] == wire[1]


@given(st.integers(1, 4), st.integers(1, 8), st.sampled_from(["gpipe", "1f1b"]))
def test_pipeline_stages_send_what_the_next_one_receives(pp, micro_batches, schedule):
    step = Workload(2, 64, micro_batches=micro_batches)
    by_stage = [step_traffic(TINY, step, Layout(pp=pp, schedule=schedule), stage=stage) for stage in range(pp)]
    for when, shift in (("forward", 1), ("backward", -1)):
        for stage in range(pp):
            sent = [(each.count, each.bytes) for each in by_stage[stage] if (each.op, each.when) == ("send", when)]
            other = stage + shift
            got = by_stage[other] if 0 <= other < pp else []
            assert sent == [(each.count, each.bytes) for each in got if (each.op, each.when) == ("recv", when)]
            assert bool(sent) == (0 <= other < pp)


def test_generating_moves_one_token_a_sequence_after_the_prompt():
    found = step_traffic(TINY, Workload(4, 32, training=False, new_tokens=11), Layout(tp=2))
    assert [(each.when, each.count, each.bytes) for each in found] == [
        ("prefill", 8, 4 * 32 * 256 * 4),
        ("decode", 80, 4 * 256 * 4),
    ]


# --- shapes ----------------------------------------------------------------------------------------------------------------

FAMILIES = [
    transformers.GPT2Config(),
    transformers.OPTConfig(),
    transformers.LlamaConfig(num_hidden_layers=2, num_key_value_heads=8),
    transformers.LlamaConfig(num_hidden_layers=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    TINY,
    SMALL,
    transformers.Ernie4_5Config(num_hidden_layers=2, use_bias=True),
    transformers.Ernie4_5_MoeConfig(num_hidden_layers=4),
    transformers.Qwen2Config(num_hidden_layers=2),
    transformers.Qwen2MoeConfig(num_hidden_layers=2),
    transformers.Qwen3Config(num_hidden_layers=2),
    transformers.Qwen3MoeConfig(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]),
    transformers.MistralConfig(num_hidden_layers=2),
    transformers.MixtralConfig(num_hidden_layers=2),
    transformers.GemmaConfig(num_hidden_layers=2),
    transformers.PhiConfig(num_hidden_layers=2),
    transformers.GPTJConfig(n_layer=2),
    transformers.GPTNeoXConfig(num_hidden_layers=2),
    transformers.BloomConfig(),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_parameters_equal_those_of_the_real_model(config):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = architecture(config)
    assert shape.parameter_count == sum(each.numel() for each in model.parameters())
    assert len(shape.parameters()) == len(list(model.parameters()))


LLAMA = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
    "vocab_size": 8, "rms_norm_eps": 1,
}  # fmt: skip


def test_a_config_that_is_not_understood_is_refused():
    with pytest.raises(ValueError, match="compressed cache"):
        architecture(transformers.DeepseekV3Config())
    with pytest.raises(ValueError, match="encoder-decoder"):
        architecture(transformers.T5Config(is_encoder_decoder=True))
    with pytest.raises(ValueError, match="neither one of"):
        architecture(types.SimpleNamespace(model_type="rwkv", hidden_size=8))
    with pytest.raises(ValueError, match="MLP width"):
        architecture({name: value for name, value in LLAMA.items() if name != "intermediate_size"})
    with pytest.raises(ValueError, match="no number of positions: looked for n_positions, max_position_embeddings"):
        architecture({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8})
    with pytest.raises(ValueError, match="opt-350m"):
        architecture(transformers.OPTConfig(word_embed_proj_dim=512))
    with pytest.raises(ValueError, match="no experts per token"):
        architecture(LLAMA | {"num_local_experts": 8})
    with pytest.raises(ValueError, match="text_config"):
        architecture(types.SimpleNamespace(model_type="llava", text_config=object()))


# --- memory ----------------------------------------------------------------------------------------------------------------


def saved_bytes(model, ids, autocast=False):
    """Bytes of the storages that autograd keeps for backward, weights aside; and the loss."""
    own = {each.untyped_storage()._cdata for each in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # keeps the storage, so that its identity is not given to another
        return tensor

    context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        output = model(input_ids=ids, labels=ids, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values()), output


def build(config, precision="fp32", attention="sdpa", checkpointing="none"):
    """A model in training mode whose weights are all zero: sizes do not depend on them, and drawing 0.3 B takes long."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    model = model.to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[precision])).to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for each in [*model.parameters(), *model.buffers()]:
            each.zero_()
    if checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_and_logits_of_tiny_ernie_to_the_byte(precision, attention, checkpointing):
    ids = torch.arange(8 * 64).view(8, 64) % 1024
    measured, output = saved_bytes(build(TINY, precision, attention, checkpointing), ids)
    found = memory(TINY, Workload(8, 64, precision=precision, attention=attention, checkpointing=checkpointing))
    assert found.activations == measured
    assert found.logits == output.logits.nbytes


def test_autocast_keeps_16_bit_copies_of_weights():
    ids = torch.arange(8 * 64).view(8, 64) % 1024
    measured, _ = saved_bytes(build(TINY), ids, autocast=True)
    found = memory(TINY, Workload(8, 64, precision="autocast"))
    assert found.activations + found.buffers == measured
    assert found.parameters == 4 * PARAMETERS  # masters stay in FP32: memory does not halve


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_of_the_small_shape_at_a_short_length(checkpointing):
    ids = torch.arange(64).view(1, 64)
    measured, output = saved_bytes(build(SMALL, checkpointing=checkpointing), ids)
    found = memory(SMALL, Workload(1, 64, checkpointing=checkpointing))
    assert found.activations == measured - 8  # the shifted labels of a single sentence are a view of the padded ones
    assert found.logits == output.logits.nbytes


OTHERS = {  # family: a small config, and how far its saved bytes may be from the prediction
    "llama": (transformers.LlamaConfig, {"num_key_value_heads": 2, "intermediate_size": 768}, 0),
    "qwen2": (transformers.Qwen2Config, {"num_key_value_heads": 2, "intermediate_size": 768}, 0),
    "qwen3": (transformers.Qwen3Config, {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 768}, 0),
    "gpt2": (transformers.GPT2Config, {"n_positions": 128, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, 0.001),
    "opt": (
        transformers.OPTConfig,
        {"ffn_dim": 1024, "word_embed_proj_dim": 256, "max_position_embeddings": 128, "dropout": 0},
        0.001,
    ),
    "mixtral": (transformers.MixtralConfig, {"num_key_value_heads": 2, "intermediate_size": 384, "num_local_experts": 4}, 0.001),
    "phi": (transformers.PhiConfig, {"intermediate_size": 1024, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, 0.04),
}


@pytest.mark.parametrize("family", OTHERS)
def test_activations_of_other_families(family):
    kind, extra, tolerance = OTHERS[family]
    config = kind(hidden_size=256, num_hidden_layers=2, num_attention_heads=8, vocab_size=1024, **extra)
    measured, _ = saved_bytes(build(config), torch.arange(4 * 64).view(4, 64))
    assert memory(config, Workload(4, 64)).activations == pytest.approx(measured, rel=tolerance, abs=0)


def adamw_step(model):
    """One step; bytes of parameters, gradients and optimiser state."""
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(64).view(1, 64)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    parameters = list(model.parameters())
    return (
        sum(each.nbytes for each in parameters),
        sum(each.grad.nbytes for each in parameters),
        sum(each.nbytes for each in states),
    )


def test_states_of_one_adamw_step_of_tiny_ernie_equal_the_hand_count():
    by_hand = (4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS + 4 * 38)  # two moments, and a step counter for each of 38 tensors
    assert adamw_step(build(TINY)) == by_hand
    found = memory(TINY, Workload(1, 64))
    assert (found.parameters, found.gradients, found.optimizer_state) == by_hand


@pytest.mark.slow
def test_states_of_the_small_shape_without_holding_it():
    """Fake tensors have sizes and no memory; for tiny-ernie they count the same as real ones."""
    with FakeTensorMode():
        measured = adamw_step(transformers.AutoModelForCausalLM.from_config(SMALL).train())
        fake_tiny = adamw_step(transformers.AutoModelForCausalLM.from_config(TINY).train())
    assert fake_tiny == adamw_step(build(TINY))
    found = memory(SMALL, Workload(1, 64))
    assert (found.parameters, found.gradients, found.optimizer_state) == measured
    assert found.parameters == 4 * 360_748_032


@pytest.mark.parametrize("new_tokens", [0, 5])
@pytest.mark.parametrize(("shape", "batch", "prompt"), [(TINY, 3, 16), (SMALL, 1, 16)], ids=["tiny", "0.3B"])
def test_cache_and_logits_of_inference(shape, batch, prompt, new_tokens):
    ids = torch.arange(batch * prompt).view(batch, prompt)
    model = build(shape).eval()
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1 if new_tokens else 0)
        for _ in range(new_tokens):
            following = model(input_ids=ids[:, :1], past_key_values=output.past_key_values, use_cache=True)
            output.past_key_values = following.past_key_values
    measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in output.past_key_values.layers)
    found = memory(shape, Workload(batch, prompt, training=False, new_tokens=new_tokens))
    assert found.kv_cache == measured
    assert found.logits == output.logits.nbytes
    assert found.gradients == found.optimizer_state == 0


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 0.001),
        ({"checkpointing": "full"}, 0.04),
        ({"precision": "bf16"}, 0.001),
        ({"precision": "autocast"}, 0.001),
        ({"micro_batches": 2}, 0.001),
    ],
    ids=str,
)
def test_peak_of_a_training_step(options, tolerance):
    """The second AdamW step of two layers, when moments exist, under torch's own memory tracker."""
    step, config = Workload(8, 64, **options), transformers.Ernie4_5Config(**{**TINY.to_dict(), "num_hidden_layers": 2})
    model = build(config, "bf16" if step.precision == "bf16" else "fp32", checkpointing=step.checkpointing)
    optimizer, ids = torch.optim.AdamW(model.parameters()), torch.arange(8 * 64).view(8, 64) % 1024

    def train(tracker=None):
        for _ in range(step.micro_batches):
            if tracker:
                tracker.reset_mod_stats()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step.precision == "autocast"):
                output = model(input_ids=ids, labels=ids, use_cache=False)
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        train(tracker)
    measured = sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())
    assert memory(config, step).peak == pytest.approx(measured, rel=tolerance)


def test_fused_layers_give_the_published_formula():
    """Korthikanti et al. 2023: s·b·h·(34 + 5·a·s/h); split over t ranks 10 + 24/t + 5·a·s/(h·t); with the sequence split 34/t."""
    gpt = dict(SHAPES["GPT/BLOOM-like 181B"])
    h, a, s, t = 14336, 64, 2048, 8
    step = Workload(1, s, precision="mixed", attention="eager", implementation="megatron")
    for layout, expected in (
        (Layout(), 34 + 5 * a * s / h),
        (Layout(tp=t), 10 + 24 / t + 5 * a * s / (h * t)),
        (Layout(tp=t, sequence_parallel=True), 34 / t + 5 * a * s / (h * t)),
    ):
        assert layer_bytes(gpt, step, layout) / h == pytest.approx(expected, rel=0.001)
    selective = Workload(1, s, precision="mixed", attention="eager", checkpointing="selective", implementation="megatron")
    assert layer_bytes(gpt, selective, Layout(tp=t, sequence_parallel=True)) / h == pytest.approx(34 / t, rel=0.001)


def test_zero_stages_follow_the_paper():
    """Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 ranks take 120, 31.4, 16.6 and 1.88 GB of states."""
    config = {**SHAPES["nanotron-8B"], "vocab_size": 1000, "intermediate_size": 14_200, "num_hidden_layers": 31}
    psi = architecture(config).parameter_count
    for zero, bytes_per_parameter in ((0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)):
        found = memory(config, Workload(1, 64, precision="mixed"), Layout(dp=64, zero=zero))
        states = found.parameters + found.gradients + found.optimizer_state + found.master_weights
        assert states == pytest.approx(bytes_per_parameter * psi, rel=0.001)


def test_in_flight_micro_batches_by_schedule():
    one = memory(TINY, Workload(2, 64), Layout(pp=4), stage=0).activations
    for micro_batches in (1, 2, 4, 8):
        step = Workload(2, 64, micro_batches=micro_batches)
        assert memory(TINY, step, Layout(pp=4, schedule="gpipe"), stage=0).activations == micro_batches * one
        assert memory(TINY, step, Layout(pp=4, schedule="1f1b"), stage=0).activations == min(micro_batches, 4) * one
        assert (
            memory(TINY, step, Layout(pp=4), stage=3).activations
            == memory(TINY, Workload(2, 64), Layout(pp=4), stage=3).activations
        )


def test_precisions_and_optimisers():
    def bytes_per_parameter(**options):
        found = memory(TINY, Workload(1, 64, **options))
        return (found.parameters + found.gradients + found.optimizer_state + found.master_weights) / PARAMETERS

    expected = {"fp32": 16, "bf16": 8, "autocast": 16, "mixed": 16, "mixed_fp32_gradients": 18}
    for precision, each in expected.items():
        assert bytes_per_parameter(precision=precision) == pytest.approx(each, abs=0.001)
    assert bytes_per_parameter(optimizer="sgd") == 8
    assert bytes_per_parameter(optimizer="adamw8bit") == pytest.approx(10.03, abs=0.01)
    whole, small = (memory(SMALL, Workload(1, 64, training=False, precision=each)).parameters for each in ("bf16", "int8"))
    assert small == whole - 18 * (2 * 1024 * (2048 + 256) + 3 * 1024 * 3072)  # a byte less for each weight of a linear layer


layouts = st.builds(
    Layout,
    dp=st.sampled_from([1, 2, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 3, 4]),
    zero=st.sampled_from([0, 1, 2, 3]),
    sequence_parallel=st.booleans(),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)


@settings(deadline=None)
@given(
    layouts, st.sampled_from(["none", "full"]), st.sampled_from(["transformers", "nanotron", "megatron-deepspeed", "torchtitan"])
)
def test_stages_hold_the_whole_model_and_sharding_never_adds_states(layout, checkpointing, implementation):
    step = Workload(2, 64, micro_batches=4, precision="mixed", checkpointing=checkpointing, implementation=implementation)
    found = [memory(TINY, step, layout, stage=stage) for stage in range(layout.pp)]
    assert max(each.peak for each in found) == memory(TINY, step, layout).peak
    if layout.zero < 3 and layout.tp == 1:
        copy_of_tied = 1024 * 256 * (layout.pp > 1)
        assert sum(each.parameters for each in found) == 2 * (PARAMETERS + copy_of_tied)
    more = Layout(layout.dp * 2, layout.tp, layout.pp, zero=layout.zero, sequence_parallel=layout.sequence_parallel)
    for stage, each in enumerate(found):
        wider = memory(TINY, step, more, stage=stage)
        assert wider.optimizer_state <= each.optimizer_state
        assert wider.parameters <= each.parameters
        assert (
            each.peak
            <= sum(getattr(each, name) for name in each.__dataclass_fields__ if name not in ("peak", "moment", "stage"))
            + each.activations
        )  # the widest moment holds at most everything and one layer more


def test_what_tensor_parallelism_would_cut_unevenly_is_named():
    assert predict.undivided(TINY, 2) == {}
    assert predict.undivided(TINY, 3) == {"attention heads": 8, "key-value heads": 2}
    assert predict.undivided(TINY, 4) == {"key-value heads": 2}
    assert predict.undivided(TINY, 4, "vllm") == {}  # two ranks hold the same head
    assert predict.undivided(transformers.GPT2Config(), 2) == {}
    assert predict.undivided(transformers.GPT2Config(), 2, "megatron") == {"vocabulary entries": 50257}
    assert predict.undivided(transformers.GPT2Config(), 2, "vllm") == {}  # padded
    experts = {"num_hidden_layers": 2, "intermediate_size": 767, "moe_intermediate_size": 90}
    assert predict.undivided(transformers.Qwen3MoeConfig(**experts), 2) == {}  # no layer has an MLP of that width
    assert predict.undivided(transformers.Qwen3MoeConfig(**experts, mlp_only_layers=[0]), 2) == {"MLP columns": 767}
    assert predict.undivided(transformers.Qwen3MoeConfig(**experts), 4) == {"MLP columns": 90}


def test_layouts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="8 attention heads"):
        memory(TINY, Workload(1, 64), Layout(tp=3))
    with pytest.raises(ValueError, match="at least one layer"):
        memory(TINY, Workload(1, 64), Layout(pp=5))
    with pytest.raises(ValueError, match="must be at least 1"):
        Layout(dp=0)
    with pytest.raises(ValueError, match="choose one of"):
        Workload(1, 64, precision="fp8")
    with pytest.raises(ValueError, match="inference"):
        Workload(1, 64, precision="int8")
    with pytest.raises(ValueError, match="new_tokens is -5"):
        Workload(1, 64, training=False, new_tokens=-5)
    with pytest.raises(ValueError, match="batched_tokens is 0: it must be at least 1"):
        Workload(1, 64, training=False, batched_tokens=0)
    with pytest.raises(ValueError, match="precision 'float16': choose one of fp32"):
        predict.kv_bytes_per_token(TINY, precision="float16")
    for stage in (-1, 2):
        with pytest.raises(ValueError, match=f"stage {stage}: a pipeline of 2 has stages 0 to 1"):
            step_traffic(TINY, Workload(1, 64), Layout(pp=2), stage=stage)


def test_more_tensor_parallel_ranks_than_kv_heads_keep_one_head_each():
    assert predict.kv_bytes_per_token(TINY, precision="fp32") == 2 * 4 * 2 * 32 * 4
    assert predict.kv_bytes_per_token(TINY, precision="fp32", tp=8) == 2 * 4 * 1 * 32 * 4


def test_keys_and_values_go_round_a_ring_and_come_back_with_their_gradients():
    ring = {each.when: each for each in step_traffic(TINY, Workload(2, 64), Layout(cp=2)) if each.axis == "cp"}
    assert ring["forward"].bytes == 2 * (2 * 64 / 2) * (2 * 32) * 4  # keys and values of half the tokens, FP32
    assert ring["backward"].bytes == 2 * ring["forward"].bytes
    assert ring["backward"].count == ring["forward"].count == 4
