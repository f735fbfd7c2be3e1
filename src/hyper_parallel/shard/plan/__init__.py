"""The sharding plan: what each axis does to every module and parameter of a model."""

from hyper_parallel.shard.plan.make import make_plan
from hyper_parallel.shard.plan.plan import Plan

__all__ = ["Plan", "make_plan"]
