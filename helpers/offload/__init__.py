"""Where the parts of a model live: device maps with ranges, checked before loading; templates; latency and memory.

A placement maps modules to tiers: {"model.embed_tokens": 0, "model.layers.0-15": 0, "model.layers.16-31": "disk", …}. A tier is
a GPU's number, "cuda:1", "cpu" or "disk". accelerate keeps and moves the weights; nothing of that is done here.
"""

from helpers.offload.placements import Problem, device_map, problems, tiers
from helpers.offload.running import Evaluation, bring, evaluate, evict, load
from helpers.offload.templates import Template, template, templates

__all__ = [
    "Evaluation", "Problem", "Template", "bring", "device_map", "evaluate", "evict", "load", "problems", "template", "templates",
    "tiers",
]  # fmt: skip
