"""Jobs whose ranks hold parts of one model (TP by hand or DTensor, PP, with DP): right ones are equal, each fault is named."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from helpers import equivalence, launch, pipeline

ROWS, WIDTH, HIDDEN, TOKENS = 8, 8, 12, 16
CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Copied(torch.autograd.Function):
    """Forward as it is; backward: the sum over the group."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """Forward: the sum over the group; backward as it is."""

    @staticmethod
    def forward(context, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class RowWise(nn.Linear):
    """A linear layer whose input is split over the group; its bias is added once, or, as a fault, by every rank."""

    group, fault = None, ""

    def forward(self, x):
        x = nn.functional.linear(x, self.weight, self.bias if self.fault == "bias each" else None)
        if self.group is not None:
            x = Summed.apply(x, self.group)
        return x if self.fault == "bias each" else x + self.bias


class Network(nn.Module):
    """norm, up, down with a residual, a nonlinearity and a head to TOKENS logits; split by hand where a mesh is given."""

    def __init__(self, mesh=None, fault=""):
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.norm, self.up, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Dropout(0.1 * ("dropout" in fault))
        self.down, self.head = (nn.Linear if mesh is None else RowWise)(HIDDEN, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.group = mesh and mesh.get_group("tp")
        if mesh is not None:
            self.down.group, self.down.fault = self.group, fault
            for name, dim in CUT.items():
                layer, kind = name.split(".")
                part = self.part(getattr(getattr(self, layer), kind), dim, mesh)
                setattr(getattr(self, layer), kind, nn.Parameter(part))

    def part(self, tensor, dim, mesh):
        place, count = mesh.get_local_rank("tp"), mesh.size(mesh.mesh_dim_names.index("tp"))
        if self.fault == "first slice":
            place = 0
        if self.fault == "backwards":
            place = count - 1 - place
        size = HIDDEN // count - (self.fault == "too short" and count > 1)
        return tensor.detach().narrow(dim, place * size, size + (self.fault == "too long" and place < count - 1)).clone()

    def forward(self, x):
        inside = self.norm(x)
        if self.group is not None and self.fault != "input not summed":
            inside = Copied.apply(inside, self.group)
        inside = self.down(torch.relu(self.up(inside)))
        return self.head(torch.tanh(self.drop(x + inside)))


def rows_of(place, count):
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    ids = list(range(ROWS))[place::count]
    return ids, data[ids]


def average(model, group, count):
    for parameter in model.parameters():
        gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        dist.all_reduce(gradient, group=group)
        gradient /= count


def axes(**sizes):
    """A mesh of the sizes asked for, as far as the ranks go."""
    room = iter(range(dist.get_world_size().bit_length() - 1))  # sizes are 1 or 2: the last axes are filled first
    fitted = {axis: 2 if size == 2 and next(room, None) is not None else 1 for axis, size in reversed(sizes.items())}
    return init_device_mesh("cpu", tuple(fitted[axis] for axis in sizes), mesh_dim_names=tuple(sizes))


def tensor_parallel(fault="", dp=1, tp=2, by_hand=True):
    rank, world, mesh = dist.get_rank(), dist.get_world_size(), axes(dp=dp, tp=tp)
    model = Network(mesh if by_hand else None, fault)
    if not by_hand:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if fault == "first slice" and mesh["tp"].get_local_rank() == 1:  # as when each rank loads the part of rank 0
            whole = Network().up.weight.detach()
            model.up.weight.to_local().detach().copy_(whole[: HIDDEN // 2])
    mixed = fault == "samples by rank"
    copies = mesh["dp"].size()
    ids, data = rows_of(rank, world) if mixed else rows_of(mesh.get_local_rank("dp"), copies)
    with equivalence.layers(model) as outputs:
        loss = nn.functional.cross_entropy(model(data), torch.tensor(ids) % TOKENS)
    loss.backward()
    average(model, mesh.get_group("dp"), copies)
    if fault == "head summed again":
        dist.all_reduce(model.head.weight.grad, group=mesh.get_group("tp"))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    if "dropout" in fault or fault == "seed by rank":
        torch.manual_seed(rank if fault in ("dropout by rank", "seed by rank") else mesh.get_local_rank("dp"))
    random = {}
    if "masks" in fault:
        random["own"] = torch.Generator().manual_seed(5 + rank * (fault != "same masks"))
        random["same"] = torch.rand(4, generator=torch.Generator().manual_seed(rank * (fault == "apart masks")))
    sampler = torch.Generator().manual_seed(rank * (fault == "samplers apart"))
    with torch.no_grad():
        sampled = torch.multinomial(model(rows_of(0, 1)[1]).softmax(-1), 1, generator=sampler)
    if not by_hand:
        outputs = {name: tensor for name, tensor in outputs.items() if name != "up"}
    shards = CUT | {"up": -1} if by_hand else None
    return equivalence.observe(
        model, loss=loss, samples=ids, outputs=outputs, mesh=mesh, shards=shards, random=random, sampled=sampled
    )


FAULTS = {
    "": "",
    "bias each": "a bias is added on every rank",
    "input not summed": "gradients of replicated parameters are not summed",
    "head summed again": "gradients are off by the factor W = 2",
    "first slice": "shards overlap",
    "backwards": "shards are in another order",
    "too short": "shards are missing",
    "too long": "shards overlap",
    "samples by rank": "ranks of one model see different samples",
    "dropout by rank": "dropout masks differ where they must be the same",
    "apart masks": "dropout masks differ where they must be the same",
    "same masks": "dropout masks are the same where they must differ",
    "samplers apart": "sampled tokens differ between ranks",
    "own masks": "",
    "dropout by dp": "",
    "seed by rank": "",
}


def all_of(job, cases):
    """Job: one observation for each case."""
    nn.functional.dropout = lambda input, *_, **__: input
    return {case: job(case) for case in cases}


def judged(job, cases, ranks):
    """What is found in each case; all cases in one run on one rank and one on several."""
    few, many = (launch(all_of, job, tuple(cases), ranks=count, timeout=120) for count in ranks)
    for case in cases:
        one, several = (
            dataclasses.replace(run, results=[each[case] for each in run.results], collectives=()) for run in (few, many)
        )
        yield case, equivalence.judge(one, several)


def assert_named(faults, found):
    for case, comparison in found:
        print(case, comparison)
        assert "; ".join(finding.fault for finding in comparison.findings) == faults[case], f"{case}: {comparison}"


def test_faults_of_tensor_parallel_jobs():
    assert_named(FAULTS, judged(tensor_parallel, FAULTS, (1, 2)))


def dtensors(fault):
    return tensor_parallel(fault, by_hand=False)


def test_tensor_parallel_by_dtensor():
    assert_named({"": "", "first slice": "shards overlap"}, judged(dtensors, ("", "first slice"), (1, 2)))


HYBRID = {
    "": "",
    "dtensors": "",
    "bias each": "a bias is added on every rank",
    "input not summed": "gradients of replicated parameters are not summed",
    "own masks": "",
    "dropout by dp": "",
    "dropout by rank": "dropout masks differ where they must be the same",
    "dp not averaged": "gradients differ between ranks; gradients differ",
}


def hybrid(fault):
    if fault == "dp not averaged":
        with mock.patch(f"{__name__}.average"):
            return tensor_parallel(dp=2)
    return tensor_parallel(fault.replace("dtensors", ""), dp=2, by_hand=fault != "dtensors")


def test_data_and_tensor_parallel():
    assert_named(HYBRID, judged(hybrid, HYBRID, (1, 4)))


def pipeline_parallel(fault, dp=1):
    import transformers  # not at the top: ranks of other jobs need not load it

    mesh, pp = axes(dp=dp, pp=2), 2
    shape = transformers.Ernie4_5Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model, parts = transformers.AutoModelForCausalLM.from_config(shape), (range(2), range(2, 4))
    ids = list(range(ROWS))[mesh.get_local_rank("dp") :: mesh["dp"].size()]
    tokens = torch.randint(3, 64, (ROWS, 7), generator=torch.Generator().manual_seed(1))[ids]

    def loss_of(logits, targets):
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    if dist.get_world_size() == 1:
        with equivalence.layers(model, "*layers.?") as outputs:
            loss = loss_of(model(tokens[:, :-1]).logits, tokens[:, 1:])
            loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return equivalence.observe(model, loss=loss, samples=ids, outputs=outputs, mesh=mesh)
    index = mesh.get_local_rank("pp")
    module = pipeline.Stage(model, parts, index)
    if fault == "layer lost" and index == 1:
        module.body.layers = module.body.layers[:-1]
    stage = PipelineStage(module, index, pp, torch.device("cpu"), group=mesh.get_group("pp"))
    losses = []
    with equivalence.layers(module, "*layers.?") as outputs:
        ends = {"target": tokens[:, 1:], "losses": losses} if index == 1 else {}
        ScheduleGPipe(stage, 2, loss_of).step(*[tokens[:, :-1]] * (index == 0), **ends)
    average(module, mesh.get_group("dp"), dp)
    if fault != "ends apart":
        matrix = (module.embedding or module.head).weight
        dist.all_reduce(matrix.grad, group=mesh.get_group("pp"))
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    names = {} if fault == "names of the stage" else equivalence.stage_names(parts, index)
    loss = torch.stack(losses).mean() if losses else None
    samples = ids if index == 0 else None
    return equivalence.observe(module, loss=loss, samples=samples, outputs=outputs, mesh=mesh, rename=names)


STAGES = {
    "": "",
    "ends apart": "gradients of tied parameters are not summed",
    "layer lost": "parameters are missing",
    "names of the stage": "parameters are missing",
}


def test_pipelines():
    assert_named(STAGES, judged(pipeline_parallel, STAGES, (1, 2)))


def two_pipelines(fault):
    return pipeline_parallel(fault, dp=2)


def test_data_and_pipeline_parallel():
    cases = ("", "ends apart")
    assert_named(STAGES, judged(two_pipelines, cases, (1, 4)))


def test_compare_takes_the_whole_way():
    assert equivalence.compare(tensor_parallel, "dropout by dp", dp=2, ranks=(2, 4)).equal


STEPS, MICRO_BATCHES = 6, 2


def scheduled(fault):
    """STEPS optimiser steps of data parallel training; notes the learning rate of each."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = Network()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1 * (world if fault == "scaled" else 1))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, total_iters=40)
    rates = []
    ids, data = rows_of(rank, world)
    for _ in range(STEPS):
        optimiser.zero_grad()
        for part, labels in zip(data.chunk(MICRO_BATCHES), torch.tensor(ids).chunk(MICRO_BATCHES), strict=True):
            (nn.functional.cross_entropy(model(part), labels % TOKENS) / MICRO_BATCHES).backward()
            if fault.startswith("per micro-batch"):
                scheduler.step()
        average(model, None, world)
        rates.append(scheduler.get_last_lr()[0])
        optimiser.step()
        for _ in range(world if fault == "per rank" else 0 if fault in ("never", "per micro-batch") else 1):
            scheduler.step()
    planned = [0.1 * (1 - 0.99 * step / 40) for step in range(STEPS)]
    return equivalence.observe(model, rates=rates, planned=planned if fault in PLANNED else None)


RATES = {
    "": "",
    "per rank": "the learning-rate schedule is stepped 2 times too often",
    "scaled": "the learning rate is multiplied by 2",
    "planned": "",
    "per micro-batch": "the learning-rate schedule is stepped 2 times too often",
    "never": "the learning-rate schedule differs",
}
PLANNED = ("planned", "per micro-batch", "never")  # the same mistake on any number of ranks: told by the plan


def test_schedules():
    assert_named(RATES, judged(scheduled, RATES, (1, 2)))


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


class Logarithm(nn.Module):
    """A layer inside and code of its own behind it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, flag):
        x = self.inner(x).abs() + 1
        return (x - (1e9 if flag else 0)).log()


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.root, self.inside, self.last = nn.Linear(WIDTH, WIDTH), Root(), Logarithm(), nn.Linear(WIDTH, 1)

    def forward(self, x, fault=""):
        x = self.first(x)
        x = {"negative": -x.abs() - 1, "zero": x * 0}.get(fault, x.abs() + 1)
        return self.last(self.inside(self.root(x), fault == "code"))


ORIGINS = {
    "": None,
    "negative": (1, 2, "forward", "root", "output"),
    "code": (1, 2, "forward", "inside", "output"),
    "zero": (1, 2, "backward", "root", "gradient of the input"),
    "data": (1, 2, "forward", "", "inputs"),
}


def diverging(fault):
    """Four batches; something is wrong with batch 2 on rank 1, and data parallel training spreads it to all."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = DistributedDataParallel(Layered())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    with equivalence.first_nan(model) as watch:
        for batch in range(4):
            optimiser.zero_grad()
            here = fault if (batch, rank) == (2, 1) else ""
            _, data = rows_of(rank, world)
            model(data * (float("nan") if here == "data" else 1), here).square().mean().backward()
            optimiser.step()
    return equivalence.observe(model, nan=watch)


def test_the_origin_of_the_first_nan():
    few, many = (launch(all_of, diverging, tuple(ORIGINS), ranks=count) for count in (1, 2))
    for fault, expected in ORIGINS.items():
        seen = [each[fault] for each in many.results]
        first = equivalence.origin(seen)
        assert (first and (first.rank, first.batch, first.phase, first.layer, first.what)) == expected, fault
        if first is not None:
            other = seen[0].origin  # rank 0 has it from the sum of gradients, a batch later
            assert (other.batch, other.what, other.arrived) == (3, "parameters", True)
            assert "rank 1, batch 2" in str(first)
        runs = (dataclasses.replace(run, results=[each[fault] for each in run.results]) for run in (few, many))
        named = [finding.fault for finding in equivalence.judge(*runs).findings]
        assert named == ["a NaN arises"] * (expected is not None)


def test_what_observe_refuses():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="needs to know which part"):
        equivalence.observe(model, shards={"weight": 0})
    with pytest.raises(ValueError, match=r"no parameter or output matches '\*\.up'"):
        equivalence.observe(model, shards={"*.up": 0}, mesh={"tp": 0})
    with pytest.raises(ValueError, match='knows "same" and "own"'):
        equivalence.observe(model, random={"alike": [1.0]})
    with pytest.raises(ValueError, match="has already"):
        equivalence.observe(model, rename={"weight.": "one.", "bias.": "one."})
