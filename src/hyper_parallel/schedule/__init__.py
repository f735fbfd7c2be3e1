"""Pipeline schedules: pure functions from stages and micro-batches to the order of each rank's actions. No torch."""

from hyper_parallel.schedule.schedule import Action, Schedule

__all__ = ["Action", "Schedule"]
