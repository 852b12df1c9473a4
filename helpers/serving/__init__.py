"""vLLM's OpenAI-compatible server from a notebook: checked before it starts, watched while it does, gone after the block.

with serving.serve("tiny-ernie", tensor_parallel=2) as server:
    load_generator.send(server.url, prompts, model=server.model)
"""

import importlib
from typing import Any

_FROM = {
    "Facts": "reading",
    "Server": "running",
    "ServingFailed": "running",
    "Settings": "settings",
    "available": "settings",
    "check": "checking",
    "kv_cache_tokens": "checking",
    "serve": "running",
}

__all__ = ["Facts", "Server", "ServingFailed", "Settings", "available", "check", "kv_cache_tokens", "serve"]


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")
