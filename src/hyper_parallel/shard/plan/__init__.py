"""The plan: for every module and parameter of a model, what each axis does to it."""

from hyper_parallel.shard.plan.draft import Draft
from hyper_parallel.shard.plan.make import make_plan
from hyper_parallel.shard.plan.nouns import Intervals, ModulePlan, ParameterPlan, Plan, Region

__all__ = ["Draft", "Intervals", "ModulePlan", "ParameterPlan", "Plan", "Region", "make_plan"]
