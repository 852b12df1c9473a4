"""Notebook 06: answers, hints, checks, and wrong answers with the message each gets."""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from helpers import launch, predict
from helpers.exercises import Exercise, Wrong, as_number

PARTNERS = {0: 5, 1: 4, 2: 7, 3: 6}
BRIDGED = {frozenset(pair) for pair in PARTNERS.items()}
SIZE = 720  # numbers in the checks' tensors: every group size used here divides it


def check_placement(answer):
    listed = hasattr(answer, "__iter__") and not isinstance(answer, (dict, set))
    given = [as_number(each) for each in answer] if listed else [None]
    if None in given or sorted(given) != list(range(8)):
        raise Wrong(f"The answer is a list of the eight GPU numbers 0 to 7, each once; yours is {answer!r}.")
    groups = [given[first : first + 2] for first in range(0, 8, 2)]
    wrong = [group for group in groups if frozenset(group) not in BRIDGED]
    if wrong and all(frozenset((given[rank], given[rank + 4])) in BRIDGED for rank in range(4)):
        raise Wrong(
            'You joined the ranks r and r + 4. In a mesh ("dp", "tp") the last axis has consecutive ranks: the TP groups are the '
            "ranks 0 and 1, 2 and 3, 4 and 5, 6 and 7."
        )
    if wrong:
        rank = groups.index(wrong[0]) * 2
        raise Wrong(
            f"Ranks {rank} and {rank + 1} are a TP group, and you put them on GPUs {wrong[0][0]} and {wrong[0][1]}, which have "
            f"no NVLink between them: each layer's sums would go over PCIe or between sockets."
        )
    return "Every TP group is on one NVLink bridge; the DP groups, which talk once a step, get the slower links."


def average_gradients(mesh, gradients):
    group = mesh.get_group("dp")  # the ranks that hold the same part of the model
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)


def check_average(answer):
    order, sizes = ("tp", "dp"), (2, 3)  # not the order and the sizes that the notebook shows

    def job():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=order)
        gradients = [
            torch.full((SIZE,), float(10 * mesh["tp"].get_local_rank() + 3 ** mesh["dp"].get_local_rank())) for _ in range(2)
        ]
        answer(mesh, list(gradients))
        ends = [end.item() for gradient in gradients for end in (gradient.min(), gradient.max())]
        return ends, mesh["tp"].get_local_rank()

    run = launch(job, ranks=6, backend="gloo", timeout=20)
    replicas = {(0, 1, 2), (3, 4, 5)}
    used = {c.group for c in run.collectives if c.bytes >= 4 * SIZE}
    values, tp = [found[0] for found in run.results], [found[1] for found in run.results]
    right = [10 * part + (1 + 3 + 9) / 3 for part in tp]

    def close(factor):
        return all(abs(value - factor * aim) < 1e-3 for row, aim in zip(values, right, strict=True) for value in row)

    if not used:
        raise Wrong("Nothing was exchanged: the replicas still have the gradients of their own samples only.")
    if used - replicas:
        other = sorted(used - replicas)[0]
        over = "all ranks" if len(other) == 6 else f"the ranks {list(other)}"
        raise Wrong(
            f"You exchanged over {over}. These hold different parts of the model: adding their gradients gives numbers that "
            f'belong to no weight, and no library notices. Use the group of the axis "dp".'
        )
    if close(3):
        raise Wrong("Your gradients are 3 times too large: the sum over 3 replicas. Divide by their number.")
    if close(0.5):
        raise Wrong(
            "Half of the right gradient: you divided by the world size. Only the replicas count, dist.get_world_size(group)."
        )
    if not close(1):
        rank, own = next((rank, own) for rank, row in enumerate(values) for own in row if not abs(own - right[rank]) < 1e-3)
        raise Wrong(
            f"The replicas hold 1, 3 and 9 more than 10 × their part, so the mean on rank {rank} is {right[rank]:.3g}; it has "
            f"{own:.3g} in a gradient. All of each tensor has to change, in place: a new one in the list reaches no weight."
        )
    sent = sum(c.bytes for c in run.collectives if c.rank == 0)
    return f"Right mean over the replicas, {sent:,} B handed over in DP groups only."


def average_over_everything(mesh, gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def average_over_tp(mesh, gradients):
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.get_group("tp"))
        gradient /= mesh["tp"].size()


def new_tensors(mesh, gradients):
    for place, gradient in enumerate(gradients):
        total = gradient.clone()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        gradients[place] = total / mesh["dp"].size()


def only_summed(mesh, gradients):
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.get_group("dp"))


def divided_by_world(mesh, gradients):
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.get_group("dp"))
        gradient /= dist.get_world_size()


def divided_only(mesh, gradients):
    for gradient in gradients:
        gradient /= mesh["dp"].size()


def sum_over_all(mesh, tensor):
    part = tensor.new_empty(len(tensor) // mesh["local"].size())
    dist.reduce_scatter_single(part, tensor, group=mesh.get_group("local"))  # my part, summed over my host
    dist.all_reduce(part, group=mesh.get_group("host"))  # and over all hosts
    dist.all_gather_single(tensor, part, group=mesh.get_group("local"))


def check_sum(answer):
    def job():
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("host", "local"))
        tensor = torch.arange(float(SIZE)) + 1000 * dist.get_rank()
        answer(mesh, tensor)
        return tensor

    run = launch(job, ranks=6, backend="gloo", timeout=20)
    right = 6 * torch.arange(float(SIZE)) + 1000 * 15
    for rank, found in enumerate(run.results):
        if found.shape != right.shape or found.dtype != right.dtype:
            raise Wrong(f"Rank {rank} has {found.dtype} of {tuple(found.shape)}: change the numbers in tensor, not its kind.")
        if places := int((~torch.isclose(found, right)).sum()):
            raise Wrong(
                f"Rank {rank} has the right sum at {SIZE - places} of {SIZE} places. Three steps: reduce-scatter inside the host "
                f"gives each local rank a part, all-reduce sums that part over hosts, all-gather inside the host puts the parts "
                f"together."
            )
    crossing = [c for c in run.collectives if c.rank == 0 and c.bytes >= 64 and len({rank // 3 for rank in c.group}) > 1]
    over = sum(predict.traffic(c.op, c.bytes, len(c.group), backend="nccl").sent for c in crossing)
    if over > 4 * SIZE // 3:
        raise Wrong(
            f"The sum is right, but rank 0 sends {over:,} B in collectives that cross hosts; {4 * SIZE // 3:,} B are enough: "
            f"a third of the tensor, because the three ranks of a host can share the work. Reduce-scatter inside the host first."
        )
    return f"Right sum, and {over:,} B a rank across hosts instead of {4 * SIZE:,} B."


def plain_all_reduce(mesh, tensor):
    dist.all_reduce(tensor)


def one_axis_after_the_other(mesh, tensor):
    dist.all_reduce(tensor, group=mesh.get_group("local"))
    dist.all_reduce(tensor, group=mesh.get_group("host"))


def inside_only(mesh, tensor):
    dist.all_reduce(tensor, group=mesh.get_group("local"))


def not_gathered(mesh, tensor):
    part = tensor.new_empty(len(tensor) // mesh["local"].size())
    dist.reduce_scatter_single(part, tensor, group=mesh.get_group("local"))
    dist.all_reduce(part, group=mesh.get_group("host"))
    place = mesh["local"].get_local_rank()
    tensor[place * len(part) : (place + 1) * len(part)] = part


def check_leaving(answer):
    given, answer = answer, as_number(answer)
    if answer is None:
        raise Wrong(f"The answer is a number of bytes; yours is {given!r}.")
    right = 8 * 2 * 7 / 8 * (8e9 / 8 * 2)
    for factor, message in {
        right / 8: "That is what one rank sends. A host has 8 ranks, each in a ring of its own.",
        16e9: "That is the size of the gradients. Around a ring of n each rank sends 2(n − 1)/n of what it holds.",
        8 * right: "TP has cut the model: a rank holds an eighth of the gradients, not all of them.",
        right / 2: "Half of it: BF16 has 2 bytes, and a ring sums in n − 1 steps and shares the result in n − 1 more.",
        2 * right: "BF16 has 2 bytes, not 4.",
    }.items():
        if abs(answer / factor - 1) < 1e-3:
            raise Wrong(message)
    if abs(answer / right - 1) > 0.01:
        raise Wrong(
            f"{answer:,.0f} B is not it: a rank holds 8e9 / 8 gradients of 2 bytes, its ring has 8 ranks, a host 8 rings."
        )
    return f"{right:,.0f} B: 28 GB leave each host in every step, whatever the batch."


EXERCISES = [
    Exercise(
        "06.1",
        "place 8 ranks on a machine with NVLink bridges",
        answer=[0, 5, 1, 4, 2, 7, 3, 6],
        hints=[
            "TP talks in every layer: its two ranks belong on one bridge. Which ranks are a TP group?",
            'In the mesh ("dp", "tp") of 4 × 2 the TP groups are the ranks 0 and 1, 2 and 3, and so on.',
        ],
        check=check_placement,
        wrong=[
            ([0, 1, 2, 3, 4, 5, 6, 7], "no NVLink between them"),
            ([0, 1, 2, 3, 5, 4, 7, 6], "the last axis has consecutive ranks"),
            ([0, 5, 1, 4], "each once"),
            (["0", "5", "1", "4", "2", "7", "3", "6"], "each once"),
        ],
    ),
    Exercise(
        "06.2",
        "average gradients over the replicas of a split model",
        answer=average_gradients,
        hints=[
            "Which ranks hold the same part of the model? Those that differ in one axis only.",
            'mesh.get_group("dp") is that group; all_reduce adds up, so divide by the number of its ranks.',
        ],
        check=check_average,
        wrong=[
            (average_over_everything, "exchanged over all ranks"),
            (average_over_tp, "no library notices"),
            (only_summed, "3 times too large"),
            (divided_by_world, "you divided by the world size"),
            (divided_only, "Nothing was exchanged"),
            (new_tensors, "in place"),
        ],
    ),
    Exercise(
        "06.3",
        "a sum over all ranks that sends little between hosts",
        answer=sum_over_all,
        hints=[
            "Let every local rank be responsible for a part of the tensor.",
            "reduce-scatter over the local group, all-reduce of the part over the host group, all-gather over the local group.",
        ],
        check=check_sum,
        wrong=[
            (plain_all_reduce, "cross hosts"),
            (one_axis_after_the_other, "a third of the tensor"),
            (inside_only, "right sum at 0 of 720"),
            (not_gathered, "puts the parts"),
        ],
    ),
    Exercise(
        "06.4",
        "bytes that leave a host of 8 GPUs in a step",
        answer=28e9,
        hints=["A rank holds 8e9 / 8 gradients.", "Each ring sends 2(n − 1)/n of that from each rank; 8 rings pass each host."],
        check=check_leaving,
        wrong=[
            (3.5e9, "what one rank sends"),
            (224e9, "an eighth of the gradients"),
            (16e9, "size of the gradients"),
            (56e9, "2 bytes, not 4"),
            ("28 GB", "is a number"),
            (math.nan, "is a number"),
        ],
    ),
]
