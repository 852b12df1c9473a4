"""What data-parallel inference needs besides the lesson: prompts to answer, greedy decoding of a batch, a queue that ranks share.

The lesson itself, who gets which prompt and how results come back in order, stands in the cells of notebook 02.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"


def prompts(count: int | None = None) -> list[str]:
    """The first `count` prompts of `data/prompts.jsonl`, or all: short notes first, long reports last. Each is one token a word.

    Raises ValueError where there are not so many.
    """
    rows = PROMPTS.read_text(encoding="utf-8").splitlines()
    if count is not None and not 0 <= count <= len(rows):
        raise ValueError(f"{count} prompts asked for; {PROMPTS.name} has {len(rows)}")
    return [json.loads(row)["prompt"] for row in rows[:count]]


class Padding(NamedTuple):
    """Positions that a model computes when the prompts of a batch are filled up to its longest."""

    computed: int
    useful: int

    @property
    def wasted(self) -> float:
        """The share of computed positions that hold no token."""
        return 1 - self.useful / self.computed if self.computed else 0.0


def padding(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> Padding:
    """Count the positions of `batches`, each a list of prompt numbers; `lengths` are the prompts' tokens."""
    rows = [[lengths[number] for number in batch] for batch in batches]
    return Padding(sum(len(row) * max(row, default=0) for row in rows), sum(map(sum, rows)))


def complete(model: PreTrainedModel, rows: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
    """Greedy continuations of token rows in one batch: at most `new_tokens[i]` ids for row i, the end of sequence included.

    Rows are filled up on the left, and the fill is masked: what stands beside a prompt does not change its continuation (but
    for rounding). Raises ValueError for an empty row and for one that does not fit the model's context with its new tokens.
    """
    import torch

    context = model.config.max_position_embeddings
    for row, new in zip(rows, new_tokens, strict=True):
        if not row or len(row) + new > context:
            raise ValueError(
                f"a prompt of {len(row):,} tokens and {new} new ones: there must be at least 1 token, and together "
                f"at most {context:,}, the context of this model"
            )
    if not rows:
        return []
    width, ends = max(map(len, rows)), end_tokens(model)
    if width + max(new_tokens) > context:  # each fits, but not filled up to the longest
        return [complete(model, [row], [new])[0] for row, new in zip(rows, new_tokens, strict=True)]
    ids = torch.zeros(len(rows), width, dtype=torch.long, device=model.device)  # (B, T)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, width - len(row) :] = torch.tensor(row)
        mask[place, width - len(row) :] = 1
    made = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=mask, max_new_tokens=max(new_tokens), do_sample=False, pad_token_id=0
    )
    found = []
    for row, new in zip(made[:, width:].tolist(), new_tokens, strict=True):
        stop = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        found.append(row[: min(stop, new)])
    return found


def end_tokens(model: PreTrainedModel) -> set[int]:
    """The ids at which `generate` ends a text."""
    end = model.generation_config.eos_token_id  # type: ignore[union-attr]
    return set(end) if isinstance(end, list) else {end}


class WorkQueue:
    """Numbers 0 … count − 1, each given to one rank only: `for number in WorkQueue("prompts", count)`, the same on all ranks.

    A rank takes the next number when it is ready for it, so fast ranks take more. The counter lives in the store through which
    the ranks of the default process group met. `name` is used for one queue of a job only.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    def __iter__(self) -> Iterator[int]:
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        while (number := store.add(f"queue {self.name}", 1) - 1) < self.count:
            yield number
