"""Times of steps, tokens and collectives: hand counts where there are any, and what must hold whatever the constants are."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from helpers import predict
from helpers.predict import Layout, Workload, collective_time, decode_latency, step_time
from helpers.predict.computing import rate_of
from helpers.predict.links import Link, Segment
from helpers.predict.timing import KERNELS

SHAPE = predict.architecture(
    {
        "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "intermediate_size": 4096, "vocab_size": 32000, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    }
)  # fmt: skip
WORKLOAD = Workload(2, 1024, precision="mixed", implementation="megatron", micro_batches=8)
CLUSTER = predict.machines("A100-80-SXM", 64)


def measured(**links):
    """A machine whose rates are known to the digit."""
    table = tuple((op, 2, Link((Segment(0, alpha, bandwidth),), 0.0)) for op, (alpha, bandwidth) in links.items())
    rates = tuple((part, 1e9, 1e12) for part in ("layer", "shard", "head"))
    return predict.machines("A100-80-SXM", 8, memory_bandwidth=1e11, efficiency=1.0, overlaps=False, rates=rates, links=table)


def test_rates_come_from_measurements_and_else_from_the_data_sheet():
    a100, l4 = predict.machines("A100-80-SXM", 16), predict.machines("L4", 2)
    assert a100.matmul_flops == 271e12
    assert a100.bus_bandwidth == 235e9
    assert a100.inter_bandwidth == 25e9
    assert l4.matmul_flops == pytest.approx(0.8 * 121e12)
    assert l4.inter_bandwidth == 31.5e9  # no adapter on file: through the PCIe slot
    assert replace(a100, bus_bandwidth=1e9).bus_bandwidth == 1e9


def test_one_stage_is_the_hand_count():
    found = step_time(SHAPE, replace(WORKLOAD, micro_batches=1), Layout(), measured())
    tokens, layer = 2 * 1024, 2 * 1024 * 1024 + 2 * 1024 * 512 + 3 * 1024 * 4096
    flops = 8 * (2 * layer + 2 * 1024 * 1024) * tokens + 2 * tokens * 32000 * 1024  # half of all attention scores
    assert found.compute == pytest.approx(3 * flops / 1e12)
    assert found.update == pytest.approx(SHAPE.parameter_count * (2 + 16 + 8 + 2) / 1e11)
    assert found.total == pytest.approx(found.compute + found.update)
    assert found.tokens_per_second == pytest.approx(tokens / found.total)


def test_gradients_are_summed_once_after_the_last_micro_batch():
    machines = measured(all_reduce=(1e-3, 1e9))
    found = step_time(SHAPE, WORKLOAD, Layout(dp=2), machines)
    assert found.data_parallel == pytest.approx(1e-3 + 2 * SHAPE.parameter_count / 1e9)
    hidden = step_time(SHAPE, replace(WORKLOAD, implementation="transformers"), Layout(dp=2), replace(machines, overlaps=True))
    assert 0 < hidden.data_parallel < found.data_parallel


def test_an_even_pipeline_has_the_bubble_of_its_formula():
    even = replace(SHAPE, vocabulary=1)  # without a head to speak of
    alone, found = (step_time(even, WORKLOAD, Layout(pp=pp), measured(send=(0.0, 1e12))) for pp in (1, 4))
    assert found.compute == pytest.approx(alone.compute / 4, rel=0.05)
    assert found.pipeline_bubble / found.compute == pytest.approx(3 / 8, rel=0.05)


def test_the_slowest_stage_sets_the_pace():
    """A large vocabulary on the last stage makes the others wait."""
    heavy = replace(SHAPE, vocabulary=256_000)
    found = step_time(heavy, WORKLOAD, Layout(pp=8), measured(send=(0.0, 1e12)))
    head = 3 * 2 * 2048 * 256_000 * 1024 / 1e12
    assert found.compute > 8 * head
    assert found.pipeline_bubble < found.compute


def test_checkpointing_costs_another_forward_pass():
    found = step_time(SHAPE, replace(WORKLOAD, checkpointing="full"), Layout(), measured())
    plain = step_time(SHAPE, WORKLOAD, Layout(), measured())
    assert found.compute == plain.compute
    assert 0.25 < found.recompute / plain.compute < 1 / 3  # the head isn't run again


def test_efficiency_scales_computing_alone():
    full, half = (step_time(SHAPE, WORKLOAD, Layout(dp=2, tp=2), replace(CLUSTER, efficiency=share)) for share in (1.0, 0.5))
    assert half.compute == pytest.approx(2 * full.compute)
    for part in ("data_parallel", "tensor_parallel", "update"):
        assert half.parts[part] == full.parts[part] > 0
    default = step_time(SHAPE, WORKLOAD, Layout(dp=2, tp=2), CLUSTER)
    assert default.compute == pytest.approx(full.compute / CLUSTER.efficiency)


def test_offloaded_bytes_cross_the_host_link():
    found = step_time(SHAPE, WORKLOAD, Layout(), CLUSTER, offloaded=1e9)
    assert found.offload == pytest.approx(1e9 / CLUSTER.host_bandwidth)


LAYOUTS = st.builds(
    Layout, dp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 8]), pp=st.sampled_from([1, 2, 8]),
    cp=st.sampled_from([1, 2]), zero=st.integers(0, 3), sequence_parallel=st.booleans(),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, st.sampled_from(["none", "selective", "full"]), st.sampled_from(["transformers", "megatron", "torchtitan"]))
def test_parts_sum_to_the_whole_and_faster_machines_are_never_slower(layout, checkpointing, implementation):
    workload = replace(WORKLOAD, checkpointing=checkpointing, implementation=implementation)
    machines = predict.machines("A100-80-SXM", layout.ranks)
    found = step_time(SHAPE, workload, layout, machines)
    assert all(each >= 0 for each in found.parts.values())
    assert found.total == pytest.approx(sum(found.parts.values()))
    assert found.tokens == 2 * 1024 * 8 * layout.dp
    faster = replace(machines, matmul_flops=2 * machines.matmul_flops, bus_bandwidth=2 * machines.bus_bandwidth)
    assert step_time(SHAPE, workload, layout, faster).total <= found.total * (1 + 1e-9)


def test_layouts_and_workloads_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="128 ranks on 64 devices"):
        step_time(SHAPE, WORKLOAD, Layout(dp=128), CLUSTER)
    with pytest.raises(ValueError, match="step_time is for training"):
        step_time(SHAPE, replace(WORKLOAD, training=False), Layout(), CLUSTER)
    with pytest.raises(ValueError, match="at least one of each"):
        predict.machines("L4", 0)
    with pytest.raises(ValueError, match="bus_bandwidth is -1"):
        replace(CLUSTER, bus_bandwidth=-1)
    with pytest.raises(ValueError, match="all_reduce"):
        collective_time("allreduce", 1, 2, CLUSTER)


def test_large_collectives_reach_the_bus_bandwidth_and_small_ones_the_latency():
    size = 2**34
    assert collective_time("all_reduce", size, 8, CLUSTER) == pytest.approx(size * 7 / 4 / 235e9, rel=0.01)
    assert collective_time("all_gather", size, 8, CLUSTER) == pytest.approx(size * 7 / 8 / 235e9, rel=0.01)
    # NCCL's LL protocol in a ring of NVLinks: 6.6 µs and 14 steps of 0.6
    assert collective_time("all_reduce", 8, 8, CLUSTER) == pytest.approx(15e-6, rel=0.01)
    assert collective_time("all_reduce", size, 1, CLUSTER) == 0


def test_across_hosts_the_network_is_shared_by_who_works_beside():
    size = 2**34
    whole = collective_time("all_reduce", size, 16, CLUSTER)  # two hosts, eight adapters each
    strided = collective_time("all_reduce", size, 2, CLUSTER, stride=8)  # one device of each host
    assert whole == pytest.approx(size * 15 / 8 / (8 * 25e9), rel=0.01)
    assert strided == pytest.approx(size / 25e9, rel=0.01)
    assert collective_time("send", size, 2, CLUSTER, stride=8) == pytest.approx(size / 25e9, rel=0.01)
    assert collective_time("send", size, 2, CLUSTER) == pytest.approx(size / 235e9, rel=0.01)


def test_measured_rates_lie_between_their_sizes():
    machines = replace(measured(), rates=(("layer", 1e6, 1e9), ("layer", 1e8, 3e9), ("head", 1e6, 5e9)))
    assert rate_of(machines, "layer", 1e7) == pytest.approx(2e9)
    assert rate_of(machines, "layer", 1) == 1e9
    assert rate_of(machines, "layer", 1e12) == 3e9
    assert rate_of(machines, "head", 1e12) == 5e9


def test_the_operations_of_a_python_layer_are_those_that_transformers_starts():
    """By the dispatcher's count for one token, of three layers less those of two; views start nothing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import DynamicCache, LlamaConfig, LlamaModel

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operation, types, arguments=(), named=None):
            self.count += not operation.is_view and operation is not torch.ops.aten._unsafe_view.default
            return operation(*arguments, **(named or {}))

    def started(layers):
        shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 32}
        config = LlamaConfig(**shape, num_hidden_layers=layers, attn_implementation="sdpa")
        model, cache = LlamaModel(config).to(torch.bfloat16).eval(), DynamicCache(config=config)
        with torch.no_grad():
            model(torch.arange(8)[None], past_key_values=cache)
            with Counter() as counter:
                model(torch.tensor([[3]]), past_key_values=cache)
        return counter.count

    assert started(3) - started(2) == KERNELS[False]


def test_decoding_streams_weights_and_cache():
    one = Workload(1, 32, training=False, precision="bf16", new_tokens=200, implementation="vllm")
    weights = 2 * (SHAPE.parameter_count - 32000 * 1024)  # the input table is read row by row
    cache = predict.kv_bytes_per_token(SHAPE) * (32 + 100)
    quiet = replace(CLUSTER, kernel_seconds=0.0)
    assert decode_latency(SHAPE, one, Layout(), quiet) == pytest.approx((weights + cache) / quiet.memory_bandwidth)
    started = decode_latency(SHAPE, one, Layout(), CLUSTER) - decode_latency(SHAPE, one, Layout(), quiet)
    assert started == pytest.approx(8 * 10 * CLUSTER.kernel_seconds)
    assert decode_latency(SHAPE, one, Layout(), quiet, offloaded=1e9) > 1e9 / quiet.host_bandwidth
    many = replace(one, batch=4096)
    assert decode_latency(SHAPE, many, Layout(), quiet) > 2 * 4096 * (weights / 2) / quiet.matmul_flops
    assert predict.tokens_per_second(SHAPE, one, Layout(dp=4), CLUSTER) == pytest.approx(
        4 / decode_latency(SHAPE, one, Layout(), CLUSTER)
    )


def test_a_step_shows_its_parts():
    shown = repr(step_time(SHAPE, WORKLOAD, Layout(pp=2, tp=2), CLUSTER))
    assert "pipeline_bubble" in shown
    assert "a GPU" in shown
    assert "context_parallel" not in shown


MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_a_tied_head_multiplies_too():
    quiet = replace(CLUSTER, kernel_seconds=0.0)
    one = Workload(4096, 1, training=False, precision="bf16", new_tokens=2, implementation="vllm")
    times = [decode_latency(replace(SHAPE, tied=tied), one, Layout(), quiet) for tied in (False, True)]
    assert times[0] == pytest.approx(times[1])
    half = decode_latency(SHAPE, replace(one, batch=2048), Layout(), quiet)  # operations count, not bytes
    assert times[0] == pytest.approx(2 * half)


def test_a_token_visits_some_of_the_experts():
    """Mixtral 8x7B: 2 of 8 experts for one sequence, nearly all for many."""
    quiet = replace(predict.machines("H100-SXM", 1), kernel_seconds=0.0)
    shape = predict.architecture(MIXTRAL)
    experts = 32 * 3 * 8 * 4096 * 14336
    read = shape.parameter_count - 32000 * 4096

    def streamed(batch):
        workload = Workload(batch, 1, training=False, precision="bf16", implementation="vllm")
        cache = predict.kv_bytes_per_token(shape) * batch
        return decode_latency(shape, workload, Layout(), quiet) * quiet.memory_bandwidth - cache

    assert streamed(1) == pytest.approx(2 * (read - experts * 3 / 4))
    assert streamed(2) == pytest.approx(2 * (read - experts * 9 / 16))
    assert streamed(64) == pytest.approx(2 * read, rel=1e-3)
    many = Workload(8192, 1, training=False, precision="bf16", implementation="vllm")
    operations = 2 * 8192 * (read - experts * 3 / 4) / quiet.matmul_flops
    assert decode_latency(shape, many, Layout(), quiet) == pytest.approx(operations)


def test_a_message_crosses_the_network_once_however_long_the_pipeline():
    times = [collective_time("send", 8, stages, CLUSTER, stride=8) for stages in (2, 8)]
    assert times[0] == times[1]
    size = 2**34
    assert collective_time("send", size, 8, CLUSTER) == pytest.approx(size / CLUSTER.bus_bandwidth, rel=0.01)
    across = collective_time("send", size, 16, CLUSTER)  # between hosts of 8: one adapter, although 8 are there
    assert across == pytest.approx(size / CLUSTER.inter_bandwidth, rel=0.01)


def test_data_parallelism_beside_tensor_parallelism_crosses_the_network():
    layout = Layout(dp=2, tp=8)
    whole = 2 * SHAPE.parameter_count / 8  # BF16 gradients of one rank, two ranks in an all-reduce
    near, far = (step_time(SHAPE, WORKLOAD, layout, replace(CLUSTER, per_node=per_node)).data_parallel for per_node in (16, 8))
    assert far == pytest.approx(whole / CLUSTER.inter_bandwidth, rel=0.05)
    assert near == pytest.approx(whole / CLUSTER.bus_bandwidth, rel=0.1)


def test_accumulating_gradients_reads_and_writes_them_for_each_micro_batch():
    slow = replace(CLUSTER, memory_bandwidth=1e9, efficiency=1.0)
    once, many = (step_time(SHAPE, replace(WORKLOAD, micro_batches=count), Layout(), slow).compute for count in (1, 4))
    assert many - 4 * once == pytest.approx(4 * SHAPE.parameter_count * (2 * 2 + 2) / 1e9)


def test_shards_are_updated_at_the_rate_of_shards():
    rates = tuple((part, 1e9, 1e12) for part in ("layer", "shard", "head", "update"))
    slow, fast = (replace(CLUSTER, rates=(*rates, ("update of shards", 1e9, rate))) for rate in (1e11, 2e11))
    updates = {
        layout: [step_time(SHAPE, WORKLOAD, layout, each).update for each in (slow, fast)]
        for layout in (Layout(tp=2), Layout(dp=2))
    }
    assert updates[Layout(tp=2)][0] == pytest.approx(2 * updates[Layout(tp=2)][1])
    assert updates[Layout(dp=2)][0] == updates[Layout(dp=2)][1]
