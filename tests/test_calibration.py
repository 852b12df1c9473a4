"""What the calibration finds is complete, made of what was measured, and enough to predict every kind of step."""

import pytest
import transformers

from helpers import calibration
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
    assert found.memory_bandwidth > 0


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2, zero=3)])
def test_steps_are_predicted_from_it(found, layout):
    assert step_time(SMALL, Workload(1, 16, micro_batches=2), layout, found).total > 0


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="at least one batch"):
        calibration.measure(SMALL, batches=())
    with pytest.raises(ValueError, match="at least one batch"):
        calibration.measure(SMALL, batches=(0, 4))
