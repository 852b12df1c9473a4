"""The instruments on a GPU: memory against hand counts and the allocator, times against CUDA's own events."""

import pytest

from helpers import launch, machine
from helpers.measuring import clock, memory

TIMEOUT = 240  # seconds: the first use of CUDA on a machine can be slow
FLOAT = 4  # bytes
IN, HIDDEN, BATCH = 16, 32, 4
PARAMETERS = IN * HIDDEN + HIDDEN + HIDDEN * IN + IN


def a_small_step():
    """In a rank: what one forward and backward pass of two layers and a first AdamW step use."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, IN)).to(machine.device())
    optimizer = torch.optim.AdamW(model.parameters())
    with memory.track(model, optimizer) as use:
        model(torch.ones(BATCH, IN, device=machine.device())).sum().backward()
        optimizer.step()
    return use


def timed(way):
    """In a rank: seconds of the same products by the clock and by CUDA's events inside it, and whether all were done by then."""
    import torch

    factor = torch.rand(4096, 4096, device=machine.device())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def work():
        begin.record()
        for _ in range(50):
            factor @ factor
        end.record()

    work()  # what is set up once is set up before
    torch.cuda.synchronize()
    if way == "measure":
        by_clock = clock.measure(work, repeats=1, warmup=0).samples[0]
    else:
        with clock.region("products") as stopwatch:
            work()
        by_clock = stopwatch.seconds
    done = end.query()
    torch.cuda.synchronize()
    return by_clock, begin.elapsed_time(end) / 1000, done


def late_start():
    """In a rank: seconds that the clock gives for nothing, right after much was queued."""
    import torch

    factor = torch.rand(4096, 4096, device=machine.device())
    factor @ factor
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(200):
        factor @ factor
    end.record()
    with clock.region("nothing") as stopwatch:
        pass
    return stopwatch.seconds, begin.elapsed_time(end) / 1000


def test_memory_of_a_gpu():
    use = launch(a_small_step, ranks=1, timeout=TIMEOUT).results[0]
    assert use.parameters == PARAMETERS * FLOAT
    assert use.gradients == PARAMETERS * FLOAT
    assert use.activations == BATCH * HIDDEN * FLOAT
    assert use.reserved >= use.allocated >= use.peak


@pytest.mark.parametrize("way", ["measure", "region"])
def test_the_clock_ends_when_the_gpu_has_done_what_was_queued(way):
    by_clock, by_events, done = launch(timed, way, ranks=1, timeout=TIMEOUT).results[0]
    assert done
    assert by_clock >= 0.9 * by_events


def test_what_was_queued_before_a_region_is_none_of_its_time():
    nothing, queued = launch(late_start, ranks=1, timeout=TIMEOUT).results[0]
    assert nothing < queued / 2
