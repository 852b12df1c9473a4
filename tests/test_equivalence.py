"""Each silent fault, put into a small job, is found and named; healthy jobs raise no alarm."""

import contextlib
import re

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from helpers import equivalence
from helpers.launching import Run

ROWS = 24
FAULTS = {
    "none": "",
    "summed": "gradients are off by the factor W = 2",
    "averaged twice": "gradients are off by the factor 1/W = 1/2",
    "loss divided by the global count": "gradients are off by the factor 1/W = 1/2",
    "same samples": "every rank trains on the same samples",
    "dropped tail": "samples are missed or repeated",
    "not synchronised": "gradients differ between ranks",
    "one parameter outside": "gradients differ between ranks",
    "no_sync around backward": "gradients were exchanged 3 times in one step",
    "no_sync around backward, BF16": "gradients were exchanged 3 times in one step",
    "no_sync around backward, hook": "gradients were exchanged 3 times in one step",
    "BF16": "",
    "no_sync always": "gradients differ between ranks",
    "other start": "parameters differ between ranks",
    "learning rate scaled": "parameters differ although gradients agree",
    "mean of means": "a mean of means over unequal counts",
}


def job(fault):
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    data = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    rows = list(range(ROWS))[rank::world]
    if fault == "mean of means":
        rows = list(range(ROWS)) if world == 1 else list(range(4)) if rank == 0 else list(range(4, ROWS))
    if fault == "same samples":
        rows = list(range(ROWS))[: ROWS // world]
    if fault == "dropped tail":
        rows = rows[: -1 if world > 1 else None]
    if fault == "other start" and rank == 1:
        torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 1))
    if fault.endswith("BF16"):
        network, data = network.bfloat16(), data.bfloat16()
    unwrapped = fault in ("summed", "averaged twice", "not synchronised", "one parameter outside", "other start")
    model = network if unwrapped else DDP(network)
    if fault.endswith("hook"):
        model.register_comm_hook(None, fp16_compress_hook)
    k = 3 if fault.startswith("no_sync") else 1
    total = 0.0
    for i in range(k):
        quiet = (
            model.no_sync()
            if fault.startswith("no_sync") and (i < k - 1 or fault.endswith("always"))
            else contextlib.nullcontext()
        )
        part = data[rows[i::k]]
        with quiet if fault.endswith("always") else contextlib.nullcontext():
            loss = model(part).square().mean() / k
        if fault.endswith("count"):
            loss = loss / world
        with model.no_sync() if fault.endswith("always") else quiet:
            loss.backward()
        total += loss.item()
    if unwrapped and fault not in ("not synchronised",):
        for index, parameter in enumerate(network.parameters()):
            if fault == "one parameter outside" and index == 0:
                continue
            dist.all_reduce(parameter.grad)
            parameter.grad /= {"summed": 1, "averaged twice": world**2}.get(fault, world)
    if fault == "other start":  # same gradients on all ranks, so only the weights tell
        for parameter in network.parameters():
            dist.broadcast(parameter.grad, src=0)
    rate = 0.1 * (world if fault == "learning rate scaled" else 1)
    torch.optim.SGD(model.parameters(), lr=rate).step()
    tokens = len(rows) if fault == "mean of means" else None
    return equivalence.observe(model, loss=total, samples=rows, tokens=tokens)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault):
    comparison = equivalence.compare(job, fault)
    named = [finding.fault for finding in comparison.findings]
    if FAULTS[fault]:
        assert FAULTS[fault] in named, comparison
    else:
        assert comparison.equal, comparison


def undivided(micro):
    """A fixed size of micro-batch: more of them on fewer ranks, and the loss is not divided by their number."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 1))
    data = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))[dist.get_rank() :: dist.get_world_size()]
    pieces = data.split(micro)
    for number, piece in enumerate(pieces):
        with model.no_sync() if number < len(pieces) - 1 else contextlib.nullcontext():
            model(piece).square().mean().backward()
    return equivalence.observe(model)


def test_an_undivided_loss_is_a_constant_factor():
    (finding,) = equivalence.compare(undivided, 4).findings
    assert "factor 1/W = 1/2" in finding.fault
    assert "micro-batches of a fixed size" in finding.mend


def in_three_pieces(divisor):
    """One batch on one rank; on several three micro-batches, each loss divided by `divisor`."""
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    model, pieces = DDP(nn.Linear(8, 1)), 3 if world > 1 else 1
    data = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))[rank::world]
    for number in range(pieces):
        with model.no_sync() if number < pieces - 1 else contextlib.nullcontext():
            (model(data[number::pieces]).square().mean() / (divisor if world > 1 else 1)).backward()
    return equivalence.observe(model)


@pytest.mark.parametrize(("divisor", "named"), [(1, ["3"]), (3, []), (9, ["1/3"]), (-6, ["-0.5"])])
def test_the_number_of_micro_batches_is_a_factor_of_its_own(divisor, named):
    faults = [finding.fault for finding in equivalence.compare(in_three_pieces, divisor).findings]
    assert faults == [f"gradients are off by the factor {factor}" for factor in named]


def epochs(set_epoch, shuffle):
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    dataset = TensorDataset(torch.arange(ROWS))
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=shuffle)
    seen = []
    for epoch in range(2):
        if set_epoch:
            sampler.set_epoch(epoch)
        seen.append([int(i) for (batch,) in DataLoader(dataset, batch_size=4, sampler=sampler) for i in batch])
    model = DDP(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    return equivalence.observe(model, samples=seen)


@pytest.mark.parametrize(("set_epoch", "shuffle", "alarm"), [(False, True, True), (True, True, False), (False, False, False)])
def test_the_same_order_each_epoch(set_epoch, shuffle, alarm):
    named = [finding.fault for finding in equivalence.compare(epochs, set_epoch, shuffle).findings]
    assert ("the same order in every epoch" in named) == alarm
    assert not [name for name in named if "missed" in name]


def augmented(with_rank):
    torch.manual_seed(0)
    model = DDP(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    draws = torch.rand(4, generator=torch.Generator().manual_seed(7 + with_rank * dist.get_rank()))
    return equivalence.observe(model, draws=draws)


@pytest.mark.parametrize("with_rank", [False, True])
def test_the_same_augmentation_on_every_rank(with_rank):
    assert equivalence.compare(augmented, with_rank).equal == with_rank


def prepared_by_accelerate():
    import accelerate

    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    dataset = TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1)))
    network = nn.Linear(8, 400)
    loader = DataLoader(
        dataset, batch_size=ROWS // accelerator.num_processes // 2, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    model, loader, optimiser = accelerator.prepare(network, loader, torch.optim.SGD(network.parameters(), lr=0.1))
    seen = []
    for _ in range(2):
        epoch = []
        for ids, rows in loader:
            epoch += ids.tolist()
            optimiser.zero_grad()
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            optimiser.step()
        seen.append(epoch)
    return equivalence.observe(model, loss=loss, samples=seen)


def with_dropout():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    data = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))[dist.get_rank() :: dist.get_world_size()]
    loss = model(data).square().mean()
    loss.backward()
    return equivalence.observe(model, loss=loss)


def with_three_steps(known):
    torch.manual_seed(0)
    model, ids = DDP(nn.Linear(8, 400)), list(range(ROWS))[dist.get_rank() :: dist.get_world_size()]
    data = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))[ids]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.zero_grad()
        model(data).square().mean().backward()
        if known == "counted":
            optimiser.step()
        with torch.no_grad():
            for parameter in model.parameters() if known != "counted" else ():
                parameter -= 0.1 * parameter.grad
    return equivalence.observe(
        model,
        samples=[ids] * 3 if known == "epochs" else ids,
        rates=[0.1] * 3 if known == "rates" else None,
        steps=3 if known == "said" else None,
    )


@pytest.mark.parametrize("known", ["counted", "rates", "said", "epochs"])
def test_gradients_may_be_exchanged_in_each_of_several_steps(known):
    comparison = equivalence.compare(with_three_steps, known)
    assert comparison.equal, comparison


def with_traffic(gathers):
    torch.manual_seed(0)
    world = dist.get_world_size()
    model, row = DDP(nn.Linear(8, 1)), torch.ones(250)
    model(torch.ones(2, 8)).mean().backward()
    for _ in range(gathers):
        dist.all_gather_into_tensor(torch.empty(250 * world), row)
    return equivalence.observe(model)


def test_traffic_is_counted_by_operation():
    usual, more = (equivalence.compare(with_traffic, gathers) for gathers in (0, 20))
    assert more.equal
    for ranks, before, after in zip((1, 2), usual.traffic, more.traffic, strict=True):
        assert before["all_reduce"] == after["all_reduce"] == (1, 36, 1.0)
        (few, little, _), (many, much, _) = before["all_gather"], after["all_gather"]
        assert (many - few, much - little) == (20, 20 * 1000 * ranks)
        assert f"rank 0 of {ranks} issued {many} all_gather ({much:,} B), " in repr(more)
        assert "1 all_reduce (36 B, 1.0 × the gradients)" in repr(more)


def with_small_sums():
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 1))
    model(torch.ones(2, 8)).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for _ in range(20):  # such as losses for a log
        dist.all_reduce(torch.ones(2))
    return equivalence.observe(model)


def test_small_sums_are_no_exchange_of_gradients():
    comparison = equivalence.compare(with_small_sums)
    assert comparison.equal, comparison


def sharded():
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 2))
    model(torch.ones(2, 8)).mean().backward()
    return equivalence.observe(model)


def test_what_observe_gathers_is_not_the_jobs_traffic():
    comparison = equivalence.compare(sharded)
    assert {op: count for op, (count, *_) in comparison.traffic[1].items()} == {"all_gather": 1, "reduce_scatter": 1}
    assert comparison.traffic[1]["reduce_scatter"][2] == 1.0


def weighted(fault=""):
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    model = DDP(nn.Linear(8, 1))
    data = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    rows = list(range(ROWS)) if world == 1 else list(range(4)) if rank == 0 else list(range(4, ROWS))
    if fault == "tail" and rank == 1:
        rows = rows[:-1]
    with model.no_sync() if fault == "not synchronised" else contextlib.nullcontext():
        loss = model(data[rows]).square().mean()
        (loss * world * len(rows) / ROWS).backward()
    return equivalence.observe(model, loss=loss, tokens=len(rows), samples=rows)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("tail", ["samples are missed or repeated", "gradients differ", "the loss differs"]),
        ("not synchronised", ["gradients differ between ranks", "gradients differ"]),
    ],
)
def test_weights_are_not_blamed_for_another_fault(fault, named):
    assert [finding.fault for finding in equivalence.compare(weighted, fault).findings] == named


@pytest.mark.parametrize("healthy", [prepared_by_accelerate, with_dropout, weighted])
def test_healthy_jobs_raise_no_alarm(healthy):
    comparison = equivalence.compare(healthy)
    assert comparison.equal, comparison
    assert "do the same" in repr(comparison)


def test_what_the_job_must_return():
    with pytest.raises(TypeError, match=r"must end with return equivalence\.observe"):
        equivalence.compare(lambda: 3)
    with pytest.raises(ValueError, match="the smaller first"):
        equivalence.compare(weighted, ranks=(2, 2))


def test_a_compared_job_runs_under_its_own_name():
    def half_a_step():
        model = torch.nn.Linear(2, 1)
        loss = model(torch.ones(3, 2)).mean()
        loss.backward()
        return equivalence.observe(model, loss=loss, tokens=3)

    run = equivalence.compare(half_a_step).runs[1]
    assert run.name == "half_a_step"
    assert re.fullmatch(r"Observation\(loss -?[\d.]+, 2 gradients\)", repr(run.results[0]))


def test_samples_without_an_order_are_compared_too():
    def by_name(mistake=False):
        model, rank = torch.nn.Linear(2, 1), dist.get_rank()
        rows = ["a", 1, "b", None][rank :: dist.get_world_size()]
        if mistake:
            rows = rows[:1] * 2
        return equivalence.observe(model, tokens=len(rows), samples=rows)

    assert equivalence.compare(by_name).equal
    assert [f.fault for f in equivalence.compare(by_name, mistake=True).findings] != []


# ------------------------------------------------------------------------------------------------- what one rank took down

NAN, INFINITE = float("nan"), float("inf")


def seen(outputs=None, weight=0.5, gradient=1.0, loss=1.0, samples=()):
    model = nn.Linear(4, 3, bias=False)
    nn.init.constant_(model.weight, weight)
    model.weight.grad = torch.full_like(model.weight, gradient)
    return equivalence.observe(model, loss=loss, outputs=outputs, samples=samples)


def judged(one, other):
    """The comparison of a run on one rank and one on two alike."""
    return equivalence.judge(*(Run(count, "cpu", "gloo", results=[each] * count) for count, each in ((1, one), (2, other))))


def with_one(value):
    outputs = torch.arange(6.0).view(2, 3)
    outputs[1, 1] = value
    return outputs


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
@pytest.mark.parametrize("what", ["gradient", "weight", "loss"])
def test_a_value_that_is_no_number_is_found_on_either_side(what, value):
    for sides in ((seen(), seen(**{what: value})), (seen(**{what: value}), seen())):
        assert [finding.fault for finding in judged(*sides).findings] == ["a NaN arises"]


def test_a_mask_among_the_parameters_may_be_infinite():
    def masked():
        model = nn.Linear(2, 2)
        model.mask = nn.Parameter(torch.tensor([0.0, -INFINITE]), requires_grad=False)
        for parameter in (model.weight, model.bias):
            nn.init.ones_(parameter)
            parameter.grad = torch.ones_like(parameter)
        return equivalence.observe(model, loss=1.0)

    assert judged(masked(), masked()).equal


@pytest.mark.parametrize("name", ["", "layer"])
@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
def test_outputs_that_are_no_numbers_differ_from_those_that_are_and_masks_are_equal(name, value):
    right, wrong = (seen({name: with_one(each)}) for each in (4.0, value))
    for sides in ((right, wrong), (wrong, right)):
        assert [finding.fault for finding in judged(*sides).findings] == ["outputs differ"]
    assert judged(wrong, wrong).equal == (value == value)
    other = with_one(value)
    other[0, 2] = 9  # beside the mask
    assert not judged(wrong, seen({name: other})).equal


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (
            {"outputs": {"a": torch.ones(2)}},
            {"outputs": {"b": torch.ones(2)}},
            r"given \['a'\] in the run of 1, \['b'\] in that of 2",
        ),
        ({"outputs": torch.ones(2)}, {}, r"\[''\] in the run of 1, \[\] in"),
        ({}, {"outputs": torch.ones(2)}, r"\[\] in the run of 1, \[''\] in"),
        ({}, {"loss": None}, r"\['loss'\] in the run of 1, \[\] in"),
    ],
)
def test_what_only_one_run_has_is_not_called_equal(one, other, says):
    with pytest.raises(ValueError, match=says):
        judged(seen(**one), seen(**other))


def test_a_gradient_that_is_only_rounding_is_not_compared():
    def key_bias(gradient):
        model = nn.Linear(4, 3)
        model.load_state_dict({"weight": torch.ones(3, 4), "bias": torch.ones(3)})
        model.weight.grad, model.bias.grad = torch.ones(3, 4), torch.full((3,), gradient)
        return equivalence.observe(model)

    assert judged(key_bias(1e-9), key_bias(-1e-9)).equal
    assert [finding.fault for finding in judged(key_bias(0.1), key_bias(-0.1)).findings] == ["gradients differ"]


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, numpy.array, iter])
def test_samples_may_be_a_list_or_an_array(form):
    assert seen(samples=form([3, 1, 2])).epochs == ((3, 1, 2),)
    assert seen(samples=form([[3, 1], [1, 3]])).epochs == ((3, 1), (1, 3))


class Checkpointed(nn.Module):
    """A block that is computed again in backward, and a head."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def test_layers_that_a_checkpoint_computes_again_are_kept_once():
    model = Checkpointed()
    with equivalence.layers(model) as kept:
        model(torch.ones(5, 4)).mean().backward()
    assert {name: len(rows) for name, rows in kept.items()} == dict.fromkeys(["block.0", "block.1", "block", "head", ""], 5)


def test_dropout_is_off_in_attention_whose_arguments_have_no_names():
    query = torch.arange(8.0).view(1, 1, 4, 2)

    def job():
        outputs = nn.functional.scaled_dot_product_attention(query, query, query, None, 0.5, True)
        return equivalence.observe(nn.Linear(1, 1), outputs=outputs)

    comparison = equivalence.compare(job)
    assert comparison.equal
    wanted = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    torch.testing.assert_close(comparison.runs[1].results[1].outputs[""], wanted)
