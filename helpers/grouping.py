"""Which rank is in which group: coordinates on a mesh of axes, hosts, checks before a run, bytes that leave a host.

`layout(8, tp=4, ranks_per_node=4)` names all of it without starting a process; `topology` reads a machine's link matrix.
`plots.placement(layout)` draws the groups on the hosts.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helpers.predict.architecture import architecture
from helpers.predict.layout import divisors
from helpers.predict.traffic import traffic
from helpers.topology import Topology, topology

__all__ = ["GroupLayout", "Topology", "layout", "topology"]

ORDER = ("pp", "dp", "tp")  # outer to inner: the last axis has consecutive ranks and the most to say to each other


@dataclass(frozen=True, repr=False)
class GroupLayout:
    """Ranks 0 … world − 1 on a mesh with axes `order`, outer to inner, and on hosts of `ranks_per_node` consecutive ranks."""

    world: int
    sizes: dict[str, int]  # ranks along each axis: {"pp": 1, "dp": 2, "tp": 4}
    order: tuple[str, ...]
    ranks_per_node: int

    @property
    def hosts(self) -> int:
        """How many hosts."""
        return self.world // self.ranks_per_node

    def host(self, rank: int) -> int:
        """The host that a rank runs on. Raises IndexError for a rank that is not there."""
        return self._there(rank) // self.ranks_per_node

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place on each axis, outer to inner. Raises IndexError for a rank that is not there."""
        found, left = {}, self._there(rank)
        for axis in reversed(self.order):
            left, found[axis] = divmod(left, self.sizes[axis])
        return {axis: found[axis] for axis in self.order}

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups of one axis: ranks that differ in that coordinate only. Raises ValueError for an unknown axis."""
        if axis not in self.order:
            raise ValueError(f"no axis {axis!r}: this layout has {', '.join(self.order)}")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            others = tuple(place for name, place in self.coordinates(rank).items() if name != axis)
            found.setdefault(others, []).append(rank)
        return tuple(tuple(group) for group in found.values())

    def crossing(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Those groups of an axis whose ranks are on more than one host."""
        return tuple(group for group in self.groups(axis) if len({self.host(rank) for rank in group}) > 1)

    def leaving(self, axis: str, op: str, bytes: int) -> int:
        """Bytes that leave the busiest host when every group of `axis` runs `op` once on a payload of `bytes` each.

        Counted on gloo's ring in the order of ranks: each step of the ring that goes to another host carries what one rank
        sends. Payload only: headers add up to 5 %. Raises ValueError for operations that do not go round a ring.
        """
        traffic(op, bytes, 2)  # refuses what is no operation, also where no group crosses
        out = [0] * self.hosts
        for group in self.crossing(axis):
            moved = traffic(op, bytes, len(group))
            if moved.algorithm not in ("ring", "all_reduce"):
                raise ValueError(
                    f"{op} does not go round a ring on gloo, but {moved.algorithm}: its path over hosts is not known here"
                )
            for a, b in itertools.pairwise([*group, group[0]]):
                if self.host(a) != self.host(b):
                    out[self.host(a)] += moved.sent
        return max(out)

    def problems(self, config: Any = None) -> list[str]:
        """What is wrong or wasteful, each with what would be right; `config` adds a model's heads and layers."""
        found, tp, pp = [], self.sizes["tp"], self.sizes["pp"]
        if tp > 1 and self.order[-1] != "tp":
            found.append(
                f"axis order: the last of {', '.join(self.order)} gets consecutive ranks, and tp is not last: a TP group is "
                f"{list(self.groups('tp')[0])}. Right, outer to inner: {', '.join(ORDER)}"
            )
        for group in self.crossing("tp")[:1]:
            fits = [size for size in divisors(self.ranks_per_node) if self.world // pp % size == 0]
            found.append(
                f"TP crosses hosts: the ranks {list(group)} are on hosts {sorted({self.host(rank) for rank in group})}, "
                f"and each layer waits for their link. Right: tp last, and tp one of {', '.join(map(str, fits))} for "
                f"{self.ranks_per_node} ranks per node"
            )
        if config is None:
            return found
        shape = architecture(config)
        if shape.heads % tp or shape.kv_heads % tp:
            fits = divisors(shape.kv_heads)  # of which there is a whole number of attention heads each
            found.append(
                f"heads: tp={tp} must divide {shape.heads} attention heads and {shape.kv_heads} key-value heads, or a rank gets "
                f"a part of a head. Right: tp one of {', '.join(map(str, fits))}, or leave attention whole and split the MLP only"
            )
        if pp > shape.layers:
            found.append(f"layers: {pp} stages for {shape.layers} layers; each stage needs at least one")
        return found

    def _there(self, rank: int) -> int:
        if not (isinstance(rank, int) and 0 <= rank < self.world):
            raise IndexError(f"no rank {rank!r}: this layout has ranks 0 to {self.world - 1}")
        return rank

    def __repr__(self) -> str:
        axes = " × ".join(f"{axis} {self.sizes[axis]}" for axis in self.order)
        lines = [f"{self.world} ranks on {self.hosts} host{'s' * (self.hosts > 1)}: {axes}"]
        for axis in self.order:
            if self.sizes[axis] > 1:
                over = len(self.crossing(axis))
                where = f"{over} of {len(self.groups(axis))} cross hosts" if over else "each on one host"
                lines.append(f"  {axis} groups {', '.join(str(list(group)) for group in self.groups(axis))}: {where}")
        return "\n".join(lines)


def layout(
    world: int,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    ranks_per_node: int | None = None,
    order: Sequence[str] = ORDER,
) -> GroupLayout:
    """Lay `world` ranks out on the axes pp, dp, tp. `dp` None is what is left: world / (tp · pp).

    `ranks_per_node` None is one host. `order` is outer to inner, as for `init_device_mesh`: the last axis has consecutive ranks.
    Raises ValueError where the sizes do not multiply to `world`, hosts would be uneven, or `order` is not the three axes.
    """
    given = {"world": world, "tp": tp, "pp": pp, "dp": dp, "ranks_per_node": ranks_per_node}
    for name, size in given.items():
        if not (isinstance(size, int) and size >= 1) and not (size is None and name in ("dp", "ranks_per_node")):
            raise ValueError(f"{name} is {size!r}; it must be a whole number, at least 1")
    if not isinstance(order, (tuple, list)) or sorted(map(str, order)) != sorted(ORDER):
        raise ValueError(f"order is {order!r}; it must be the axes {', '.join(ORDER)}, outer to inner, such as {ORDER}")
    if world % (tp * pp):
        raise ValueError(
            f"tp · pp is {tp} · {pp} = {tp * pp}, which does not divide the {world} ranks: some would have no group. "
            f"Right for pp={pp}: tp one of {', '.join(map(str, divisors(world // math.gcd(world, pp)))) or 'none'}"
        )
    if dp not in (None, world // (tp * pp)):
        raise ValueError(
            f"dp · tp · pp is {dp} · {tp} · {pp} = {dp * tp * pp}, but there are {world} ranks: right is dp={world // (tp * pp)}"
        )
    if world % (ranks_per_node or world):
        raise ValueError(f"{world} ranks on hosts of {ranks_per_node} leave one host short: ranks_per_node must divide {world}")
    return GroupLayout(world, {"pp": pp, "dp": world // (tp * pp), "tp": tp}, tuple(order), ranks_per_node or world)
