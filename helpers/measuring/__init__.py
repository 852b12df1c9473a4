"""Instruments that are used inside a rank: `clock`, `memory`, `collectives`; and `trace`, which writes a run for Perfetto."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("clock", "collectives", "memory", "trace"):  # loaded when first used
        return importlib.import_module(f"helpers.measuring.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
