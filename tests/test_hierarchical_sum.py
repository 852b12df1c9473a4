"""A sum over two hosts, flat and in three steps: the same sum, and on the link the bytes that the formulas say."""

import sys

import cloudpickle
import pytest

from helpers import launch
from helpers.grouping import layout
from helpers.predict import traffic
from helpers.two_nodes import available, two_nodes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as with the functions of a cell
SIZE = 4 << 20  # bytes


def both_ways(size, local):
    import torch
    import torch.distributed as dist

    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    inside = [dist.new_group(range(first, first + local)) for first in range(0, world, local)][rank // local]
    across = [dist.new_group(range(place, world, local)) for place in range(local)][rank % local]

    def sent():
        with open("/proc/net/dev") as file:
            return sum(int(line.split()[9]) for line in file if line.strip().startswith("link"))

    def hierarchical(tensor):
        part = torch.empty(len(tensor) // local)
        dist.reduce_scatter_single(part, tensor, group=inside)
        dist.all_reduce(part, group=across)
        dist.all_gather_single(tensor, part, group=inside)

    for name, way in (("flat", dist.all_reduce), ("hierarchical", hierarchical)):
        way(torch.ones(local))
        tensor = torch.full((size // 4,), rank + 1.0)
        dist.barrier()
        before = sent()
        way(tensor)
        dist.barrier()
        found[name] = sent() - before, tensor.unique().tolist()
    return found


@pytest.mark.skipif(not available()[0], reason=f"needs two hosts: {available()[1]}")
@pytest.mark.parametrize("local", [2, 3])
def test_bytes_that_leave_a_host_are_as_predicted(local):
    with two_nodes() as nodes:
        run = launch(both_ways, SIZE // local * local, local, ranks=2 * local, nodes=nodes, record=False, timeout=120)
    total = [2 * local * (2 * local + 1) / 2]
    flat = layout(2 * local, ranks_per_node=local).leaving("dp", "all_reduce", SIZE)
    predicted = {"flat": flat, "hierarchical": local * traffic("all_reduce", SIZE // local, 2).sent}
    for rank in (0, local):  # one of each host
        for way, (sent, values) in run.results[rank].items():
            assert values == total
            assert abs(sent / predicted[way] - 1) < 0.08, way
