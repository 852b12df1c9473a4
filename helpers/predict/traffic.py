"""Bytes and messages of collectives by algorithm, and the collectives of one training step or one token.

`bytes` means what a recorded `Collective.bytes` means: the payload, the full gathered buffer for all_gather, reduce_scatter,
gather and scatter, what one rank hands in for all_to_all.

Sources of the formulas: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
2005 (ring, recursive doubling and halving, binomial tree, pairwise exchange); Patarasuk, Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009 (ring all-reduce, its lower bound 2(n−1)/n);
Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 2009 (double
tree). What gloo does by default was measured on a loopback of its own (tests/test_predict.py repeats it); NCCL's defaults:
nccl-tests' doc/PERFORMANCE.md and NCCL's user guide. NCCL takes a tree for small messages and across many nodes, and reduces
inside the NVLink switch where it can: ask with `algorithm=`; what crosses a wire then differs, see the known misses below.

Known misses: headers and acknowledgements (gloo on loopback: under 0.5 % from 1 MiB on); NVLink SHARP (each rank sends the
buffer once); NCCL's protocol LL, which doubles the bytes of messages under some 100 KB.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ALGORITHMS", "Traffic", "traffic"]

Shares = tuple[float, float, float, int, int]


@dataclass(frozen=True)
class Traffic:
    """What one collective puts on the wire. Where ranks differ, `sent`, `received`, `messages` are those of the busiest one."""

    op: str
    algorithm: str
    ranks: int
    bytes: int  # the payload
    sent: int  # bytes that one rank sends
    received: int
    total: int  # bytes that all ranks send together
    messages: int  # that one rank sends
    rounds: int  # messages that follow one another: what latency is paid for


def _even(n: int, share: float, steps: int) -> Shares:
    """All ranks alike: each sends and receives `share` payloads in `steps` messages, one after the other."""
    return share, share, n * share, steps, steps


def _at_once(n: int, share: float) -> Shares:
    """All ranks alike: each sends its part to everybody else at the same time."""
    return share, share, n * share, n - 1, 1


def _log(n: int) -> int:
    return math.ceil(math.log2(n))


# By operation and algorithm, for n ranks: payloads that the busiest rank sends, that it receives, that all send; messages,
# rounds. The first algorithm of an operation is what gloo does.
ALGORITHMS: dict[str, dict[str, Callable[[int], Shares]]] = {
    "all_reduce": {
        "ring": lambda n: _even(n, 2 * (n - 1) / n, 2 * (n - 1)),  # reduce-scatter, then all-gather, each around the ring
        "halving_doubling": lambda n: _even(n, 2 * (n - 1) / n, 2 * _log(n)),  # Rabenseifner
        "recursive_doubling": lambda n: _even(n, _log(n), _log(n)),
        "tree": lambda n: (_log(n), _log(n), 2 * (n - 1), _log(n), 2 * _log(n)),  # to the root and back
        "double_tree": lambda n: (2, 2, 2 * (n - 1), 4, 2 * _log(n)),  # each rank is an inner one in one tree only
        "direct": lambda n: _at_once(n, n - 1),  # everybody sends everything to everybody
    },
    "all_gather": {
        "ring": lambda n: _even(n, (n - 1) / n, n - 1),
        "recursive_doubling": lambda n: _even(n, (n - 1) / n, _log(n)),
        "direct": lambda n: _at_once(n, (n - 1) / n),
    },
    "reduce_scatter": {
        "all_reduce": lambda n: _even(n, 2 * (n - 1) / n, 2 * (n - 1)),  # a ring all-reduce of which each rank keeps its part
        "ring": lambda n: _even(n, (n - 1) / n, n - 1),
        "recursive_halving": lambda n: _even(n, (n - 1) / n, _log(n)),
        "direct": lambda n: _at_once(n, (n - 1) / n),
    },
    "broadcast": {
        "tree": lambda n: (_log(n), 1, n - 1, _log(n), _log(n)),  # binomial: the root sends ⌈log₂ n⌉ times
        "chain": lambda n: (1, 1, n - 1, 1, n - 1),  # each hands the whole to the next; pipelined in pieces the rounds overlap
    },
    "reduce": {
        "ring": lambda n: (1, 2 * (n - 1) / n, (n - 1) * (1 + 1 / n), n, n),  # reduce-scatter, then each part to the root
        "tree": lambda n: (1, _log(n), n - 1, 1, _log(n)),
        "chain": lambda n: (1, 1, n - 1, 1, n - 1),
    },
    "all_to_all": {
        "direct": lambda n: _at_once(n, (n - 1) / n),
        "pairwise": lambda n: _even(n, (n - 1) / n, n - 1),
    },
    "gather": {"direct": lambda n: (1 / n, (n - 1) / n, (n - 1) / n, 1, 1)},
    "scatter": {"direct": lambda n: ((n - 1) / n, 1 / n, (n - 1) / n, n - 1, 1)},
    "send": {"direct": lambda n: (1, 0, 1, 1, 1)},
    "recv": {"direct": lambda n: (0, 1, 1, 0, 1)},
    "barrier": {"dissemination": lambda n: (0, 0, 0, _log(n), _log(n))},
}
_NCCL = {"reduce_scatter": "ring", "broadcast": "chain", "reduce": "chain"}  # where its default, for large messages, differs
_POWERS_OF_TWO = ("halving_doubling", "recursive_doubling", "recursive_halving")


def traffic(op: str, bytes: int, ranks: int, *, algorithm: str | None = None, backend: str = "gloo") -> Traffic:
    """Return what `op` with a payload of `bytes` over `ranks` ranks puts on the wire.

    `algorithm` None is what `backend` does by default. Bytes that do not divide are rounded up. Raises ValueError for an
    unknown operation, algorithm or backend, and for recursive algorithms where `ranks` is not a power of two.
    """
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend {backend!r}: traffic knows gloo and nccl")
    if op not in ALGORITHMS:
        raise ValueError(f"operation {op!r}: traffic knows {', '.join(ALGORITHMS)}")
    if ranks < 1 or bytes < 0:
        raise ValueError(f"{ranks} ranks and {bytes} bytes: at least one rank and no negative size")
    default = next(iter(ALGORITHMS[op]))
    algorithm = algorithm or (_NCCL.get(op, default) if backend == "nccl" else default)
    if algorithm not in ALGORITHMS[op]:
        raise ValueError(f"no algorithm {algorithm!r} for {op}; there are {', '.join(ALGORITHMS[op])}")
    if algorithm in _POWERS_OF_TWO and ranks & (ranks - 1):
        raise ValueError(f"{algorithm} pairs ranks by halves: it needs 2, 4, 8 … ranks, not {ranks}; ring takes any number")
    if ranks == 1:
        return Traffic(op, algorithm, 1, bytes, 0, 0, 0, 0, 0)
    *shares, messages, rounds = ALGORITHMS[op][algorithm](ranks)
    sent, received, total = (math.ceil(round(share * bytes, 6)) for share in shares)
    return Traffic(op, algorithm, ranks, bytes, sent, received, total, messages, rounds)
