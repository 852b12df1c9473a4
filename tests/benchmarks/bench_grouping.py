"""What a placement on two hosts costs: bytes on their link and times of a step, predicted and measured."""

from __future__ import annotations

import statistics
import time
from typing import Any

from .framework import Findings, Row, at_least, at_most, benchmark

HIDDEN, NARROW, BLOCKS, ROWS = 512, 128, 2, 2048  # the job of notebook 06: much to exchange in TP, little to compute
ORDERS = {"TP inside hosts": ("dp", "tp"), "TP across hosts": ("tp", "dp")}
RATE = 25e6  # bytes a second of 200 Mbit/s
PAYLOAD = 64 << 20  # bytes


def _layout(order: tuple[str, ...], tp: int = 2) -> Any:
    from helpers import grouping

    return grouping.layout(4, tp=tp, ranks_per_node=2, order=("pp", *order))


@benchmark
def placement(repeats: int) -> Findings:
    """Seconds of a TP-heavy step on a link of 200 Mbit/s: TP inside hosts and across, and what one host's time predicts."""
    from helpers import launch
    from helpers.two_nodes import two_nodes

    alone: dict[str, list[float]] = {name: [] for name in ORDERS}
    linked: dict[str, list[float]] = {name: [] for name in ORDERS}
    with two_nodes(rate="200mbit") as nodes:
        for _ in range(repeats):
            for found, where in ((alone, None), (linked, nodes)):
                times = launch(steps, ranks=4, backend="gloo", nodes=where, record=False, timeout=300).results[0]
                for name, seconds in times.items():
                    found[name].append(seconds)
    activations, gradients = 4 * ROWS // 2 * HIDDEN, 4 * BLOCKS * HIDDEN * NARROW
    predicted = {}
    for name, order in ORDERS.items():
        layout = _layout(order)
        left = 2 * BLOCKS * layout.leaving("tp", "all_reduce", activations) + layout.leaving("dp", "all_reduce", gradients)
        predicted[name] = statistics.median(alone[name]) + left / RATE
    rows = [
        Row(f"{name}, {where}", tuple(found[name])) for where, found in (("one host", alone), ("two", linked)) for name in ORDERS
    ]
    ratios = [across / inside for inside, across in zip(*linked.values(), strict=True)]
    ratio, said = statistics.median(ratios), predicted["TP across hosts"] / predicted["TP inside hosts"]
    return Findings(
        [*rows, Row("across / inside, by round", tuple(ratios), "×"), Row("the same, predicted", (said,), "×")],
        [
            at_least("the right placement against the wrong one", ratio, 3, "×"),
            at_most("error of the predicted ratio", 100 * abs(said / ratio - 1), 30, "%"),
        ],
        f"TP across hosts takes {ratio:.1f} times as long as TP inside; predicted {said:.1f}",
    )


def steps(count: int = 6) -> dict[str, float]:
    """On each rank: the median seconds of a training step, by placement."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found = {}
    for name, order in ORDERS.items():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=order)
        pairs = [(nn.Linear(HIDDEN, NARROW, bias=False), nn.Linear(NARROW, HIDDEN, bias=False)) for _ in range(BLOCKS)]
        model = nn.Sequential(*(nn.Sequential(first, nn.ReLU(), second) for first, second in pairs))
        for block in model:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x, seconds = torch.randn(ROWS // 2, HIDDEN, requires_grad=True), []
        for _ in range(count + 1):
            dist.barrier()
            start = time.perf_counter()
            model(x).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("dp"))
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        found[name] = statistics.median(seconds[1:])
    return found


@benchmark
def traffic(repeats: int) -> Findings:
    """Bytes that the link's interfaces count for payloads of 64 MiB, against the prediction."""
    from helpers import launch
    from helpers.two_nodes import two_nodes

    cases = {
        "all_reduce in pairs across": (2, ("tp", "dp"), "tp", "all_reduce"),
        "all_reduce of all": (1, ("dp", "tp"), "dp", "all_reduce"),
    }
    cases["all_gather of all"] = (1, ("dp", "tp"), "dp", "all_gather")
    rows, worst = [], 0.0
    with two_nodes(rate="1gbit") as nodes:
        for name, (tp, order, axis, op) in cases.items():
            layout, errors = _layout(order, tp), []
            for _ in range(repeats):
                before = nodes.bytes_between()
                launch(exchange, layout.groups(axis), op, ranks=4, nodes=nodes, record=False, timeout=300)
                counted = max(now - then for now, then in zip(nodes.bytes_between(), before, strict=True))
                errors.append(100 * abs(layout.leaving(axis, op, PAYLOAD) / counted - 1))
            rows.append(Row(name, tuple(errors), "%"))
            worst = max([worst, *errors])
    return Findings(
        rows,
        [at_most("error of the predicted bytes between hosts", worst, 8, "%")],
        f"The bytes between hosts are predicted within {worst:.1f} %",
        ["counted by the interfaces, start and end of the job included"],
    )


def exchange(groups: tuple[tuple[int, ...], ...], op: str) -> None:
    """On each rank: one collective of 64 MiB in its group."""
    import torch
    import torch.distributed as dist

    made = [dist.new_group(list(group)) for group in groups]
    mine = next(handle for handle, group in zip(made, groups, strict=True) if dist.get_rank() in group)
    whole = torch.ones(PAYLOAD // 4)
    if op == "all_reduce":
        dist.all_reduce(whole, group=mine)
    else:
        dist.all_gather_single(whole, torch.ones(PAYLOAD // 4 // dist.get_world_size(mine)), group=mine)
