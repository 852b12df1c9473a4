"""Jobs whose ranks hold parts of one model (TP by hand or DTensor, PP, with DP): right ones are equal, each fault is named."""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helpers import equivalence, launch

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
    """A mesh of the sizes asked for; on one rank all are 1."""
    one = dist.get_world_size() == 1
    return init_device_mesh("cpu", tuple(1 if one else size for size in sizes.values()), mesh_dim_names=tuple(sizes))


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
        assert [finding.fault for finding in comparison.findings] == [faults[case]] * bool(faults[case]), f"{case}: {comparison}"


def test_faults_of_tensor_parallel_jobs():
    assert_named(FAULTS, judged(tensor_parallel, FAULTS, (1, 2)))
