"""Starts workers or joins a launcher's, supervises them, and writes their logs; the doctor. No torch on import.

`run(config, "package.module:function")` is the entry: the function gets `(config, Worker)` on every rank.
"""

from hyper_parallel.launch import logs
from hyper_parallel.launch.run import run
from hyper_parallel.launch.stop import request_stop, stop_requested
from hyper_parallel.launch.worker import Worker

__all__ = ["Worker", "logs", "request_stop", "run", "stop_requested"]
