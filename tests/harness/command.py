"""A command that launches a target, for tests that send signals to it: `python -m harness.command FILE TARGET`.

With the process id of its parent as a third argument it ends with that, so that a killed test leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import PREFIX, HyperParallelError
from hyper_parallel.launch import run
from hyper_parallel.launch.rendezvous import detect
from hyper_parallel.proc import die_with

if __name__ == "__main__":
    if len(sys.argv) > 3:
        die_with(int(sys.argv[3]))
    # It has in a fork of what has imported everything.
    _had_torch = "torch" in sys.modules
    # As a shell starts it, also where the tests themselves were started by nohup, which ignores SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    try:
        _code = run(_config, sys.argv[2])
    except HyperParallelError as _error:
        print(f"{PREFIX}{_error}", file=sys.stderr)
        _code = 2
    if detect(os.environ, _config.launch.rendezvous) is None:
        assert _had_torch or "torch" not in sys.modules, "the command imported torch"
    sys.exit(_code)
