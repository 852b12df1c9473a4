"""Read what `nvidia-smi topo -m` prints, find islands of closely joined GPUs, propose tensor-parallel groups.

Words of the matrix, closest first (NVIDIA, nvidia-smi's own legend): NV# a bond of # NVLinks, directly or through an NVSwitch;
PIX one PCIe switch; PXB several PCIe switches; PHB the PCIe host bridge of the CPU; NODE two host bridges of one NUMA node;
SYS the link between sockets.
"""

import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helpers.predict import architecture, undivided
from helpers.predict.layout import divisors
from helpers.predict.plans import counted

__all__ = ["KINDS", "Proposal", "Topology", "topology"]

KINDS = {  # closest first: what the word means
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe host bridge",
    "NODE": "two host bridges of one NUMA node",
    "SYS": "the link between sockets",
}
_WORD = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
# What a terminal adds (underlines, colours, a title) and the mark at the beginning of a file.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\(.|\ufeff")


@dataclass(frozen=True)
class Proposal:
    """One way to form tensor-parallel groups. `link` is the loosest word inside any group, "" where groups are single GPUs."""

    tp: int
    groups: tuple[tuple[int, ...], ...]  # GPU numbers as nvidia-smi counts them
    link: str
    reason: str
    recommended: bool = False

    @property
    def visible_devices(self) -> str:
        """For CUDA_VISIBLE_DEVICES, with CUDA_DEVICE_ORDER=PCI_BUS_ID: consecutive ranks are then in one group."""
        return ",".join(str(gpu) for group in self.groups for gpu in group)


@dataclass(frozen=True, repr=False)
class Topology:
    """GPUs and network cards of one host. `links` holds the word for each pair of names, both ways: ("GPU0", "NIC1") -> "PXB"."""

    gpus: tuple[int, ...]
    nics: tuple[str, ...]
    links: Mapping[tuple[str, str], str]

    def link(self, a: int | str, b: int | str) -> str:
        """The word between two devices, GPUs by number: `link(0, "NIC1")`. Raises ValueError for one that is not there."""
        first, second = (f"GPU{device}" if isinstance(device, int) else device for device in (a, b))
        if (first, second) not in self.links:
            raise ValueError(f"no link of {a!r} and {b!r}: the GPUs are {self.gpus}, the network cards {self.nics}")
        return self.links[first, second]

    def islands(self) -> tuple[tuple[int, ...], ...]:
        """GPUs that are all joined to each other by the closest kind of link here; a GPU without one is an island of its own."""
        closest = min((_distance(word)[0] for word in self._words(self.gpus)), default=0)
        return self._cliques(closest, len(self.gpus))

    def nearest_nics(self) -> dict[int, tuple[str, str]]:
        """The closest network card of each GPU and the word between them; empty where the table has no cards."""
        found = {}
        for gpu in self.gpus if self.nics else ():
            card = min(self.nics, key=lambda nic: _distance(self.link(gpu, nic)))
            found[gpu] = card, self.link(gpu, card)
        return found

    def propose(self, config: Any = None) -> list[Proposal]:
        """Tensor-parallel groups of every size that divides the GPUs, largest first, each as closely joined as can be found.

        `config` (anything `predict.architecture` reads) leaves out sizes that do not divide its heads and columns. Recommended is
        the largest size that stays on NVLink, else 1. Groups are found greedily, closest GPU first: in a graph of links without
        blocks a closer arrangement may exist.
        """
        found: list[Proposal] = []
        shape = architecture(config) if config is not None else None
        for tp in reversed(divisors(len(self.gpus))):
            if shape is not None and undivided(shape, tp):
                continue
            tries = (self._cliques(level, tp) for level in range(len(KINDS)))
            groups = next(cliques for cliques in tries if all(len(clique) == tp for clique in cliques))
            link = max((word for group in groups for word in self._words(group)), key=_distance, default="")
            best = link[:2] in ("NV", "") and not any(each.recommended for each in found)
            found.append(Proposal(tp, groups, link, _reason(tp, len(groups), link), best))
        return found

    def _words(self, gpus: tuple[int, ...]) -> list[str]:
        return [self.link(a, b) for a, b in itertools.combinations(gpus, 2)]

    def _cliques(self, level: int, most: int) -> tuple[tuple[int, ...], ...]:
        """GPUs in groups of at most `most`, all pairs of a group at distance `level` or less; the closest join first."""
        left, found = list(self.gpus), []
        while left:
            clique = [left.pop(0)]
            while len(clique) < most:
                distances = {gpu: sorted(_distance(self.link(gpu, other)) for other in clique) for gpu in left}
                near = [gpu for gpu in left if distances[gpu][-1][0] <= level]
                if not near:
                    break
                clique.append(min(near, key=lambda gpu: (distances[gpu], gpu)))
                left.remove(clique[-1])
            found.append(tuple(sorted(clique)))
        return tuple(found)

    def __repr__(self) -> str:
        lines = [f"{counted(len(self.gpus), 'GPU')}, {counted(len(self.nics), 'network card')}"]
        for island in self.islands():
            words = sorted(set(self._words(island)), key=_distance)
            told = f"{', '.join(words)} ({KINDS[_kind(words[-1])]})" if words else "alone"
            lines.append(f"  island {list(island)}: {told}")
        lines += [f"  GPU{gpu}: nearest network card {nic} ({word})" for gpu, (nic, word) in self.nearest_nics().items()]
        return "\n".join(lines)


def topology(text: str | None = None) -> Topology:
    """Read the table of `nvidia-smi topo -m`: of this machine, or pasted `text` (prompt and legend lines may stand around it).

    Raises FileNotFoundError where there is no text and no nvidia-smi; ValueError for a table that is not whole, not symmetric,
    of another command, or of a GPU cut into MIG slices, saying which line and what would be right.
    """
    if text is None:
        if not shutil.which("nvidia-smi"):
            raise FileNotFoundError(
                "nvidia-smi is not on this machine: pass the text that `nvidia-smi topo -m` printed elsewhere"
            )
        text = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=60).stdout
    text = _CONTROL.sub("", text)
    if re.search(r"\bMIG\b", text):
        raise ValueError(
            "the text speaks of MIG: slices of a GPU have no NVLink and no peer-to-peer copies between them, so a matrix of "
            "whole GPUs says nothing about them. Right: plan groups on whole GPUs (MIG off), or run one job per slice."
        )
    rows = [line.split() for line in text.splitlines() if line.strip()]
    header = next((row for row in rows if _is_gpu(row[0]) and not any(map(_WORD.fullmatch, row[1:2]))), None)
    if header is None:
        raise ValueError(
            "no header line such as `GPU0 GPU1 … CPU Affinity NUMA Affinity`: paste the whole of `nvidia-smi topo -m`"
        )
    names = list(itertools.takewhile(lambda word: word not in ("CPU", "NUMA"), header))
    table = {row[0]: row[1 : len(names) + 1] for row in reversed(rows[rows.index(header) + 1 :])}  # of a name, the first row
    links = {}
    for name in names:
        if name not in table:
            raise ValueError(f"the header names {', '.join(names)}, but there is no row for {name}: the table is not whole")
        for other, word in itertools.zip_longest(names, table[name], fillvalue="the end of the line"):
            if not _WORD.fullmatch(word):
                raise ValueError(
                    f"row {name} has {word} where a link was expected; the header names {len(names)} devices, and each row needs "
                    f"as many of X, NV#, {', '.join(list(KINDS)[1:])}. A line that was cut or wrapped does this (widen the "
                    "terminal), and the table of `nvidia-smi topo -p2p`"
                )
            links[name, other] = word
    for (a, b), word in links.items():
        if (word == "X") != (a == b) or links[b, a] != word:
            raise ValueError(
                f"{a} to {b} is {word}, {b} to {a} is {links[b, a]}: the matrix must be symmetric, with X on the diagonal"
            )
    cards = tuple(name for name in names if not _is_gpu(name))
    return Topology(tuple(int(name[3:]) for name in names if _is_gpu(name)), cards, links)


def _is_gpu(name: str) -> bool:
    return bool(re.fullmatch(r"GPU\d+", name))


def _kind(word: str) -> str:
    return "NV" if word.startswith("NV") else word


def _distance(word: str) -> tuple[int, int]:
    """Smaller is closer: the place in KINDS, then more NVLinks first."""
    return list(KINDS).index(_kind(word)), -int(word[2:]) if word.startswith("NV") else 0


def _reason(tp: int, groups: int, link: str) -> str:
    if tp == 1:
        return f"{counted(groups, 'replica')}, nothing exchanged within a layer: right while the model fits one GPU"
    over = f"each layer's all-reduces of {tp} GPUs go over {KINDS[_kind(link)]} ({link})"
    if link.startswith("NV"):
        return over
    return f"{over}: only where the model does not fit fewer GPUs" + ("; across sockets it is slowest" if link == "SYS" else "")
