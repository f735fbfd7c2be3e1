"""Reward functions as users write them, well and badly; the workers of the tests' pools import them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def behave(prompt: Any, answer: str, task: Mapping[str, Any]) -> Any:
    """What the answer says."""
    match answer.split(":"):
        case ["value", text]:
            return float(text)
        case ["object"]:
            return object()
        case ["text"]:
            return "1.0"
        case ["true"]:
            return True
        case ["raise"]:
            raise ValueError("first line\nsecond line")
        case ["exit"]:
            sys.exit(3)
        case ["hang"]:
            time.sleep(600)
        case ["busy"]:
            while True:
                pass
        case ["library"]:  # holds the interpreter's lock, where no signal handler of Python's would run
            ctypes.PyDLL(None).sleep(600)
        case ["deaf"]:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(600)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["crash"]:
            ctypes.string_at(0)
        case ["die once", path]:
            if not Path(path).exists():
                Path(path).touch()
                os._exit(9)
            return 0.5
        case ["child", word]:
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", word])
            time.sleep(600)
        case ["print"]:
            print("noise", flush=True)
            os.write(1, b"noise")
            return 1.0
        case ["worker"]:
            return os.getpid()
        case ["prompt"]:
            return len(prompt) + task["extra"]
    return 0.0
