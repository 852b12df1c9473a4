"""Find what is wrong with a plan before anything runs.

Each rule was established by running the plan it speaks of on two ranks; tests/test_shard_plan.py runs them again.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from helpers.shard_plan.anatomy import STYLES, SUMMED, WHOLE, Anatomy, Part, Plan, Style, generic


@dataclass(frozen=True, repr=False)
class Problem:
    """Something wrong with a plan.

    severity: "error": it raises, at the latest in the first training step; "silent": it runs and the numbers are wrong;
        "warning": the numbers are right but the plan does less than it seems, or they depend on something outside the plan.
    """

    severity: str
    key: str
    reason: str
    mend: str

    def __repr__(self) -> str:
        return f"{self.severity}: {self.key}: {self.reason}. Right: {self.mend}."


class Problems(list[Problem]):
    """A list of problems that shows itself one a line."""

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no problem found"


def check(config_or_model: Any, plan: Plan, tp: int) -> list[Problem]:
    """Return what is wrong with running `plan` on `tp` ranks; an empty list where nothing was found.

    The plan is judged as it stands: `from_pretrained` merges a dictionary with the model's own plan, which can hide an omission.
    Attention and MLPs of linear layers with the usual names are judged; other modules (experts, latent or linear attention) only
    where their keys or styles do not exist. Raises ValueError for a `tp` below 1.
    """
    if tp < 1:
        raise ValueError(f"tp is {tp}: it must be at least 1")
    found = _Check(Anatomy(config_or_model), plan, tp)
    found.keys()
    if tp > 1:
        found.sizes()
        for group, roles in found.anatomy.groups().items():
            found.block(group, roles)
        found.ends()
        found.norms()
        found.randomness()
    return found.problems


class _Check:
    def __init__(self, anatomy: Anatomy, plan: Plan, tp: int) -> None:
        self.anatomy, self.given, self.tp = anatomy, plan, tp
        self.problems = Problems()
        self.plan: dict[str, str] = {}  # keys that match and styles that exist; a misspelt key counts as the one it is nearest to

    def add(self, severity: str, part: Part | str, reason: str, mend: str) -> None:
        self.problems.append(Problem(severity, part if isinstance(part, str) else part.key, reason, mend))

    def style(self, part: Part) -> Style:
        return STYLES.get(self.plan.get(part.key, ""), WHOLE)

    def keys(self) -> None:
        """Keys that match nothing or no module, styles that do not exist or do not fit the module."""
        from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

        styles, parts = list(ALL_PARALLEL_STYLES), self.anatomy.parts
        tensors = {generic(each.name): part for part in parts.values() for each in part.parameters}
        for key, style in self.given.items():
            part = parts.get(key)
            if style not in styles:
                self.add(
                    "error", key, f"transformers has no style {style!r}", f"one of {', '.join(_near(style, styles) or styles)}"
                )
            elif key in self.anatomy.own and self.anatomy.own[key] == style:
                self.plan[key] = style
            elif key in tensors and tensors[key].kind in ("linear", "embedding", "norm"):
                self.tensor(key, style, tensors[key])
            elif part is None and key not in tensors:
                near = self.nearest(key)
                self.add("error", key, "the key matches no module", f"{near!r}" if near else "a name that named_modules() gives")
                if near and near not in self.given:
                    self.plan[near] = style
            elif part is not None and self.fits(part, style):
                self.plan[key] = style

    def nearest(self, key: str) -> str | None:
        """The module's key that a wrong one probably means: the same words with another beginning, else the most alike."""
        candidates = [name for name, part in self.anatomy.parts.items() if part.kind != "container"]
        ends = [name for name in candidates if name.endswith("." + generic(key)) or name == generic(key)]
        return next(iter(ends or _near(key, candidates)), None)

    def tensor(self, key: str, style: str, part: Part) -> None:
        """A key that names a weight or bias instead of its module."""
        if key.endswith(".bias") and STYLES.get(style, WHOLE).split == "rows" and self.given.get(part.key) == style:
            return  # what the module's own style does to it
        reason = "the key names a tensor: it is split, but its module goes on as if it were whole"
        if key.endswith(".bias") and self.given.get(part.key) in STYLES and STYLES[self.given[part.key]].split == "rows":
            reason = "the bias of a row-wise layer is added once, after the sum over ranks: it must stay whole"
        self.add("error", key, reason, f"{part.key!r} alone, and no key for the tensor")

    def fits(self, part: Part, style: str) -> bool:
        """Whether a style can be given to a module of this kind."""
        split = style in STYLES and STYLES[style] != WHOLE
        if split and part.kind == "container":
            inside = [key for key, each in self.anatomy.parts.items() if each.group == part.key and each.kind != "container"]
            self.add("error", part, "the key names a module without weights of its own: nothing in it is split", _list(inside))
        elif split and part.kind == "Conv1D":
            self.add(
                "error", part, "Conv1D holds its matrix transposed, and this style would split the wrong side", "no plan for it"
            )
        elif split and part.kind == "norm":
            self.add("error", part, "a norm needs the whole of its dimension on every rank", "no key for it")
        elif not split and style in (SUMMED, "sequence_parallel") and part.kind == "norm":
            return True
        elif not split and style not in STYLES and part.kind in ("linear", "embedding"):
            self.add(
                "silent",
                part,
                f"{style!r} does not split a {part.kind} layer, and changes what moves around it",
                '"colwise" or "rowwise"',
            )
        else:
            return True
        return False

    def sizes(self) -> None:
        """Sizes that the ranks cannot divide evenly, heads apart."""
        for part in self.anatomy.parts.values():
            size = part.divided(self.style(part))
            if size % self.tp:
                what = {"embedding": "rows or columns of the embedding"}.get(part.kind, "columns or rows of the matrix")
                self.add(
                    "error", part, f"{size:,} {what} cannot be divided among {self.tp} ranks", f"tp one of {_divisors(size)}"
                )

    def block(self, group: str, roles: dict[str, Part]) -> None:
        """The layers that open a block (q, k, v or gate, up), then the one that closes it (o or down)."""
        attention = "o" in roles
        closing = roles["o" if attention else "down"]
        opening = {role: part for role, part in roles.items() if part is not closing}
        parts = {role: self.style(part).gives_part for role, part in opening.items()}
        for part in opening.values():
            if self.style(part).takes_part:
                self.add(
                    "error", part, "row-wise, but its input is whole on every rank", f'"colwise", with {closing.last} "rowwise"'
                )
        if self.fused(opening) or any(self.style(part).takes_part for part in opening.values()):
            return
        if not any(parts.values()) and self.style(closing) == WHOLE:
            return self.idle(group, roles)
        if attention and any(parts.values()):
            self.heads(opening)
        if len(set(parts.values())) > 1:
            return self.mixed(opening, parts, closing)
        self.close(opening, closing, inner_part=all(parts.values()))

    def fused(self, opening: dict[str, Part]) -> bool:
        """Fused matrices: a plain column-wise split cuts across what is fused, unless the model's code interleaves it by heads."""
        for role, part in opening.items():
            style, own = self.style(part), STYLES.get(self.anatomy.own.get(part.key, ""), WHOLE)
            fused, whole = role in ("qkv", "gate_up"), '"colwise_gather_output", and the next layer "rowwise_split_input"'
            if fused and style.gives_part and not own.gives_part and (role, style.split) != ("gate_up", "packed"):
                names = "q, k and v" if role == "qkv" else "gate and up"
                self.add(
                    "error" if role == "qkv" else "silent",
                    part,
                    f"the matrix holds {names} one after the other, and a rank would get rows of one where its code expects all",
                    whole + (', or "packed_colwise"' if role == "gate_up" else ""),
                )
                return True
            if not fused and style.split == "packed":
                self.add("silent", part, "the layer is not fused: packed halves put its columns out of order", '"colwise"')
                return True
        return False

    def heads(self, opening: dict[str, Part]) -> None:
        """Attention is split by heads: each rank needs whole ones."""
        heads, kv = self.anatomy.heads, self.anatomy.kv_heads
        for role, part in opening.items():
            count, what = (kv, "key-value heads") if role in ("k", "v") else (heads, "heads")
            if self.style(part).gives_part and count % self.tp:
                valid = f"tp one of {_divisors(math.gcd(heads, kv))}"
                self.problems[:] = [each for each in self.problems if each.key != part.key]  # the heads say it better
                self.add(
                    "error", part, f"{count} {what} cannot be divided among {self.tp} ranks",
                    valid + ', or q, k, v "colwise_gather_output" and o "rowwise_split_input", or K/V repeated' * (role != "q"),
                )  # fmt: skip

    def mixed(self, opening: dict[str, Part], parts: dict[str, bool], closing: Part) -> None:
        """Some of q, k, v (or of gate, up) are split, others whole."""
        split = [opening[role].last for role, part in parts.items() if part]
        heads, kv, groups = self.anatomy.heads, self.anatomy.kv_heads, self.anatomy.heads // self.anatomy.kv_heads
        queries = heads // self.tp if parts.get("q") else heads
        runs = "q" in parts and all(
            queries % (kv // self.tp if parts.get(role) else kv or 1) == 0 for role in ("k", "v") if role in parts
        )
        closes = self.style(closing).takes_part == parts.get("q", False)
        for role in (role for role, part in parts.items() if not part):
            reason = f"left whole while {' and '.join(split)} {'is' if len(split) == 1 else 'are'} split"
            if runs and closes and groups > 1:
                self.add("silent", opening[role], f"{reason}: query heads meet key-value heads that are not theirs, without an error",
                         '"colwise", as for its partners')  # fmt: skip
            else:
                self.add(
                    "error", opening[role], f"{reason}: their shapes do not fit each other", '"colwise", as for its partners'
                )

    def close(self, opening: dict[str, Part], closing: Part, inner_part: bool) -> None:
        """The closing layer must take what the opening ones give, and give the whole."""
        style, names = self.style(closing), " and ".join(part.last for part in opening.values())
        if inner_part and style.split in ("columns", "packed"):
            self.add(
                "error",
                closing,
                f"column-wise feeding column-wise: it needs its whole input, and {names} give a part",
                '"rowwise"',
            )
        elif inner_part and not style.takes_part:
            self.add("error", closing, f"it takes its whole input, and {names} give a part of it", '"rowwise"')
        elif not inner_part and style.takes_part:
            self.add(
                "error",
                closing,
                f"row-wise, but {names} give their whole output",
                f'{names} "colwise", or this "rowwise_split_input"',
            )
        elif style.gives_part:
            self.add(
                "error", closing, "it gives a part of the columns, and the residual stream is whole", '"rowwise", after "colwise"'
            )

    def idle(self, group: str, roles: dict[str, Part]) -> None:
        """A block that the plan leaves whole though it could be split."""
        units = [self.anatomy.heads, self.anatomy.kv_heads] if "o" in roles else [roles["down"].inputs]
        if any(part.key in self.anatomy.own for part in roles.values()) and not any(unit % self.tp for unit in units):
            self.add(
                "warning", group, "every rank holds and computes all of it", "its layers in the plan, or left whole on purpose"
            )

    def ends(self) -> None:
        """Embedding and output matrix."""
        embedding, head = self.anatomy.ends
        table, output = self.style(embedding), self.style(head)
        if table.takes_part or table.gives_part:
            reason = (
                "token ids are whole on every rank" if table.takes_part else "its columns are split, and the next layers need all"
            )
            self.add("error", embedding, f"{reason}", '"embedding_rowwise"')
        if output.takes_part:
            self.add("error", head, "row-wise, but its input is whole on every rank", '"colwise_gather_output"')
        if output.gives_part:
            self.add("silent", head, "each rank gives logits of its part of the vocabulary only", '"colwise_gather_output"')
        sides = (table.split == "rows", output.split in ("columns", "packed"))
        if self.anatomy.tied and (sides[0] != sides[1] or WHOLE in (table, output)) and table != output:
            whole, other = (embedding, head) if table == WHOLE else (head, embedding)
            self.add("error", whole, f"one tensor with {other.key}, which the plan splits another way",
                     'both split over the vocabulary: embedding "embedding_rowwise", output "colwise_gather_output"')  # fmt: skip

    def norms(self) -> None:
        """Norms inside a block see what their rank computes."""
        for group, roles in self.anatomy.groups().items():
            for part in self.anatomy.parts.values():
                if part.kind != "norm":
                    continue
                partner = roles.get(part.last[0]) if part.group == group and part.last[:2] in ("q_", "k_", "v_") else None
                if partner is None or not self.style(partner).gives_part:
                    continue
                if part.outputs != self.anatomy.head_dim:
                    self.add("error", part, f"it norms over all {part.outputs:,} columns, of which {partner.last} gives a part",
                             f'"colwise_gather_output" for {partner.last}')  # fmt: skip
                elif self.plan.get(part.key) != SUMMED:
                    self.add("silent", part, "in training its gradient is that of the rank's own heads only, and the ranks drift apart",
                             f'"{SUMMED}"')  # fmt: skip
        inside = {part.key for part in self.anatomy.parts.values() if part.kind == "norm" and part.last[:2] in ("q_", "k_", "v_")}
        for key, style in self.plan.items():
            if style in (SUMMED, "sequence_parallel") and self.anatomy.parts[key].kind == "norm" and key not in inside:
                self.add("silent", key, f"its input is whole on every rank: in training its gradient is counted {self.tp} times",
                         "no key for it")  # fmt: skip

    def randomness(self) -> None:
        """Ranks that draw different numbers, or the same where they should differ."""
        for name in ("attention_dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout", "embd_pdrop", "dropout"):
            if (getattr(self.anatomy.config, name, 0) or 0) > 0:
                self.add("warning", f"config.{name}", "in training every rank draws its own mask",
                         "the same random state on all ranks for what is whole, another one on each for what is split, or 0")  # fmt: skip
        if getattr(self.anatomy.model.generation_config, "do_sample", False):
            self.add("warning", "generation_config.do_sample", "every rank draws its own next token, and their texts part",
                     "the same seed on all ranks before generate, or do_sample=False")  # fmt: skip


def _near(word: str, among: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, list(among), n=1, cutoff=0.6)


def _divisors(number: int) -> str:
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0 and each <= 64)


def _list(keys: list[str]) -> str:
    return ", ".join(map(repr, keys[:4])) or "keys of modules with weights"
