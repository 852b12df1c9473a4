"""The collectives that a plan issues: which, how many, how large, by module and in all."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from helpers.predict import Exchange
from helpers.shard_plan.anatomy import STYLES, SUMMED, Anatomy, Part, Plan, refuse

PHASES = ("forward", "training", "prefill", "decode")


@dataclass(frozen=True)
class PlanTraffic:
    """Rows of (key of the modules, exchange); an exchange's `count` is over all layers and passes, its `bytes` those of one."""

    rows: tuple[tuple[str, Exchange], ...]
    layers: int

    @property
    def counts(self) -> dict[tuple[str, int], int]:
        """How many collectives of each (operation, bytes): what a recorded run counts on each rank."""
        found: Counter[tuple[str, int]] = Counter()
        for _, exchange in self.rows:
            found[exchange.op, exchange.bytes] += exchange.count
        return dict(found)

    @property
    def count(self) -> int:
        """Collectives in all."""
        return sum(exchange.count for _, exchange in self.rows)

    @property
    def bytes(self) -> int:
        """Payload in all, as recorded collectives count it."""
        return sum(exchange.count * exchange.bytes for _, exchange in self.rows)

    def per_layer(self) -> list[tuple[str, Exchange]]:
        """The rows of one decoder layer: those of modules that every layer has, `count` divided by the layers."""
        rows = [(key, each) for key, each in self.rows if ".*." in key and each.count % self.layers == 0]
        return [(key, replace(each, count=each.count // self.layers)) for key, each in rows]

    def __repr__(self) -> str:
        lines = [f"{e.when:<8} {e.count:>5} × {e.op:<14} {e.bytes:>12,} B  {key}" for key, e in self.rows]
        return "\n".join([*lines, f"{self.count:,} collectives, {self.bytes:,} B handed over by each rank"])


def traffic(config_or_model: Any, plan: Plan, tp: int, *, batch: int = 1, tokens: int = 1, phase: str = "forward") -> PlanTraffic:
    """Return the collectives that each of `tp` ranks takes part in, in order of the modules.

    phase: "forward" (logits for all `tokens` of each sequence), "training" (forward and backward), "prefill" (`tokens` is the
        prompt's length, logits of its last only, as `generate` asks for), "decode" (`tokens` passes of one token each).

    What styles send follows transformers/distributed/tensor_parallel.py: column-wise: the gradient of the input is summed in
    backward, each module for itself; a gathered output: all_gather in forward; row-wise: the sum of the output in forward, and
    where it cuts a whole input itself, an all_gather of that input's gradient. Raises ValueError for another phase and for styles
    that the arithmetic does not cover (mixtures of experts, latent attention).
    """
    if phase not in PHASES:
        raise ValueError(f"phase {phase!r}: choose one of {', '.join(PHASES)}")
    refuse(plan, tp)
    anatomy = Anatomy(config_or_model)
    passes, length = (tokens, 1) if phase == "decode" else (1, tokens)
    rows: list[tuple[str, Exchange]] = []
    head = anatomy.ends[1]
    for key, style in plan.items():
        if key not in anatomy.parts:
            raise ValueError(f"{key!r} matches no module: see shard_plan.check")
        part = anatomy.parts[key]
        positions = batch * (1 if phase == "prefill" and part == head else length)
        for op, elements, backward in _sends(part, style, positions):
            if tp > 1 and (not backward or phase == "training"):
                when = "backward" if backward else "forward" if phase == "training" else phase
                size = elements * part.parameters[0].element_size()
                rows.append((key, Exchange("tp", op, part.count * passes, size, tp, when)))
    return PlanTraffic(tuple(rows), anatomy.config.num_hidden_layers)


def _sends(part: Part, style: str, positions: int) -> list[tuple[str, int, bool]]:
    """(operation, elements, whether in backward) of one module in one pass over `positions` tokens."""
    if style == SUMMED:
        return [("all_reduce", each.numel(), True) for each in part.parameters]
    if style not in STYLES or part.kind not in ("linear", "embedding"):
        raise ValueError(
            f"traffic does not know what {style!r} sends for {part.key}, a {part.kind}; it knows {', '.join(STYLES)}"
        )
    does, gradient = STYLES[style], part.kind == "linear"  # token ids have no gradient
    inputs, outputs = positions * part.inputs, positions * part.outputs
    if does.split in ("columns", "packed"):
        gathered = [] if does.gives_part else [("all_gather", outputs, False)]
        return gathered + [("all_reduce", inputs, True)] * gradient
    if does.split == "rows":
        return [("all_reduce", outputs, False)] + [("all_gather", inputs, True)] * (gradient and not does.takes_part)
    return []
