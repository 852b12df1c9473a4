"""A ledger of tensor memory: every storage from its allocation to its end, each under one category.

Storages are seen at torch's Python dispatcher, where each operator's tensors pass, forward and backward. What autograd keeps
for backward is seen by saved-tensor hooks, those included that checkpointing and offloading set up for themselves.
Not seen: scratch memory inside an operator, and what compiled code allocates.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

ACTIVATIONS, RECOMPUTATION, OTHER = "activations", "recomputation", "other"


def plain_tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in any nesting of lists, tuples and dictionaries; a DTensor is what this rank holds of it."""
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in plain_tensors(value)]
    if isinstance(values, dict):
        return plain_tensors(list(values.values()))
    if is_traceable_wrapper_subclass(values):
        return plain_tensors([getattr(values, name) for name in values.__tensor_flatten__()[0]])
    return [values] if isinstance(values, torch.Tensor) else []


def is_fake(tensor: torch.Tensor) -> bool:
    """Say whether `tensor` has a shape but no memory; DTensor works out shapes with such tensors."""
    return tensor.untyped_storage().device.type == "meta"


@dataclass(eq=False, slots=True)
class _Storage:
    """One allocation. `given` says that it is an input, or was allocated before the ledger was opened."""

    given: bool
    reference: Any  # weak
    bytes: int = 0
    category: str = OTHER


class Ledger(TorchDispatchMode):
    """Counts the bytes of the tensors on `device` while it is entered: real ones, or with `fake` those of a FakeTensorMode.

    `now` and `most` are bytes by category, at this moment and each category's own maximum; `peak` is the maximum of the sum.
    """

    def __init__(self, device: torch.device, fake: bool = False) -> None:
        super().__init__()
        self.device = device
        self.fake = fake
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.peak = 0
        self._total = 0
        self._storages: dict[int, _Storage] = {}  # by address
        self._parts_of_peak: list[tuple[_Storage, int]] = []
        self._undo = ExitStack()

    @property
    def at_peak(self) -> Counter[str]:
        """The parts of `peak`, each storage under the category that it had in the end."""
        parts: Counter[str] = Counter()
        for storage, size in self._parts_of_peak:
            parts[storage.category] += size
        return parts

    def mark(self, values: Any, category: str) -> None:
        """Put all tensors in `values` (a tensor, or any nesting of lists, tuples and dictionaries) under `category`."""
        for storage in self._see(values, given=True):
            self._put(storage, category)

    def give(self, values: Any) -> None:
        """Say that the tensors in `values` are inputs: saved for backward, they are no activations."""
        for storage in self._see(values, given=True):
            storage.given = True

    def __enter__(self) -> "Ledger":
        construct, resize = self._looking_through(saved_tensors_hooks.__init__), self._following(torch.UntypedStorage.resize_)
        self._undo.enter_context(mock.patch.object(saved_tensors_hooks, "__init__", construct))
        self._undo.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
        self._undo.enter_context(saved_tensors_hooks(torch.Tensor.detach, lambda packed: packed))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its operators on plain tensors come here in turn
        kwargs = kwargs or {}
        self._see((args, kwargs), given=True)
        result = func(*args, **kwargs)
        self._see(result, given=False)
        return result

    def _looking_through(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a constructor of saved-tensor hooks that notes what is kept of each tensor: nothing where it is recomputed."""

        def construct(
            hooks: saved_tensors_hooks, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
        ) -> None:
            def noting(tensor: torch.Tensor) -> Any:
                kept: Any = tensor  # also where a checkpoint leaves the recomputation, by an exception, with its last tensor
                try:
                    kept = pack(tensor)
                finally:
                    self._saved(tensor, kept)
                return kept

            original(hooks, noting, unpack)

        return construct

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `resize_` of storages that is counted: FSDP2 frees and restores its gathered parameters by it."""

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            known = self._storages.get(storage._cdata)
            if known is not None:
                self._resize(known, storage.nbytes())
            return result

        return resize

    def _saved(self, tensor: torch.Tensor, kept: Any) -> None:
        origin = tensor if tensor._base is None else tensor._base
        if origin.is_leaf and origin.requires_grad:
            return  # a parameter, also one that FSDP2 has gathered, or an input
        category = ACTIVATIONS if torch._C._current_graph_task_id() == -1 else RECOMPUTATION
        for storage in self._see(kept, given=False):
            if storage.category == OTHER and not storage.given:
                self._put(storage, category)

    def _see(self, values: Any, given: bool) -> list[_Storage]:
        """Return the storages of the tensors in `values`; those not known yet are counted from now on."""
        found = []
        for tensor in plain_tensors(values):
            if tensor.device.type == self.device.type and tensor.layout == torch.strided and is_fake(tensor) == self.fake:
                storage = tensor.untyped_storage()
                address = storage._cdata
                if address not in self._storages:
                    self._storages[address] = _Storage(given, weakref.ref(storage, partial(self._gone, address)))
                found.append(self._storages[address])
                self._resize(found[-1], storage.nbytes())
        return found

    def _gone(self, address: int, reference: Any) -> None:
        self._resize(self._storages.pop(address), 0)

    def _put(self, storage: _Storage, category: str) -> None:
        size = storage.bytes
        self._resize(storage, 0)
        storage.category = category
        self._resize(storage, size)

    def _resize(self, storage: _Storage, size: int) -> None:
        change, storage.bytes = size - storage.bytes, size
        if change:
            self._total += change
            self.now[storage.category] += change
            self.most[storage.category] = max(self.most[storage.category], self.now[storage.category])
        if self._total > self.peak:
            self.peak = self._total
            self._parts_of_peak = [(each, each.bytes) for each in self._storages.values()]
