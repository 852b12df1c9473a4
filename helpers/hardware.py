"""GPU figures from `data/hardware.yaml`, each with its source. Data sheets promise, measurements keep: both are here."""

import difflib
from dataclasses import dataclass, field
from typing import Any

from helpers import record

__all__ = ["Hardware", "gpu", "names"]


@dataclass(frozen=True)
class Hardware:
    """One GPU. gb = 10⁹ bytes, gib = 2³⁰ bytes; rates are dense, links per direction and per GPU; None where there is none.

    The lower block is measured by others (None where no measurement is on file); `sources` says where each figure is from.
    """

    name: str
    memory_gb: float
    memory_bandwidth_gb_per_s: float
    pcie_gb_per_s: float
    memory_visible_gib: float | None = None  # what CUDA reports
    bf16_tflops: float | None = None  # None: the GPU has no BF16 tensor cores
    fp16_tflops: float | None = None
    multiprocessors: int | None = None
    nvlink_gb_per_s: float | None = None
    nic_gb_per_s: float | None = None  # of the usual server: its network adapters' rate divided by its GPUs

    matmul_bf16_tflops: float | None = None
    attention_bf16_tflops: float | None = None  # FlashAttention-2; what a causal mask hides is not counted
    peer_copy_gb_per_s: float | None = None
    all_reduce_bus_gb_per_s: float | None = None  # bus bandwidth in one node of eight
    host_to_device_gb_per_s: float | None = None
    weight_streaming_gb_per_s: float | None = None  # while decoding
    sources: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def memory_bytes(self) -> int:
        """Bytes that CUDA reports; where no reading is on file, what the data sheet says."""
        return round(self.memory_visible_gib * 2**30 if self.memory_visible_gib else self.memory_gb * 10**9)


def names() -> list[str]:
    """Return the names that `gpu` knows, as in "H100-SXM"."""
    return list(record.data("hardware")["gpus"])


def gpu(name: str) -> Hardware:
    """Return the figures of one GPU. Upper and lower case, spaces and hyphens do not matter.

    Raises KeyError with the nearest names where `name` is not on file.
    """
    known = {_plain(each): each for each in names()}
    if _plain(name) not in known:
        near = difflib.get_close_matches(_plain(name), known, n=3, cutoff=0.4) or list(known)
        close = ", ".join(known[each] for each in near)
        raise KeyError(f"no figures for the GPU {name!r}; the nearest on file: {close} (hardware.names() lists all)")
    exact = known[_plain(name)]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    data = record.data("hardware")
    for block in data["gpus"][exact].values():
        for figure, (value, key) in block.items():
            values[figure], sources[figure] = value, _source(**data["sources"][key])
    return Hardware(exact, **values, sources=sources)


def _source(by: str, title: str, year: int, note: str = "", weak: bool = False) -> str:
    return f"{by}, {title}, {year}{f' ({note})' if note else ''}{' [weak]' if weak else ''}"


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())
