"""Jobs with one fault each, as people meet them, and healthy ones that look alike. Run by `launch` in tests/test_diagnosis.py."""

import datetime
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

HANG = 1.0  # seconds until a job that hangs is ended


# --------------------------------------------------------------------------------------------------------------- starting ranks


def port_in_use():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True)


def no_process_group():
    dist.destroy_process_group()
    dist.all_reduce(torch.ones(1))


def one_rank_raises():
    if dist.get_rank() == 1:
        {"a": 1}["b"]
    dist.all_reduce(torch.ones(4))


def one_rank_raises_and_closes():
    try:
        one_rank_raises()
    finally:
        dist.destroy_process_group()


def closes_and_returns():
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    dist.all_reduce(torch.ones(4))


def killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crashes():
    import ctypes

    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def exits():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


# ---------------------------------------------------------------------------------------------------------------- data parallel


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def unused_parameter():
    model = DDP(Unused())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


class Checkpointed(nn.Module):
    def __init__(self, times, inputs_need_gradients=True):
        super().__init__()
        self.layer, self.times, self.need = nn.Linear(4, 4), times, inputs_need_gradients

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = x.clone().requires_grad_(self.need)
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def marked_ready_twice():
    model = DDP(Checkpointed(1), find_unused_parameters=True)
    model(torch.ones(2, 4)).sum().backward()


def no_gradient_path():
    model = DDP(Checkpointed(1, inputs_need_gradients=False))
    model(torch.ones(2, 4)).sum().backward()


def uneven_batches():
    model = DDP(nn.Linear(4, 1))
    for _ in range(2 + dist.get_rank()):
        model(torch.ones(2, 4)).sum().backward()


def uneven_batches_told():
    from torch.distributed.algorithms.join import Join

    model = DDP(nn.Linear(4, 1))
    with Join([model], throw_on_early_termination=True):
        uneven = 2 + dist.get_rank()
        for _ in range(uneven):
            model(torch.ones(2, 4)).sum().backward()


def models_differ():
    DDP(nn.Linear(4, 1 + dist.get_rank()))


def hook_order():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = DDP(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), bucket_cap_mb=0.3)
    model.register_comm_hook(power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), power.powerSGD_hook)
    for _ in range(200):
        time.sleep(0.001 * dist.get_rank())
        model(torch.randn(4, 256)).square().sum().backward()


# ------------------------------------------------------------------------------------------------------------------ collectives


def other_op():
    x = torch.ones(16)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)


def other_size():
    dist.all_reduce(torch.ones(16 if dist.get_rank() else 800))


def other_dtype():
    dist.all_reduce(torch.ones(16, dtype=torch.float64 if dist.get_rank() else torch.float32))


def mixed_up(fault):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch itself compares what ranks issue."""
    rank, x = dist.get_rank(), torch.ones(4)
    if fault == "op" and rank:
        dist.broadcast(x, 0)
    elif fault == "size" and rank:
        dist.all_reduce(torch.ones(8))
    elif fault == "dtype" and rank:
        dist.all_reduce(x.double())
    else:
        dist.all_reduce(x)


def other_group():
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 1, 2])]
    dist.all_reduce(torch.ones(4), group=groups[2] if dist.get_rank() != 1 else groups[1])


def conditional():
    x = torch.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        dist.all_reduce(x)


def early_return():
    x = torch.ones(4)
    if dist.get_rank() == 1:
        return
    dist.broadcast(x, 0)
    dist.all_reduce(x)


def only_slow():
    """Ranks meet all the time; the timeout is too short for the job."""
    while True:
        time.sleep(0.02)
        dist.all_reduce(torch.ones(4))


def works_alone():
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def works_alone_on_a_mesh():
    """Rank 0 waits for 1, which waits for 3; 2 waits for 3 as well."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if rank == 3:
        time.sleep(1000)
    if rank == 1:
        dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))
    dist.all_reduce(torch.ones(4), group=mesh.get_group("tp"))


def nobody_sends():
    if dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)


def own_timeout():
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 0:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1), group=group)


def monitored():
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))


def receive_cycle():
    x = torch.ones(4)
    other = 1 - dist.get_rank()
    dist.recv(x, other)
    dist.send(x, other)


def swapped():
    a, b = torch.full((8,), 1.0), torch.full((8,), 10.0)
    for _ in range(3):
        if dist.get_rank() == 0:
            dist.all_reduce(a)
            dist.all_reduce(b)
        else:
            dist.all_reduce(b)
            dist.all_reduce(a)
    return a[0].item()


def swapped_branches():
    first, here = dist.get_rank() == 0, torch.full((8,), 1.0)
    there = 10 * here
    dist.all_reduce(here) if first else dist.all_reduce(there)
    dist.all_reduce(there) if first else dist.all_reduce(here)
    return here[0].item()


def total(x):
    dist.all_reduce(x)


def swapped_calls():
    loss, tokens = torch.full((8,), 1.0), torch.full((8,), 10.0)
    if dist.get_rank() == 0:
        total(loss)
        total(tokens)
    else:
        total(tokens)
        total(loss)
    return loss[0].item()


# --------------------------------------------------------------------------------------------- groups, tensor parallel, loading


def group_lists_differ():
    group = dist.new_group([0, 1] if dist.get_rank() == 0 else [0, 1, 2])
    dist.all_reduce(torch.ones(4), group=group)


def group_on_one_rank():
    if dist.get_rank() == 0:
        dist.new_group([0, 1])
    dist.barrier()


def mesh_too_large():
    from torch.distributed.device_mesh import init_device_mesh

    init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def layout_does_not_fit():
    from helpers import grouping

    grouping.layout(dist.get_world_size(), tp=2, pp=3)


def mixed_tensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) @ torch.ones(4, 4)


def too_many_heads_ranks():
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from helpers import record

    split = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(record.ROOT / "data" / "tiny_ernie", distributed_config=split)
    model(torch.ones(1, 8, dtype=torch.long))


def meta_tensor():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.to("cpu")


def device_map_in_a_job():
    import accelerate

    model = nn.Linear(4, 4)
    model.hf_device_map = {"a": "cpu", "b": "cpu", "c": 0}
    accelerate.Accelerator(cpu=True).prepare(model)


def keys_missing():
    nn.Sequential(nn.Linear(2, 2)).load_state_dict({"module.0.weight": torch.ones(2, 2)})


def out_of_memory():
    torch.empty(1 << 50)


def unknown_error():
    raise ZeroDivisionError("something of the learner's own")


# ---------------------------------------------------------------------------------------------------------------- silent faults


def ties_lost():
    """On more than one rank the head is loaded by its own name, and is no longer the embedding."""
    from helpers import equivalence

    torch.manual_seed(0)
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight if dist.get_world_size() == 1 else nn.Parameter(embedding.weight.detach().clone())
    model = DDP(nn.Sequential(embedding, head))
    loss = model(torch.arange(4)).square().mean()
    loss.backward()
    return equivalence.observe(model, loss=loss)


def prints():
    print("said", dist.get_rank())


def threads():
    return torch.get_num_threads()


def peaks():
    """The peak of a forward pass, as one finds it after training, and with the count begun anew."""
    from helpers.measuring import memory

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.ones(256, 64)
    with memory.track(model, optimizer) as since_the_start:
        model(rows).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(rows)
    optimizer.zero_grad()
    del optimizer
    with memory.track(model) as anew, torch.no_grad():
        model(rows)
    return since_the_start.peak, anew.peak
