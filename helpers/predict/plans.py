"""What `plan` returns: the layouts that are possible, in the order of the goal, and why the others are not."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helpers import record
from helpers.predict import commands
from helpers.predict.layout import Layout, Workload
from helpers.predict.memory import Memory

if TYPE_CHECKING:
    from helpers.predict.machines import Machines
    from helpers.predict.timing import StepTime

__all__ = ["Candidate", "Plan", "Rejection"]

SHOWN = 5  # rows of a plan's table
RESERVE = 0.1  # share of a GPU's memory that is kept free


@dataclass(frozen=True, repr=False)
class Candidate:
    """One layout that fits. `workload` is what one data-parallel rank works on, `memory` that of the fullest rank.

    `seconds` are those of an optimiser step, in serving of one decode step; `tokens` are worked on, or made, in that time by all
    ranks together. `time` says what a training step's seconds are spent on. `offloaded`: bytes that each rank moves over its host
    link in a step because the optimiser works in the host's memory.
    """

    layout: Layout
    workload: Workload
    memory: Memory
    seconds: float
    tokens: int
    time: StepTime | None = None
    offloaded: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.seconds

    @property
    def gpu_hours_per_million_tokens(self) -> float:
        """Hours of one GPU that a million tokens take."""
        return self.layout.ranks * self.seconds / 3600 / self.tokens * 1e6

    def worth(self, goal: str) -> float:
        """What a goal makes small: seconds a token, seconds of a step, GPU time a token, GPUs."""
        ranks, token = self.layout.ranks, self.seconds / self.tokens
        return {"throughput": token, "latency": self.seconds, "cost": ranks * token, "fits": ranks}[goal]

    @property
    def name(self) -> str:
        """The layout in words: "dp 64 × tp 8, ZeRO 1, 16 micro-batches of 1, full checkpointing"."""
        return described(self.layout, self.workload, bool(self.offloaded))

    def __repr__(self) -> str:
        return f"{self.name}: {_gib(self.memory.peak)}, {_seconds(self.seconds)}, {self.tokens_per_second:,.0f} tokens/s"


@dataclass(frozen=True)
class Rejection:
    """`count` combinations that were left out for one `reason`, and the first of them."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True, repr=False)
class Plan:
    """The layouts that fit `machines`, best first; `room` are the bytes of a GPU that may be used."""

    goal: str
    machines: Machines
    workload: Workload  # of the whole job
    room: int
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejection, ...]

    @property
    def best(self) -> Candidate:
        """The first candidate. Raises LookupError where nothing fits, saying what was in the way."""
        if not self.candidates:
            raise LookupError(f"no layout fits: {self._rejections()}")
        return self.candidates[0]

    @property
    def explanation(self) -> str:
        """One paragraph: the choice, what it holds, where its time goes, what comes next, why others were left out."""
        if not self.candidates:
            return f"No layout fits. {self._rejections()}"
        best, training = self.candidates[0], self.workload.training
        parts = sorted(((size, name) for name, size in held(best.memory).items()), reverse=True)[:2]
        told = [
            f"For {self.goal}: {best.name}.",
            f"The fullest rank needs {_gib(best.memory.peak)} of {_gib(self.room)} ({_percent(RESERVE)} are kept free), "
            f"mostly {' and '.join(f'{name} ({_gib(size)})' for size, name in parts)}.",
            f"A {'step' if training else 'decode step'} takes {_seconds(best.seconds)}{_shares(best)}: "
            f"{best.tokens_per_second:,.0f} tokens/s with {counted(best.layout.ranks, 'GPU')}, "
            f"{best.gpu_hours_per_million_tokens:.2g} GPU-hours a million tokens.",
        ]
        if len(self.candidates) > 1:
            more = "1 more fits" if len(self.candidates) == 2 else f"{len(self.candidates) - 1:,} more fit"
            told.append(f"{more}; next comes {self.candidates[1].name}{self._behind()}.")
        return " ".join([*told, self._rejections()])

    def commands(self, model: str = "MODEL", script: str = "train.py") -> dict[str, str]:
        """The texts that run the first candidate, by program: "torchrun" and "accelerate" (a YAML file), or "vllm".

        A program that cannot run the layout is left out. `script` takes the options that the torchrun line gives it. With several
        hosts HEAD stands for the first one's address, and `machine_rank` (accelerate) and IS_HEAD (torchrun) are set on each.
        Raises LookupError where nothing fits.
        """
        best, each_host = self.best, min(self.machines.per_node, self.best.layout.ranks)
        if not self.workload.training:
            return {"vllm": commands.vllm(best.layout, best.workload, model, 1 - RESERVE, each_host)}
        found = {"torchrun": commands.torchrun(best.layout, best.workload, script, each_host, bool(best.offloaded))}
        config = commands.accelerate(best.layout, best.workload, each_host, bool(best.offloaded))
        return found | ({"accelerate": config} if config else {})

    def _behind(self) -> str:
        """How far the second is behind the first in what the goal asks for; by time where that is the same."""
        goal = "throughput" if self.goal == "fits" else self.goal
        first, second = (each.worth(goal) for each in self.candidates[:2])
        words = {"throughput": "time a token", "latency": "time a step", "cost": "GPU time a token"}
        return f", {_percent(second / first - 1)} more {words[goal]}" if second > 1.0005 * first else ", as good"

    def _rejections(self) -> str:
        told = "; ".join(f"{each.reason} ({each.count:,}, for example {each.example})" for each in self.rejected)
        return f"Left out: {told}." if told else "Nothing was left out."

    def _table(self) -> list[list[str]]:
        """The first layouts under their headings; nothing where none fits."""
        step = "step" if self.workload.training else "decode step"
        rows = [["", "layout", "GiB", step, "tokens/s", "GPU-h/M tokens"]] if self.candidates else []
        for place, each in enumerate(self.candidates[:SHOWN], 1):
            hours, peak = f"{each.gpu_hours_per_million_tokens:.2g}", f"{each.memory.peak / 2**30:.3g}"
            rows.append([str(place), each.name, peak, _seconds(each.seconds), f"{each.tokens_per_second:,.0f}", hours])
        return rows

    def __repr__(self) -> str:
        return "\n".join([*record.columns(self._table()), self.explanation])

    def _repr_html_(self) -> str:
        return f"{record.table(self._table())}<p>{html.escape(self.explanation)}</p>"


def described(layout: Layout, workload: Workload, offload: bool = False) -> str:
    """A layout and one rank's work in words, what is 1 or none left out."""
    axes = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in ("dp", "tp", "pp") if getattr(layout, axis) > 1) or "1 GPU"
    if not workload.training:
        return f"{axes}, up to {counted(workload.batch, 'sequence')} each"
    rows = f"{counted(workload.micro_batches, 'micro-batch')} of {workload.batch}"
    more = [f"ZeRO {layout.zero}"] * bool(layout.zero) + [rows]
    more += [f"{workload.checkpointing} checkpointing"] * (workload.checkpointing != "none")
    return ", ".join([axes, *more, *["optimiser on the CPU"] * offload])


def held(memory: Memory) -> dict[str, int]:
    """The categories of a memory that are not empty, in words."""
    names = ("parameters", "gradients", "optimizer_state", "master_weights", "activations", "logits", "kv_cache", "buffers")
    return {name.replace("_", " "): size for name in names if (size := getattr(memory, name))}


def _shares(each: Candidate) -> str:
    """Where a training step's seconds go, largest first, what is under 1 % left out."""
    spent = each.time.parts if each.time is not None else {}
    shares = sorted(((value / each.seconds, name.replace("_", " ")) for name, value in spent.items()), reverse=True)
    told = ", ".join(f"{name} {_percent(share)}" for share, name in shares if share >= 0.01)
    return f" ({told})" if told else ""


def counted(number: int, noun: str) -> str:
    """ "1 GPU", "1,024 GPUs", "2 micro-batches"."""
    return f"{number:,} {noun}" + ("es" if noun.endswith("ch") else "s") * (number != 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1g} %"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
