"""Read what `nvidia-smi topo -m` prints, find islands of closely joined GPUs, propose tensor-parallel groups.

Words of the matrix, closest first (NVIDIA, nvidia-smi's own legend): NV# a bond of # NVLinks, directly or through an NVSwitch;
PIX one PCIe switch; PXB several PCIe switches; PHB the PCIe host bridge of the CPU; NODE two host bridges of one NUMA node;
SYS the link between sockets.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helpers.predict.architecture import architecture

__all__ = ["KINDS", "Proposal", "Topology", "topology"]

KINDS = {  # closest first: what the word means
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe host bridge",
    "NODE": "two host bridges of one NUMA node",
    "SYS": "the link between sockets",
}
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")
# What a terminal adds (underlines, colours, a title) and the mark at the beginning of a file.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\(.|\ufeff")
_PEER_TO_PEER = {"OK", "CNS", "GNS", "TNS", "NS", "DR"}  # words of another table, `nvidia-smi topo -p2p`


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
    numa: Mapping[int, str]  # NUMA node of each GPU, as printed; empty where the table has no such column

    def link(self, a: int | str, b: int | str) -> str:
        """The word between two devices, GPUs by number: `link(0, "NIC1")`. Raises ValueError for one that is not there."""
        if (pair := (_name(a), _name(b))) not in self.links:
            raise ValueError(f"no link of {a!r} and {b!r}: the GPUs are {self.gpus}, the network cards {self.nics}")
        return self.links[pair]

    def islands(self, within: str | None = None) -> tuple[tuple[int, ...], ...]:
        """GPUs that are all joined to each other by `within` or closer; every GPU is in one island, a lonely one in its own.

        `within` is a key of KINDS; None is the closest kind that joins any two GPUs here. Raises ValueError for another word.
        """
        if within is None:
            within = min((self.link(a, b) for a in self.gpus for b in self.gpus if a != b), key=_distance, default="NV")
        if within not in KINDS and not _LINK.fullmatch(str(within)):
            raise ValueError(f"within is {within!r}; it must be one of {', '.join(KINDS)}")
        return self._cliques(_distance(within)[0], len(self.gpus))

    def nearest_nics(self) -> dict[int, tuple[str, str]]:
        """The closest network card of each GPU and the word between them; empty where the table has no cards."""
        best = {gpu: min(self.nics, key=lambda nic: _distance(self.link(gpu, nic)), default="") for gpu in self.gpus}
        return {gpu: (nic, self.link(gpu, nic)) for gpu, nic in best.items() if nic}

    def propose(self, config: Any = None) -> list[Proposal]:
        """Tensor-parallel groups of every size that divides the GPUs, largest first, each as closely joined as can be found.

        `config` (anything `predict.architecture` reads) leaves out sizes that do not divide its heads and key-value heads.
        Recommended is the largest size that stays on NVLink, else 1. Groups are found greedily, closest GPU first: in a graph of
        links without blocks a closer arrangement may exist.
        """
        found: list[Proposal] = []
        shape = architecture(config) if config is not None else None
        for tp in (size for size in range(len(self.gpus), 0, -1) if len(self.gpus) % size == 0):
            if shape is not None and (shape.heads % tp or shape.kv_heads % tp):
                continue
            tries = (self._cliques(level, tp) for level in range(len(KINDS)))
            groups = next(cliques for cliques in tries if all(len(clique) == tp for clique in cliques))
            words = [self.link(a, b) for group in groups for a in group for b in group if a != b]
            link = max(words, key=_distance, default="")
            best = link[:2] in ("NV", "") and not any(each.recommended for each in found)
            found.append(Proposal(tp, groups, link, _reason(tp, len(groups), link), best))
        return found

    def _cliques(self, level: int, most: int) -> tuple[tuple[int, ...], ...]:
        """GPUs in groups of at most `most`, all pairs of a group at distance `level` or less; the closest join first."""
        left, found = list(self.gpus), []
        while left:
            clique = [left.pop(0)]
            while len(clique) < most:
                near = [gpu for gpu in left if all(_distance(self.link(gpu, other))[0] <= level for other in clique)]
                if not near:
                    break
                clique.append(min(near, key=lambda gpu: (sorted(_distance(self.link(gpu, other)) for other in clique), gpu)))
                left.remove(clique[-1])
            found.append(tuple(sorted(clique)))
        return tuple(found)

    def __repr__(self) -> str:
        lines = [f"{_count(len(self.gpus), 'GPU')}, {_count(len(self.nics), 'network card')}"]
        for island in self.islands():
            words = sorted({self.link(a, b) for a in island for b in island if a != b}, key=_distance)
            lines.append(
                f"  island {list(island)}" + (f": {', '.join(words)} ({KINDS[_kind(words[-1])]})" if words else ": alone")
            )
        nearest = self.nearest_nics()
        lines += [f"  GPU{gpu}: nearest network card {nic} ({word})" for gpu, (nic, word) in nearest.items()]
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
    if not isinstance(text, str):
        raise TypeError(f"topology reads the text of `nvidia-smi topo -m`, not {type(text).__name__}")
    text = _CONTROL.sub("", text)
    if re.search(r"\bMIG\b", text):
        raise ValueError(
            "the text speaks of MIG: slices of a GPU have no NVLink and no peer-to-peer copies between them, so a matrix of "
            "whole GPUs says nothing about them. Right: plan groups on whole GPUs (MIG off), or run one job per slice."
        )
    rows = [line.split() for line in text.splitlines() if line.strip()]
    header = next((row for row in rows if re.fullmatch(r"GPU\d+", row[0]) and not _word(row[1:2])), None)
    if header is None:
        raise ValueError(
            "no header line such as `GPU0 GPU1 … CPU Affinity NUMA Affinity`: paste the whole of `nvidia-smi topo -m`"
        )
    end = next((place for place, word in enumerate(header) if word in ("CPU", "NUMA")), len(header))
    names, columns = header[:end], " ".join(header[end:])
    links, numa = _cells(rows[rows.index(header) + 1 :], names, columns)
    return Topology(tuple(int(n[3:]) for n in names if _is_gpu(n)), tuple(n for n in names if not _is_gpu(n)), links, numa)


def _cells(rows: list[list[str]], names: list[str], columns: str) -> tuple[dict[tuple[str, str], str], dict[int, str]]:
    """The words between all pairs of devices, and the NUMA node of each GPU."""
    links: dict[tuple[str, str], str] = {}
    numa, seen = {}, []
    for row in (row for row in rows if row[0] in names and row[0] not in seen):
        name, words = row[0], row[1 : len(names) + 1]
        seen.append(name)
        if any(word in _PEER_TO_PEER for word in words):
            raise ValueError("this is the table of `nvidia-smi topo -p2p`; the one that shows links is `nvidia-smi topo -m`")
        if len(words) < len(names) or not all(map(_word, ([word] for word in words))):
            bad = next((word for word in words if not _word([word])), "the end of the line")
            raise ValueError(
                f"row {name} has {bad} where a link was expected; the header names {len(names)} devices, and each row needs as "
                f"many of X, NV#, {', '.join(list(KINDS)[1:])}. A line that was cut or wrapped does this: widen the terminal"
            )
        links.update({(name, other): word for other, word in zip(names, words, strict=True)})
        if _is_gpu(name) and columns.startswith("CPU Affinity NUMA") and len(row) > len(names) + 2:
            numa[int(name[3:])] = row[len(names) + 2]
    if missing := [name for name in names if name not in seen]:
        raise ValueError(
            f"the header names {', '.join(names)}, but there is no row for {', '.join(missing)}: the table is not whole"
        )
    for (a, b), word in links.items():
        if (word == "X") != (a == b) or links[b, a] != word:
            raise ValueError(
                f"{a} to {b} is {word}, {b} to {a} is {links[b, a]}: the matrix must be symmetric, with X on the diagonal"
            )
    return links, numa


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _word(words: list[str]) -> bool:
    return bool(words) and (words[0] == "X" or bool(_LINK.fullmatch(words[0])))


def _is_gpu(name: str) -> bool:
    return bool(re.fullmatch(r"GPU\d+", name))


def _name(device: int | str) -> str:
    return f"GPU{device}" if isinstance(device, int) else device


def _kind(word: str) -> str:
    return "NV" if word.startswith("NV") else word


def _distance(word: str) -> tuple[int, int]:
    """Smaller is closer: the place in KINDS, then more NVLinks first."""
    return list(KINDS).index(_kind(word)) if _kind(word) in KINDS else len(KINDS), -int(word[2:] or 0) if word[:2] == "NV" else 0


def _reason(tp: int, groups: int, link: str) -> str:
    if tp == 1:
        return f"{_count(groups, 'replica')}, nothing exchanged within a layer: right while the model fits one GPU"
    over = f"each layer's all-reduces of {tp} GPUs go over {KINDS[_kind(link)]} ({link})"
    if link.startswith("NV"):
        return over
    return f"{over}: only where the model does not fit fewer GPUs" + ("; across sockets it is slowest" if link == "SYS" else "")
