"""What the calibration finds is complete, made of what was measured, and enough to predict every kind of step."""

from types import SimpleNamespace

import pytest
import transformers

from helpers import calibration, machine
from helpers.predict import Layout, Workload, step_time

SMALL = transformers.Ernie4_5Config(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128,
    vocab_size=256,
)  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return calibration.measure(SMALL, ranks=2, sequence=16, batches=(1, 2))


def test_every_part_and_collective_is_measured(found):
    assert [part for part, _, _ in found.rates] == [*["layer", "shard", "head"] * 2, "update", "update of shards"]
    assert all(flops > 0 and rate > 0 for _, flops, rate in found.rates)
    assert {op for op, _, _ in found.links} == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    assert found.gpus == 2
    assert found.efficiency == 1
    assert found.memory_bandwidth == found.host_bandwidth > 0
    assert found.memory_bytes == machine.memory() // 2


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2, zero=3)])
def test_steps_are_predicted_from_it(found, layout):
    assert step_time(SMALL, Workload(1, 16, micro_batches=2), layout, found).total > 0


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="at least one batch"):
        calibration.measure(SMALL, batches=())
    with pytest.raises(ValueError, match="at least one batch"):
        calibration.measure(SMALL, batches=(0, 4))


def test_models_of_another_kind_are_refused_before_the_start():
    for config in (transformers.GPT2Config(n_layer=2), transformers.MixtralConfig(num_hidden_layers=2)):
        with pytest.raises(ValueError, match=f"{type(config).__name__}: on several ranks only dense models with key-value"):
            calibration.measure(config)


def test_one_rank_is_calibrated_for_models_of_any_kind():
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=64)
    assert calibration.measure(config, ranks=1, sequence=16, batches=[1]).gpus == 1


def test_a_model_of_few_layers_has_as_many_kinds_of_layers():
    kinds = ["sliding_attention", "full_attention"] * 3
    config = transformers.Qwen3Config(
        hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128,
        vocab_size=256, layer_types=kinds, use_sliding_window=True, sliding_window=8,
    )  # fmt: skip
    assert calibration._model(config, 1, 4).config.layer_types == ["sliding_attention"] * 4
    assert config.layer_types == kinds


def test_on_gpus_memory_and_host_link_are_theirs(monkeypatch):
    """With an imitation of the run: two GPUs, of which the driver tells that one is smaller."""
    times = {(part, 1): 1e-3 for part in ("layer", "shard", "head")}
    times |= {(part, "seconds"): 1e-3 for part in ("update", "update of shards")}
    times |= {(part, "bytes"): 1e9 for part in ("update", "update of shards")}
    times |= {(op, size): 1e-4 for op in calibration._OPERATIONS for size in calibration._SIZES}
    times |= {("layer", "one token"): 1e-4, ("host link", calibration._COPIED): calibration._COPIED / 50e9}
    monkeypatch.setattr(
        calibration, "launch", lambda *_, **__: SimpleNamespace(results=[times] * 2, device="cuda", machine="two")
    )
    gpus = tuple(machine.Gpu(number, "a made-up GPU", "", memory) for number, memory in enumerate((80 * 10**9, 40 * 10**9)))
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    found = calibration.measure(SMALL, ranks=2, sequence=16, batches=(1,))
    assert found.memory_bytes == 40 * 10**9
    assert found.host_bandwidth == pytest.approx(50e9)
    assert found.memory_bandwidth == pytest.approx(1e12)
