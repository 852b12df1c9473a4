"""Tensor-parallel plans as transformers writes them: find what is wrong, what each rank holds, what moves; apply one.

A plan is a dictionary such as `{"model.layers.*.self_attn.q_proj": "colwise"}`: `*` stands for every number, keys are the names
of modules as `model.named_modules()` gives them, styles are those of the installed transformers.
"""

from helpers.shard_plan.anatomy import published_plan
from helpers.shard_plan.checking import Problem, check
from helpers.shard_plan.exchanging import PlanTraffic, traffic
from helpers.shard_plan.sharding import Shard, Shards, apply, shards

__all__ = ["PlanTraffic", "Problem", "Shard", "Shards", "apply", "check", "published_plan", "shards", "traffic"]
