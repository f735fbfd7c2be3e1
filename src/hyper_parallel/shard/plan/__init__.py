"""The sharding plan: what each axis does to every module and parameter of a model."""

from hyper_parallel.shard.plan.make import make_plan
from hyper_parallel.shard.plan.plan import Intervals, ModulePlan, ParameterPlan, Plan, PlanBuilder, Region

__all__ = ["Intervals", "ModulePlan", "ParameterPlan", "Plan", "PlanBuilder", "Region", "make_plan"]
