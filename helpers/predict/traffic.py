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

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Traffic", "traffic"]


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


_Formula = Callable[[int, int], tuple[float, float, float, int, int]]  # (n, B) -> sent, received, total, messages, rounds


def _log(n: int) -> int:
    return math.ceil(math.log2(n))


def _even(share: Callable[[int], float], steps: Callable[[int], int], together: bool = False) -> _Formula:
    """All ranks alike: each sends `share(n)` times the buffer in `steps(n)` messages, one after the other unless `together`."""
    return lambda n, b: (share(n) * b, share(n) * b, n * share(n) * b, steps(n), 1 if together else steps(n))


def _fan(n: int, b: int) -> tuple[float, float, float, int, int]:
    """The root sends each other rank its part."""
    return (n - 1) / n * b, b / n, (n - 1) / n * b, n - 1, 1


def _chain(n: int, b: int) -> tuple[float, float, float, int, int]:
    """Each rank hands the whole buffer to the next one; pipelined in pieces the rounds overlap."""
    return b, b, (n - 1) * b, 1, n - 1


def _tree(n: int, b: int) -> tuple[float, float, float, int, int]:
    """Binomial tree: the root sends to ⌈log₂ n⌉ ranks (for a reduction: receives from them), every other one receives once."""
    return _log(n) * b, b, (n - 1) * b, _log(n), _log(n)


def _mirrored(formula: _Formula) -> _Formula:
    """The same way back: what was sent is received."""

    def mirror(n: int, b: int) -> tuple[float, float, float, int, int]:
        sent, received, total, _, rounds = formula(n, b)
        return received, sent, total, 1, rounds

    return mirror


_TWICE, _ONCE = (lambda n: 2 * (n - 1) / n), (lambda n: (n - 1) / n)
_FORMULAS: dict[str, dict[str, _Formula]] = {
    "all_reduce": {
        "ring": _even(_TWICE, lambda n: 2 * (n - 1)),  # reduce-scatter, then all-gather, each around the ring
        "halving_doubling": _even(_TWICE, lambda n: 2 * _log(n)),  # Rabenseifner; ranks a power of two
        "recursive_doubling": _even(_log, _log),  # ranks a power of two
        "tree": lambda n, b: (_log(n) * b, _log(n) * b, 2 * (n - 1) * b, _log(n), 2 * _log(n)),  # to the root and back
        "double_tree": lambda n, b: (2 * b, 2 * b, 2 * (n - 1) * b, 4, 2 * _log(n)),  # each rank inner in one tree only
        "direct": _even(lambda n: n - 1, lambda n: n - 1, together=True),  # everybody sends everything to everybody
    },
    "all_gather": {
        "ring": _even(_ONCE, lambda n: n - 1),
        "recursive_doubling": _even(_ONCE, _log),
        "direct": _even(_ONCE, lambda n: n - 1, together=True),
    },
    "reduce_scatter": {
        "ring": _even(_ONCE, lambda n: n - 1),
        "recursive_halving": _even(_ONCE, _log),
        "direct": _even(_ONCE, lambda n: n - 1, together=True),
        "all_reduce": _even(_TWICE, lambda n: 2 * (n - 1)),  # a whole ring all-reduce of which each rank keeps its part
    },
    "broadcast": {"tree": _tree, "chain": _chain},
    "reduce": {
        "tree": _mirrored(_tree),
        "chain": _chain,
        # reduce-scatter around the ring, then each rank's part to the root
        "ring": lambda n, b: (b, 2 * (n - 1) / n * b, (n - 1) * (1 + 1 / n) * b, n, n),
    },
    "all_to_all": {"pairwise": _even(_ONCE, lambda n: n - 1), "direct": _even(_ONCE, lambda n: n - 1, together=True)},
    "gather": {"direct": _mirrored(_fan)},
    "scatter": {"direct": _fan},
    "send": {"direct": lambda n, b: (b, 0, b, 1, 1)},
    "recv": {"direct": lambda n, b: (0, b, b, 0, 1)},
    "barrier": {"dissemination": lambda n, b: (0, 0, 0, _log(n), _log(n))},
}
DEFAULTS = {  # what each backend does by default; NCCL for messages that are not small
    "gloo": {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "all_reduce", "broadcast": "tree", "reduce": "ring",
             "all_to_all": "direct"},
    "nccl": {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "broadcast": "chain", "reduce": "chain",
             "all_to_all": "direct"},
}  # fmt: skip
_POWERS_OF_TWO = ("halving_doubling", "recursive_doubling", "recursive_halving")


def traffic(op: str, bytes: int, ranks: int, *, algorithm: str | None = None, backend: str = "gloo") -> Traffic:
    """Return what `op` with a payload of `bytes` over `ranks` ranks puts on the wire.

    `algorithm` None is what `backend` does by default. Bytes that do not divide are rounded up. Raises ValueError for an
    unknown operation, algorithm or backend, and for recursive algorithms where `ranks` is not a power of two.
    """
    if backend not in DEFAULTS:
        raise ValueError(f"backend {backend!r}: traffic knows {', '.join(DEFAULTS)}")
    if op not in _FORMULAS:
        raise ValueError(f"operation {op!r}: traffic knows {', '.join(_FORMULAS)}")
    if ranks < 1 or bytes < 0:
        raise ValueError(f"{ranks} ranks and {bytes} bytes: at least one rank and no negative size")
    algorithm = algorithm or DEFAULTS[backend].get(op) or next(iter(_FORMULAS[op]))
    if algorithm not in _FORMULAS[op]:
        raise ValueError(f"no algorithm {algorithm!r} for {op}; there are {', '.join(_FORMULAS[op])}")
    if algorithm in _POWERS_OF_TWO and ranks & (ranks - 1):
        raise ValueError(f"{algorithm} pairs ranks by halves: it needs 2, 4, 8 … ranks, not {ranks}; ring takes any number")
    if ranks == 1:
        return Traffic(op, algorithm, 1, bytes, 0, 0, 0, 0, 0)
    sent, received, total, messages, rounds = _FORMULAS[op][algorithm](ranks, bytes)
    sent, received, total = (math.ceil(round(size, 6)) for size in (sent, received, total))
    return Traffic(op, algorithm, ranks, bytes, sent, received, total, messages, rounds)
