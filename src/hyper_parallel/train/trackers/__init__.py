"""Where metrics go: `metrics.jsonl` always, and the trackers that the run file names. Only rank 0 writes."""

from hyper_parallel.train.trackers.build import build_trackers, register_tracker
from hyper_parallel.train.trackers.jsonl import MetricsFile, Record, RecordFile, RunInfo, Tracker, Trackers

__all__ = [
    "MetricsFile",
    "Record",
    "RecordFile",
    "RunInfo",
    "Tracker",
    "Trackers",
    "build_trackers",
    "register_tracker",
]
