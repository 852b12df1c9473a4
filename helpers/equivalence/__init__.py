"""`compare`: a job on 1 rank and on N, data, tensor or pipeline parallel, must do the same. Finds faults that raise nothing.

The job is a function that trains one step on this rank's share of a fixed global batch (rank and world size tell which) and
returns `observe(...)`. It runs on each number of ranks; loss, gradients, parameters, samples and traffic are compared, and the
pattern of a difference names its cause. Dropout is switched off for the comparison: its masks depend on the batch's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from helpers.equivalence import judging, sharing
from helpers.equivalence.findings import Finding
from helpers.equivalence.joining import Side
from helpers.equivalence.naming import stage_names
from helpers.equivalence.observing import Observation, observe
from helpers.equivalence.origins import Origin, first_nan, layers, origin
from helpers.launching import Run, launch
from helpers.launching.shipping import name_of

__all__ = [
    "Comparison",
    "Finding",
    "Observation",
    "Origin",
    "compare",
    "first_nan",
    "judge",
    "layers",
    "observe",
    "origin",
    "stage_names",
]

CAUSES = (sharing.of_nan, sharing.of_inputs, sharing.of_shards, sharing.of_layers, sharing.of_rates, sharing.of_copies)
SIGNS = (judging.of_replicas, judging.of_gradients, judging.of_results, judging.of_exchanges, judging.of_sampled)


@dataclass(frozen=True, repr=False)
class Comparison:
    """`findings` is empty where all is equal; `errors` holds the relative differences that were seen, by what was compared."""

    ranks: tuple[int, int]
    findings: tuple[Finding, ...]
    errors: Mapping[str, float]
    runs: tuple[Run, Run]

    @property
    def equal(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __repr__(self) -> str:
        if self.findings:
            return "\n".join(f"✘ {each.fault}: {each.evidence}. {each.mend}" for each in self.findings)
        compared = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items()) or "nothing was observed"
        return f"✔ {self.ranks[0]} and {self.ranks[1]} ranks do the same; largest relative differences: {compared}"


def compare(
    job: Callable[..., Observation], *args: Any, ranks: tuple[int, int] = (1, 2), timeout: float = 120, **kwargs: Any
) -> Comparison:
    """Run `job` on both numbers of ranks and say what differs, and which fault that pattern means.

    Raises TypeError where the job does not return `observe(...)`, ValueError for ranks that are not two increasing numbers, and
    what `launch` raises where a run fails.
    """
    small, large = ranks
    if not 1 <= small < large:
        raise ValueError(f"ranks is {ranks}; give two numbers, the smaller first: (1, 2)")
    runs = [launch(_WithoutDropout(job), args, kwargs, ranks=count, timeout=timeout) for count in ranks]
    return judge(*runs)


def judge(few: Run, many: Run) -> Comparison:
    """Compare two runs of a job that were made already, the one on fewer ranks first; dropout must be off in them.

    Raises TypeError where a rank did not return `observe(...)`, ValueError for parameters whose shapes differ without `shards`.
    """
    for seen in [*few.results, *many.results]:
        if not isinstance(seen, Observation):
            raise TypeError(f"the job returned {type(seen).__name__}; it must end with return equivalence.observe(model, …)")
    sides = Side(few), Side(many)
    cause = next((found for of in CAUSES if (found := of(*sides))), [])
    signs = [] if cause else [found for of in SIGNS for found in of(*sides)]  # what follows from a cause is not listed beside it
    samples = [] if sharing.of_inputs(*sides) else judging.of_samples(*sides)
    findings = [*samples, *cause, *signs, *sharing.of_random(*sides)]
    errors = {} if cause else judging.differences(*sides)
    findings = findings or judging.of_texts(*sides)
    return Comparison((few.ranks, many.ranks), tuple(findings), errors, (few, many))


class _WithoutDropout:
    """A job in which nothing is dropped; it runs under its own name."""

    def __init__(self, job: Callable[..., Any]) -> None:
        self.job, self.__name__ = job, name_of(job)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
            setattr(torch.nn.functional, name, lambda input, *_, **__: input)
        attention = torch.nn.functional.scaled_dot_product_attention

        def undropped(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any) -> Any:
            return attention(query, key, value, attn_mask, 0.0, **rest)

        torch.nn.functional.scaled_dot_product_attention = undropped  # type: ignore[assignment]
        return self.job(*args, **kwargs)
