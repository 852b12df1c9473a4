"""Find what is wrong with a plan before anything runs. What there is to find and its mends stand in data/plan_problems.yaml."""

import difflib
import inspect
import math
import re
from dataclasses import dataclass
from typing import Any

from helpers import record
from helpers.predict.layout import divisors
from helpers.shard_plan.anatomy import NORM_STYLES, STYLES, WHOLE, Anatomy, Block, Part, Plan, Style, generic, refuse

RULES = record.data("plan_problems")
DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout", "embd_pdrop", "dropout")


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
    A misspelt key is reported and then taken for the one it is nearest to. Attention and MLPs of linear layers with the usual
    names are judged; of other modules (experts, latent or linear attention) only keys and styles. Raises ValueError for a `tp`
    below 1.
    """
    refuse(plan, tp)
    found = _Check(Anatomy(config_or_model), plan, tp)
    found.keys()
    if tp > 1:
        found.sizes()
        for block in found.anatomy.blocks.values():
            found.block(block)
        found.ends()
        found.norms()
        found.randomness()
    return found.problems


class _Check:
    def __init__(self, anatomy: Anatomy, plan: Plan, tp: int) -> None:
        self.anatomy, self.given, self.tp = anatomy, plan, tp
        self.problems = Problems()
        self.plan: dict[str, str] = {}  # what of the plan takes effect, misspelt keys put right

    def add(self, rule: str, part: Part | str, **words: Any) -> None:
        severity, *texts = RULES[rule]
        reason, mend = (text.format(tp=self.tp, **words) for text in texts)
        self.problems.append(Problem(severity, part if isinstance(part, str) else part.key, reason, mend))

    def style(self, part: Part | None) -> Style:
        return STYLES.get(self.plan.get(part.key, ""), WHOLE) if part else WHOLE

    def own(self, part: Part) -> Style:
        """The style in the plan that transformers ships."""
        return STYLES.get(self.anatomy.own.get(part.key, ""), WHOLE)

    def keys(self) -> None:
        """Keys that match nothing or no module, styles that do not exist or do not fit the module."""
        from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

        styles, parts = list(ALL_PARALLEL_STYLES), self.anatomy.parts
        names = [generic(name) for name, _ in self.anatomy.model.named_parameters(remove_duplicate=False)]
        tensors = {name: parts[name.rpartition(".")[0]] for name in names}
        for key, style in self.given.items():
            if style not in styles:
                near = difflib.get_close_matches(str(style), styles, n=1) or styles
                self.add("no_style", key, style=style, near=" or ".join(map(repr, near)))
            elif self.anatomy.own.get(key) == style or (key in parts and self.fits(parts[key], style)):
                self.plan[key] = style
            elif key in tensors and tensors[key].kind in ("linear", "embedding", "norm"):
                module = tensors[key].key
                rows = key.endswith(".bias") and STYLES.get(self.given.get(module, ""), WHOLE).split == "rows"
                if self.given.get(module) != style:  # else it is what the module's style does anyway
                    self.add("row_bias" if rows else "tensor", key, module=module)
            elif key not in parts and key not in tensors:
                meant = self.nearest(key)
                self.add("no_module", key, near=repr(meant) if meant else "a name that named_modules() gives, numbers as *")
                if meant and meant not in self.given:
                    self.plan[meant] = style

    def nearest(self, key: str) -> str | None:
        """The key that a wrong one probably means: the same words with another beginning, else the most alike."""
        candidates = [name for name, part in self.anatomy.parts.items() if part.kind != "container"]
        ends = [name for name in candidates if f".{name}".endswith(f".{generic(key)}")]
        return next(iter(ends or difflib.get_close_matches(key, candidates, n=1)), None)

    def fits(self, part: Part, style: str) -> bool:
        """Whether a style has an effect that the other checks can judge on a module of this kind."""
        split = STYLES.get(style, WHOLE) != WHOLE
        if split and part.kind == "container":
            inside = [key for key, each in self.anatomy.parts.items() if each.group == part.key and each.kind == "linear"]
            known = set(inside) <= set(self.given)
            self.add("container_too" if known else "container", part, inside=", ".join(map(repr, inside)) or "what is in it")
        elif split and part.kind == "norm":
            self.add("norm_split", part)
        elif split and part.kind == "Conv1D":
            self.add("conv1d", part)
            return True
        elif style in STYLES or (part.kind == "norm" and style in NORM_STYLES):
            return True
        else:
            self.add("summed_twice" if style == "all_reduce" else "other_style", part, style=style)
        return False

    def sizes(self) -> None:
        """Sizes that the ranks cannot divide evenly, heads apart."""
        for part in self.anatomy.parts.values():
            style = self.style(part)
            size, rows = part.divided(style), style.split == "rows"
            if size % (self.tp * (2 if style.split == "packed" else 1)):
                alone = rows and not style.takes_part  # each rank cuts its piece itself: unequal ones fit
                side = "rows" if rows else "columns"
                self.add("uneven_pieces" if alone else "uneven", part, size=size, side=side, divisors=_listed(size))

    def block(self, block: Block) -> None:
        """The layers that open a block (q, k, v or gate, up), then the one that closes it (o or down)."""
        opening, closing = block.opening, block.closing
        gives = {role: self.style(part).gives_part for role, part in opening.items()}
        first = [part for part in opening.values() if self.style(part).takes_part]
        for part in first:
            self.add("row_first", part, closing=closing.last)
        self.fused(opening)
        if block.attention and any(gives.values()):
            self.heads(opening)
            self.fixed(block)
        if first:
            return
        if not any(gives.values()) and self.style(closing) == WHOLE:
            self.idle(block)
        elif len(set(gives.values())) > 1:
            self.mixed(opening, gives, self.style(closing))
        else:
            self.close(opening, closing, part=all(gives.values()))

    def fused(self, opening: dict[str, Part]) -> None:
        """A plain column-wise split cuts across what is fused in one matrix, unless the model's code interleaves it by heads."""
        for role, part in opening.items():
            style, own = self.style(part), self.own(part)
            if role not in ("qkv", "gate_up"):
                if style.split == "packed":
                    self.add("packed", part)
            elif style.gives_part and style != own and (role, style.split) != ("gate_up", "packed"):
                self.add("fused_by_heads" if own.gives_part else f"fused_{role}", part)

    def heads(self, opening: dict[str, Part]) -> None:
        """Attention is split by heads: each rank needs whole ones."""
        heads, kv = self.anatomy.heads, self.anatomy.kv_heads
        for role, part in opening.items():
            count = kv if role in ("k", "v") else heads
            if self.style(part).gives_part and count % self.tp:
                self.problems[:] = [each for each in self.problems if each.key != part.key]  # of columns: heads say it better
                rule = "kv_heads" if role in ("k", "v") else "heads"
                self.add(rule, part, count=count, divisors=_listed(math.gcd(heads, kv)))

    def fixed(self, block: Block) -> None:
        """Code that reshapes by the number of all heads cannot be given some of them; what transformers splits itself can."""
        code = inspect.getsource(type(block.around.module))
        counts = re.search(r"(?:view|reshape)\([^\n]*num_(?:attention_)?heads", code)
        if counts and not any(self.own(part).gives_part for part in block.opening.values()):
            self.add("fixed_heads", block.around)

    def mixed(self, opening: dict[str, Part], gives: dict[str, bool], closing: Style) -> None:
        """Some of q, k, v (or of gate, up) are split, others whole; attention with fewer KV heads may run all the same."""
        split = " and ".join(opening[role].last for role, part in gives.items() if part)
        heads, kv = self.anatomy.heads, self.anatomy.kv_heads
        whole = {role: kv if role in ("k", "v") else heads for role in gives}
        held = {role: max(1, whole[role] // (self.tp if part else 1)) for role, part in gives.items()}
        fits = "q" in held and kv < heads and not any(held["q"] % held[role] for role in ("k", "v"))
        runs = fits and closing.takes_part == gives["q"] and not closing.gives_part
        for role, part in gives.items():
            if not part:
                self.add("mixed_heads" if runs else "mixed", opening[role], split=f"{split} {'are' if ' ' in split else 'is'}")

    def close(self, opening: dict[str, Part], closing: Part, part: bool) -> None:
        """The closing layer must take what the opening ones give, and give the whole."""
        style, names = self.style(closing), " and ".join(each.last for each in opening.values())
        if part and style.split in ("columns", "packed"):
            self.add("column_column", closing, opening=names)
        elif part != style.takes_part:
            self.add("needs_whole" if part else "needs_part", closing, opening=names)
        elif style.gives_part:
            self.add("residual", closing)

    def idle(self, block: Block) -> None:
        """A block that the plan leaves whole, though the shipped plan splits it and its sizes allow it."""
        units = [self.anatomy.heads, self.anatomy.kv_heads] if block.attention else [block.closing.inputs]
        shipped = any(part.key in self.anatomy.own for part in (*block.opening.values(), block.closing))
        if shipped and not any(unit % self.tp for unit in units):
            self.add("idle", block.around)

    def ends(self) -> None:
        """Embedding and output matrix."""
        embedding, head = self.anatomy.ends
        table, output = self.style(embedding), self.style(head)
        for part, takes, gives in ((embedding, "ids_as_part", "embedding_part"), (head, "head_row", "head_part")):
            if part and self.style(part).takes_part:
                self.add(takes, part)
            if part and self.style(part).gives_part:
                self.add(gives, part)
        here = {"none": "is left whole", "rows": "is split over the vocabulary"}.get(table.split, "is split over the columns")
        there = {"none": "is left whole", "rows": "is split over the columns"}.get(output.split, "is split over the vocabulary")
        if embedding and head and getattr(self.anatomy.config, "tie_word_embeddings", False) and here != there:
            self.add("tied", embedding, head=head.key, here=here, there=there)

    def norms(self) -> None:
        """Norms of q, k, v see the heads of their rank only where those are split; all others see the whole."""
        for part in self.anatomy.parts.values():
            if part.kind != "norm":
                continue
            block, (role, _, rest) = self.anatomy.blocks.get(part.group), part.last.partition("_")
            partner = block.opening.get(role) if block and rest else None
            summed = self.plan.get(part.key) in NORM_STYLES
            if partner and self.style(partner).gives_part:
                if part.outputs == partner.outputs:
                    self.add("norm_over_part", part, size=part.outputs, partner=partner.last)
                elif not summed:
                    self.add("norm_gradient", part)
            elif summed and (partner or part.key not in self.anatomy.own):
                self.add("norm_twice", part)

    def randomness(self) -> None:
        """Ranks that draw different numbers, or the same where they should differ."""
        for name in DROPOUTS:
            if (getattr(self.anatomy.config, name, 0) or 0) > 0:
                self.add("dropout", f"config.{name}")
        if getattr(getattr(self.anatomy.model, "generation_config", None), "do_sample", False):
            self.add("sampling", "generation_config.do_sample")


def _listed(number: int) -> str:
    return ", ".join(map(str, divisors(number)))
