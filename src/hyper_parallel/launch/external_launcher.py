"""Runs this process as a worker of torchrun, Slurm or MPI."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from hyper_parallel.config.launched import Launched
from hyper_parallel.errors import PREFIX, LaunchError
from hyper_parallel.launch import logs, stop
from hyper_parallel.launch.control import ControlThread
from hyper_parallel.launch.failure import Failure
from hyper_parallel.launch.launcher_env import WorkerPlace
from hyper_parallel.launch.lost_steps import watch_steps
from hyper_parallel.launch.run_lock import run_lock
from hyper_parallel.launch.speaking_rank import SETTLE_S, let_speak, speaks
from hyper_parallel.launch.store_link import StoreLink
from hyper_parallel.launch.torchelastic_report import let_others_come, report_reason
from hyper_parallel.launch.watchdog import Suspect
from hyper_parallel.launch.worker import work
from hyper_parallel.launch.world import wrong_world
from hyper_parallel.proc import room_for_files

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_SHOWN = "hyper_parallel/shown"


def run_joined(config: Launched, target: str, place: WorkerPlace) -> int:
    """Run the target as the launcher's worker in this process; returns the exit code (see `launch.run`)."""
    room_for_files(1)
    # On several machines it is said once the ranks have met: another run file of one machine may be the reason.
    if place.one_machine and (reason := wrong_world(config, place)) is not None:
        if not speaks(os.environ):
            let_speak()
        elif place.rank == 0:
            _say(f"{PREFIX}{reason}")
            report_reason(reason)
            let_others_come()
        return 2

    def report(failure: Failure, store: Store | None) -> None:
        # Every rank is its own process here: the first to claim the key in the store shows its failure.
        if store is None and not speaks(os.environ):
            # Nothing to agree through yet. Asked to end meanwhile: the machine's first worker had the same to say.
            let_speak()
            if stop.stop_requested():
                return
        if failure.kind == "lost":
            time.sleep(SETTLE_S)
            if stop.stop_requested() or link.has_failed:
                return  # the others left because they were asked to, or one is frozen, which is said elsewhere
        with contextlib.suppress(RuntimeError):
            if store is not None and store.add(_SHOWN, 1) > 1:
                return
        shown.append(failure)

    shown: list[Failure] = []
    terminal = (1, 2) if place.rank == 0 else None
    screen = os.dup(2)  # where the log has it not

    def frozen(suspect: Suspect) -> None:
        failure = Failure(suspect.rank, "died", suspect.how, time.monotonic())
        os.write(screen, f"{failure.render(config)}\n".encode())

    link = StoreLink(place, config.launch.timeout, frozen)
    lost = watch_steps(config.out)
    with ControlThread(link, grace=config.launch.grace, force=True, safe=config.wording.safe):
        held = run_lock(config.out) if place.rank == 0 else contextlib.nullcontext()
        log = logs.path_of(config.out, place.rank)
        with held, contextlib.ExitStack() as undo:
            try:
                undo.enter_context(logs.recording(log, terminal, config.wording.kept))
            except LaunchError as error:
                _say(f"{PREFIX}{error}")
                return 2
            code = work(place, config, target, report, connected=link.connect)
        link.settle()
        link.close()
        for failure in shown:
            _say(failure.render(config))
            report_reason(failure.text)
        if (shown or link.has_failed) and (line := lost()) is not None:
            _say(line)
        if link.has_failed:
            return 1
        return 130 if stop.stop_requested() else code


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
