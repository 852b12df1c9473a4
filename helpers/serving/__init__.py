"""vLLM's OpenAI-compatible server from a notebook: checked before it starts, watched while it does, gone after the block.

with serving.serve("tiny-ernie", tensor_parallel=2) as server:
    load_generator.send(server.url, prompts, model=server.model)
"""

from helpers.serving.checking import check, kv_cache_tokens
from helpers.serving.reading import Facts
from helpers.serving.running import Server, ServingFailed, serve
from helpers.serving.settings import Settings, available

__all__ = ["Facts", "Server", "ServingFailed", "Settings", "available", "check", "kv_cache_tokens", "serve"]
