"""Print the override that lets a run file use this machine's accelerators, where it asks for more than there are.

`make train` runs the quickstart, which spreads over 4 workers, on whatever the machine has: with 1 to 3 accelerators
it becomes the one-device run on the first of them; with none, or 4 and more, the file is right as it is.
"""

import sys

from hyper_parallel.compat import accelerators
from hyper_parallel.config import load

workers = load(sys.argv[1]).effective_strategy.axes.world
devices = max((backend.device_count() for backend in accelerators()), default=0)
if 0 < devices < workers:
    print("launch.workers=1")
