"""Hooks on layers inside a rank: where the first NaN arises (`first_nan`, `origin`), and what each layer gives (`layers`)."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from helpers.equivalence.naming import Rename, renamed

END = "<end>"  # stands for what comes behind the model: the loss, or the next stage


@dataclass(frozen=True)
class Origin:
    """Where a value that is no finite number first showed on one rank."""

    rank: int
    batch: int  # 0, 1, 2 … forward passes of the model (micro-batches, where a batch has several)
    phase: str  # "forward" or "backward"
    layer: str  # name of the module; "" the model as a whole
    what: str  # "inputs", "parameters", "output", "gradient of the input", "gradient of weight", "code before layers.1" …
    step: int  # place in the order of what was looked at in this batch

    @property
    def arrived(self) -> bool:
        """Whether it came from elsewhere: another rank, the data, or an earlier optimiser step."""
        return self.what in ("inputs", "parameters", "gradient of the output")

    def __str__(self) -> str:
        layer = self.layer or "the model"
        where = "from outside: in the " if self.arrived else "in the "
        return f"rank {self.rank}, batch {self.batch}, {self.phase}, {layer}: first {where}{self.what}"


@dataclass
class Watch:
    """What `first_nan` gives: `found` is the first `Origin`, None while all is finite."""

    found: Origin | None = None


@contextmanager
def first_nan(model: Any, *, rename: Rename | None = None) -> Iterator[Watch]:
    """Within the block, note the first layer in which a NaN or an overflow (inf) arises, forward or backward, and in which batch.

    A layer is at fault in forward where its inputs and parameters are finite and its output is not; in backward where the
    gradient of its output is finite and that of its input, or of a parameter, is not. −inf is allowed in forward: masks hold it.
    Costs a pass over each activation; for searching, not for training. Give `watch.found` back, or `observe(nan=watch)`, and
    `origin(run)` says which of the ranks was first.
    """
    import torch.distributed as dist
    from torch.utils.weak import WeakIdKeyDictionary

    watch, rank = Watch(), dist.get_rank() if dist.is_initialized() else 0
    batch, step = -1, 0
    names = {module: renamed(name, rename) for name, module in model.named_modules()}
    leaves = {module for module in names if not any(module.children())}
    takers: Any = WeakIdKeyDictionary()  # tensor -> names of the layers that take it

    def note(tensors: Iterable[Any], layer: str, phase: str, what: str, of: int | None = None) -> None:
        nonlocal step
        step += 1
        if watch.found is None and not all(_finite(each, phase if what != "parameters" else "") for each in tensors):
            watch.found = Origin(rank, batch if of is None else of, phase, layer, what, step)

    def follow(tensor: Any, maker: str) -> list[str]:
        """Look at the gradient of an activation when it comes: a layer that takes it is to blame, else code between layers."""
        if tensor in takers or not tensor.requires_grad:
            return takers.setdefault(tensor, [])
        taking: list[str] = takers.setdefault(tensor, [])

        def backward(gradient: Any, of: int = batch) -> None:
            if END in taking:
                note([gradient], "", "backward", "gradient of the output", of)
            elif taking:
                note([gradient], ", ".join(taking), "backward", "gradient of the input", of)
            else:
                note([gradient], maker.rpartition(".")[0], "backward", f"code behind {maker}", of)

        tensor.register_hook(backward)
        return taking

    def starting(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal batch, step
        if _rehearsed():
            return
        name, inputs = names[module], _tensors((args, kwargs))
        if module is model:
            batch, step = batch + 1, 0
            note(inputs, name, "forward", "inputs")
        elif module in leaves:
            note(inputs, name.rpartition(".")[0], "forward", f"code before {name}")
        note(module.parameters(recurse=False), name, "forward", "parameters")
        for each in inputs if module in leaves else ():
            follow(each, name).append(name)

    def ended(module: Any, args: Any, output: Any) -> None:
        if _rehearsed():
            return
        note(_tensors(output), names[module], "forward", "output")
        for each in _tensors(output) if module in leaves or module is model else ():
            taking = follow(each, names[module])
            if module is model:
                taking.append(END)

    with ExitStack() as hooks:
        for module, name in names.items():
            hooks.enter_context(module.register_forward_pre_hook(starting, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(ended))
            for part, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    what = f"gradient of {part}"
                    hooks.enter_context(parameter.register_hook(lambda g, n=name, w=what: note([g], n, "backward", w)))
        yield watch


def origin(run: Any) -> Origin | None:
    """The earliest `Origin` among a run's results (or a sequence of them): its rank is where the NaN arose, others caught it.

    Takes `Origin`s, `Watch`es and observations, also inside tuples, lists and dictionaries. None where all was finite.
    """
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(getattr(run, "results", run))
    found = [getattr(leaf, "found", getattr(leaf, "origin", leaf)) for leaf in leaves]
    origins = [each for each in found if isinstance(each, Origin)]
    return min(origins, key=lambda each: (each.batch, each.phase == "backward", each.arrived, each.step, each.rank), default=None)


@contextmanager
def layers(model: Any, pattern: str = "*") -> Iterator[dict[str, Any]]:
    """Within the block, keep what the modules named by `pattern` give, by name: `observe(model, outputs=kept)`.

    Several passes (micro-batches) are joined along the first dim. So the first layer that differs is named, not only the end.
    """
    import torch

    kept: dict[str, Any] = {}
    names = {module: name for name, module in model.named_modules() if fnmatchcase(name, pattern)}

    def keep(module: Any, args: Any, output: Any) -> None:
        again = torch._C._current_graph_task_id() != -1  # within backward: a checkpoint is computed again
        first = next(iter([] if again or _rehearsed() else _tensors(output)), None)
        if first is not None and first.ndim:
            name = names[module]
            before = [kept[name]] if name in kept else []
            kept[name] = torch.cat([*before, first.detach()])  # a copy: what follows may change it in place

    with ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_hook(keep))
        yield kept


def _rehearsed() -> bool:
    """Whether torch's `PipelineStage` is running the model on empty tensors to learn their shapes."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_forward_metadata_inference":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _tensors(value: Any) -> list[Any]:
    """The floating-point tensors in (nested) arguments or outputs."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.is_floating_point()]


def _finite(tensor: Any, phase: str) -> bool:
    """Whether all values are finite; in forward −inf is one that masks hold, in and between layers."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return bool((local.isfinite() | (local.isneginf() if phase == "forward" else False)).all())
