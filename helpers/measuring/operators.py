"""What torch's `c10d` operators move: their name in the field's words, their payload, the rank at the other end.

`bytes` is the logical payload: for all_gather and reduce_scatter the full (gathered) buffer, for gather and scatter the
full buffer on the root and the rank's own part elsewhere, for all_to_all what the rank hands in, for a barrier 0. A sparse
tensor counts as the dense one it stands for.
"""

from typing import Any, NamedTuple


class Operator(NamedTuple):
    """One `c10d` operator; the numbers are positions among its arguments."""

    op: str
    payload: int | None  # the tensors that are the payload
    otherwise: int = 0  # what to count where those are none: gather and scatter away from the root
    peer: int | None = None  # the other end's rank in the group


OPERATORS = {
    "allreduce_": Operator("all_reduce", 0),
    "allreduce_coalesced_": Operator("all_reduce", 0),
    "broadcast_": Operator("broadcast", 0),
    "allgather_": Operator("all_gather", 0),
    "_allgather_base_": Operator("all_gather", 0),
    "allgather_coalesced_": Operator("all_gather", 0),
    "allgather_into_tensor_coalesced_": Operator("all_gather", 0),
    "reduce_": Operator("reduce", 0),
    "reduce_scatter_": Operator("reduce_scatter", 1),
    "_reduce_scatter_base_": Operator("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", 1),
    "gather_": Operator("gather", 0, otherwise=1),
    "scatter_": Operator("scatter", 1),
    "alltoall_": Operator("all_to_all", 1),
    "alltoall_base_": Operator("all_to_all", 1),
    "barrier": Operator("barrier", None),
    "monitored_barrier_": Operator("barrier", None),
    "send": Operator("send", 0, peer=2),
    "recv_": Operator("recv", 0, peer=2),
    "recv_any_source_": Operator("recv", 0),
}


def tensors_of(argument: Any) -> list[Any]:
    """Return the tensors of a tensor, a list of them, or a list of lists."""
    if not isinstance(argument, list | tuple):
        return [argument]
    return [tensor for part in argument for tensor in (part if isinstance(part, list | tuple) else (part,))]


def payload(operator: Operator, arguments: tuple[Any, ...]) -> tuple[str | None, tuple[int, ...], int]:
    """Return dtype, shape and bytes of what `operator` moves; several tensors are one flat one, a barrier moves nothing."""
    if operator.payload is None:
        return None, (), 0
    tensors = tensors_of(arguments[operator.payload]) or tensors_of(arguments[operator.otherwise])
    shape = tuple(tensors[0].shape) if len(tensors) == 1 else (sum(tensor.numel() for tensor in tensors),)
    return (
        str(tensors[0].dtype).removeprefix("torch."),
        shape,
        sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    )
