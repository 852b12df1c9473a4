"""Jobs with nothing wrong that look like jobs with a fault: branches, roles, groups, callbacks. Each needs 2 or 4 ranks."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def training(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def sums():
    x, y = torch.ones(4), torch.ones(4)
    for _ in range(3):
        dist.all_reduce(x)
        dist.all_reduce(y)


def branches_to_one_broadcast():
    if dist.get_rank() == 0:
        weights = torch.ones(4)
        dist.broadcast(weights, 0)
    else:
        empty = torch.empty(4)
        dist.broadcast(empty, 0)


def roles_in_turn():
    mine, others = torch.ones(4), torch.empty(4)
    for owner in range(dist.get_world_size()):
        if owner == dist.get_rank():
            dist.broadcast(mine, owner)
        else:
            dist.broadcast(others, owner)


def branches_to_one_sum():
    if dist.get_rank() == 0:
        total = torch.ones(4)
        dist.all_reduce(total)
    else:
        share = torch.full((4,), 2.0)
        dist.all_reduce(share)


def sums_in_turn():
    mine, nothing = torch.ones(4), torch.zeros(4)
    for owner in range(dist.get_world_size()):
        if owner == dist.get_rank():
            dist.all_reduce(mine)
        else:
            dist.all_reduce(nothing)


def ring():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(4), torch.empty(4)
    for _ in range(3):
        work = dist.isend(x, (rank + 1) % ranks)
        dist.recv(y, (rank - 1) % ranks)
        work.wait()


def chain():
    x, rank = torch.ones(4), dist.get_rank()
    if rank:
        dist.recv(x, rank - 1)
    if rank + 1 < dist.get_world_size():
        dist.send(x, rank + 1)


def exchange():
    x, y, other = torch.ones(4), torch.empty(4), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]):
        work.wait()


def ddp():
    training(DDP(network()))


def ddp_accumulating():
    model = DDP(network())
    for number in range(4):
        with model.no_sync() if number < 3 else contextlib.nullcontext():
            model(torch.ones(2, 8)).sum().backward()


def ddp_join():
    from torch.distributed.algorithms.join import Join

    model = DDP(network())
    with Join([model]):
        for _ in range(2 + dist.get_rank()):
            model(torch.ones(2, 8)).sum().backward()


def ddp_compressed():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(network())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    training(model)


def ddp_power_one_bucket():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = DDP(nn.Linear(64, 64), bucket_cap_mb=100)
    model.register_comm_hook(power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), power.powerSGD_hook)
    for _ in range(5):
        model(torch.ones(2, 64)).sum().backward()


def ddp_unused_allowed():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x, part):
            return self.parts[part](x)

    model = DDP(Sometimes(), find_unused_parameters=True)
    for part in (0, 1, 0):
        model(torch.ones(2, 8), part).sum().backward()


def ddp_checkpointed():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return checkpoint(self.inner, checkpoint(self.inner, x, use_reentrant=False), use_reentrant=False)

    training(DDP(Checkpointed()))


def fsdp():
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    training(model)


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    training(parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(nn.Linear(8, 8), rank, ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(torch.ones(8, 8))
    elif rank == ranks - 1:
        schedule.step(target=torch.ones(8, 8))
    else:
        schedule.step()


def groups():
    rank = dist.get_rank()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    x = torch.ones(4)
    dist.all_reduce(x, group=pairs[rank // 2])
    if rank < 2:
        for _ in range(3):
            dist.all_reduce(x, group=pairs[0])
    dist.all_reduce(x)


def hybrid():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(network(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    training(fully_shard(model, mesh=mesh["dp"]))


def leaders():
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, 2 * half)))]
    both = dist.new_group([0, half])
    x = torch.ones(4)
    dist.reduce(x, dst=rank // half * half, group=groups[rank // half])
    if rank % half == 0:
        dist.all_reduce(x, group=both)
    dist.broadcast(x, src=rank // half * half, group=groups[rank // half])


def gathered():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4)
    dist.gather(x, [torch.empty(4) for _ in range(ranks)] if rank == 0 else None, dst=0)
    dist.scatter(x, [torch.ones(4)] * ranks if rank == 0 else None, src=0)


def uneven_exchange():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    taken = [1 + other for other in range(ranks)]
    dist.all_to_all_single(torch.empty(sum(taken)), torch.ones(ranks * (1 + rank)), taken, [1 + rank] * ranks)


def objects():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.all_gather_object([None] * ranks, "x" * (1 + 100 * rank))
    dist.broadcast_object_list([{"a": 1}] if rank == 0 else [None], src=0)
    dist.gather_object(rank, [None] * ranks if rank == 0 else None)


def waited_for_in_another_order():
    x, y = torch.ones(4), torch.ones(4)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    for work in works if dist.get_rank() else works[::-1]:
        work.wait()


def one_rank_does_more():
    dist.barrier()
    if dist.get_rank() == 0:
        print("saved at step 3: error 0.1, loss 2.3")
        sum(range(100_000))
    dist.monitored_barrier()


def shards_by_hand():
    ranks = dist.get_world_size()
    x, part = torch.ones(4 * ranks), torch.empty(4)
    dist.reduce_scatter_tensor(part, x)
    dist.all_gather_into_tensor(x, part)


def accelerated():
    import accelerate
    from torch.utils.data import DataLoader

    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(8, 8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), DataLoader(torch.ones(10, 8), 2))
    for rows in loader:
        accelerator.backward(model(rows).sum())
        optimizer.step()
        accelerator.gather_for_metrics(rows)


def caught_by_the_learner():
    with contextlib.suppress(RuntimeError):
        torch.ones(4).view(3, 3)
    print("Traceback (most recent call last): only printed")
    dist.barrier()


OF_TWO = (sums, branches_to_one_broadcast, roles_in_turn, branches_to_one_sum, ring, chain, exchange, ddp, ddp_accumulating)
OF_TWO += (ddp_join, ddp_compressed, ddp_power_one_bucket, ddp_unused_allowed, ddp_checkpointed, fsdp, tensor_parallel, pipeline)
OF_TWO += (gathered, uneven_exchange, objects, waited_for_in_another_order, one_rank_does_more, shards_by_hand, accelerated)
OF_TWO += (caught_by_the_learner,)
OF_FOUR = (roles_in_turn, sums_in_turn, ring, pipeline, groups, hybrid, leaders, objects)
