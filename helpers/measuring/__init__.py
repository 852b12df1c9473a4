"""Instruments that are used inside a rank: `clock`, `memory`, `collectives`; and `trace`, which writes a run for Perfetto."""

import importlib
from typing import Any

__all__ = ["clock", "collectives", "memory", "trace"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded when first used: memory imports torch
        return importlib.import_module(f"helpers.measuring.{name}")
    raise AttributeError(f"helpers.measuring has no {name!r}; it has {', '.join(__all__)}")
