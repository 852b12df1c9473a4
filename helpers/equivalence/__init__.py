"""`compare`: a job on 1 rank and on N, data, tensor or pipeline parallel, must do the same. Finds faults that raise nothing.

The job is a function that trains one step on this rank's share of a fixed global batch (rank and world size tell which) and
returns `observe(...)`. It runs on each number of ranks; loss, gradients, parameters, samples and traffic are compared, and the
pattern of a difference names its cause. Dropout is switched off for the comparison: its masks depend on the batch's shape.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
    """`findings` is empty where all is equal; `errors` holds the relative differences that were seen, by what was compared.

    `traffic` has of each run, by operation, what rank 0 issued: how many, their bytes, and their values over the gradients'.
    """

    ranks: tuple[int, int]
    findings: tuple[Finding, ...]
    errors: Mapping[str, float]
    runs: tuple[Run, Run]
    traffic: tuple[Mapping[str, tuple[int, int, float]], ...]

    @property
    def equal(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __repr__(self) -> str:
        lines = [f"✘ {each.fault}: {each.evidence}. {each.mend}" for each in self.findings]
        if not lines:
            compared = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items()) or "nothing was observed"
            lines = [f"✔ {self.ranks[0]} and {self.ranks[1]} ranks do the same; largest relative differences: {compared}"]
        for run, issued in zip(self.runs, self.traffic, strict=True):
            shares = {op: f", {times:.1f} × the gradients" * ("reduce" in op) for op, (_, _, times) in issued.items()}
            each = [f"{count} {op} ({size:,} B{shares[op]})" for op, (count, size, _) in issued.items()]
            nothing = "nothing" if run.collectives else "nothing that was recorded"
            lines.append(f"  rank 0 of {run.ranks} issued {', '.join(each) or nothing}")
        return "\n".join(lines)


def compare(
    job: Callable[..., Observation], *args: Any, ranks: tuple[int, int] = (1, 2), timeout: float = 120, **kwargs: Any
) -> Comparison:
    """Run `job` on both numbers of ranks and say what differs, and which fault that pattern means.

    A fault that is the same on both, such as a loss that is never divided by the number of micro-batches, is not seen. What
    counts as equal depends on the dtype of parameters, gradients and outputs; compare without autocast, which they do not show.

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

    How often gradients are exchanged is judged where `observe` was given `steps` or `rates`; `compare` counts steps itself.

    Raises TypeError where a rank did not return `observe(...)`, ValueError for parameters whose shapes differ without `shards`,
    and for outputs with no name in common, or a loss, that only one of the two runs has.
    """
    for seen in [*few.results, *many.results]:
        if not isinstance(seen, Observation):
            raise TypeError(f"the job returned {type(seen).__name__}; it must end with return equivalence.observe(model, …)")
    sides = Side(few), Side(many)
    cause = next((found for of in CAUSES if (found := of(*sides))), [])
    given = [(side.held["outputs"].keys(), {"loss" for seen in side.seen if seen.loss is not None}) for side in sides]
    for here, there in zip(*given, strict=True) if not cause else ():
        if (here or there) and not here & there:
            told = f"observe was given {sorted(here)[:3]} in the run of {few.ranks}, {sorted(there)[:3]} in that of {many.ranks}"
            raise ValueError(f"{told}: nothing that can be compared; give the same outputs and loss in both")
    signs = [] if cause else [found for of in SIGNS for found in of(*sides)]  # what follows from a cause is not listed beside it
    samples = [] if sharing.of_inputs(*sides) else judging.of_samples(*sides)
    findings = [*samples, *cause, *signs, *sharing.of_random(*sides)]
    errors = {} if cause else judging.differences(*sides)
    findings = findings or judging.of_texts(*sides)
    traffic = tuple(map(judging.traffic, sides))
    return Comparison((few.ranks, many.ranks), tuple(findings), errors, (few, many), traffic)


class _WithoutDropout:
    """A job in which nothing is dropped, and optimiser steps are counted; it runs under its own name."""

    def __init__(self, job: Callable[..., Any]) -> None:
        self.job, self.__name__ = job, name_of(job)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
            setattr(torch.nn.functional, name, lambda input, *_, **__: input)
        attention = torch.nn.functional.scaled_dot_product_attention

        def undropped(
            query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **rest: Any
        ) -> Any:
            return attention(query, key, value, attn_mask, 0.0, *more, **rest)

        torch.nn.functional.scaled_dot_product_attention = undropped  # type: ignore[assignment]
        made: Counter[int] = Counter()
        register_optimizer_step_post_hook(lambda optimiser, *_: made.update([id(optimiser)]))
        seen = self.job(*args, **kwargs)
        if not isinstance(seen, Observation) or seen.steps is not None:
            return seen
        one = None if len(seen.epochs) > 1 else 1  # where nothing stepped: one step, or some number by hand
        return replace(seen, steps=max(made.values(), default=one))
