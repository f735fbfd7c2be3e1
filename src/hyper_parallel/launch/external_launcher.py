"""A worker of torchrun, Slurm or MPI: its run, its link to the other workers, and who prints an error.

Nothing supervises these workers from outside: requests and heartbeats go through the key-value store of the rendezvous,
rank 0 watches all ranks and rank 1 watches rank 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any

from hyper_parallel.config.launch import Launched
from hyper_parallel.errors import PREFIX, LaunchError
from hyper_parallel.launch import logs, stop
from hyper_parallel.launch.control import ControlThread
from hyper_parallel.launch.heartbeat import Beat
from hyper_parallel.launch.rendezvous import WorkerPlace, wrong_world
from hyper_parallel.launch.run_folder import run_lock
from hyper_parallel.launch.stop import STOPS, stop_requested
from hyper_parallel.launch.watchdog import LEAST_S, Activities, Suspect, Watchdog
from hyper_parallel.launch.worker import work
from hyper_parallel.launch.worker_failure import Failure, watch_steps
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
            let_speak(APART_S)
            if stop.stop_requested():
                return
        if failure.kind == "lost":
            time.sleep(SPEAKING_S)
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


# The key-value store between workers of a launcher (torchrun, Slurm, MPI).
#
# A stop request to one worker is stored there for all. So are heartbeats: rank 0 watches those of all ranks, and rank 1
# that of rank 0. Rank 0's process may serve the store; if it is frozen, the store does not answer, which counts as
# silence.

log = logging.getLogger(__name__)

_STOP = "hyper_parallel/stop"
_FROZEN = "hyper_parallel/frozen"
_BEAT = "hyper_parallel/beat/"
POLL_S = 1.0
"""Seconds between a worker's polls of the store."""
READ_PER_S = 1000
"""Maximum number of heartbeats that rank 0 reads per second."""
SETTLE_S = 3.0
"""Seconds that a leaving worker waits until the store has its request."""
LOOK_S = 0.25
"""Seconds between the watchdog's checks."""


class StoreLink:
    """The link of a launcher's worker. `failed` is called with the rank that stopped first, once that is known.

    The store is polled on a separate thread, since no answer comes while the process that serves it is stopped, and
    over a separate connection, since a waiting connection cannot be shared.
    """

    def __init__(self, place: WorkerPlace, timeout: float | None, failed: Callable[[Suspect], None]) -> None:
        self._place, self._failed = place, failed
        self._watched = list(range(place.world)) if place.rank == 0 else [0] if place.rank == 1 else []
        self._pause = max(POLL_S, len(self._watched) / READ_PER_S)
        self._watchdog = Watchdog(
            self._watched, timeout, others=place.rank == 1, hangs=place.rank == 0, interval=2 * self._pause
        )
        self._connected = False
        self._store: Store | None = None
        """Held until the end: on rank 0 the server goes with it."""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._gone_s = timeout or LEAST_S
        self._asked = False
        self._news = threading.Event()  # a request that came here, or the end
        self._passed_on = threading.Event()  # the request is in the store, or never will be
        self._passed_on.set()
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._beat = Beat()
        self._read: dict[int, dict[str, Any]] = {}
        self.has_failed = False
        """Record that a rank was found frozen."""

    def connect(self, store: Store) -> None:
        """Begin to exchange requests and heartbeats through the store."""
        if self._place.world == 1:
            return
        self._connected, self._store = True, store
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        # A launcher that restarts the workers keeps the store: older entries do not belong to this start.
        start = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        own, other = (PrefixStore(start, store.clone()) for _ in range(2))  # type: ignore[attr-defined]
        for name, target, mine in (("store-link", self._exchange, own), ("watchdog", self._watch, other)):
            if target == self._watch and not self._watched:
                continue
            self._threads.append(threading.Thread(target=target, args=(mine,), name=name, daemon=True))
            self._threads[-1].start()

    def sources(self) -> list[Connection]:
        return []

    def orders(self) -> list[str]:
        found: list[str] = []
        while not self._orders.empty():
            found.append(self._orders.get())
        return found

    def tell(self, message: Mapping[str, Any]) -> None:
        # A request to save needs no link: the step's reduction carries it.
        if message["event"] == "beat":
            self._beat = Beat(**message["beat"])
        elif message["event"] == "signal" and message["number"] in STOPS:
            self._pass_on()

    def _pass_on(self) -> None:
        if not self._asked:
            self._passed_on.clear()
            self._asked = True
            self._news.set()

    def settle(self) -> None:
        """Wait until the store has this rank's request, before this process ends."""
        if self._connected:
            if stop_requested():  # the main thread may be here before the control thread could tell
                self._pass_on()
            self._passed_on.wait(SETTLE_S)

    def close(self) -> None:
        """End the threads, which must not be in PyTorch's store when the interpreter shuts down (`compat.cpu`)."""
        self._closing.set()
        self._news.set()
        for thread in self._threads:
            thread.join(SETTLE_S)
        self._store = None

    def _exchange(self, store: Store) -> None:
        try:
            self._until_failed(store)
        except RuntimeError:
            self._connected = False
            # Who holds the store has gone, and so does this worker soon: a collective of some libraries would wait for
            # ever.
            if self._closing.wait(self._gone_s):
                return
            log.exception("the worker that holds the store has gone")
            self.has_failed = True
            self._orders.put("fail")

    def _until_failed(self, store: Store) -> None:
        stopped, count = False, 0
        while not (self.has_failed or self._closing.is_set()):
            count += 1
            facts = {"count": count, "host": _host(), "pid": os.getpid(), "beat": asdict(self._beat)}
            store.set(f"{_BEAT}{self._place.rank}", json.dumps(facts))
            if self._asked and not stopped:
                store.set(_STOP, "1")
                self._passed_on.set()
                stopped = True
            elif not stopped and store.check([_STOP]):
                self._orders.put("stop")
                self._asked = True
                stopped = True
            if store.check([_FROZEN]):
                self._leave(json.loads(store.get(_FROZEN)))
            keys = [f"{_BEAT}{rank}" for rank in self._watched]
            if keys and store.check(keys):
                found = store.multi_get(keys)  # type: ignore[attr-defined]
                self._read = {rank: json.loads(text) for rank, text in zip(self._watched, found, strict=True)}
            (self._closing if stopped else self._news).wait(self._pause)

    def _watch(self, store: Store) -> None:
        heard: dict[int, int] = {}
        activities: Activities | None = None
        while not (self.has_failed or self._closing.wait(LOOK_S)):
            if not self._read:
                continue  # not all have come; the store's own limit says when that takes too long
            if activities is None:
                here = {rank: facts["pid"] for rank, facts in self._read.items() if facts["host"] == _host()}
                activities = Activities(here)
            for rank, facts in self._read.items():
                if heard.get(rank) != facts["count"]:
                    heard[rank] = facts["count"]
                    self._watchdog.hear(rank, Beat(**facts["beat"]))
            suspect = self._watchdog.look(time.monotonic(), activities)
            if suspect is not None:
                self._failed(suspect)
                # Never answered where it is the frozen process that holds the store.
                frozen = self._read[suspect.rank]
                threading.Thread(target=_leave_word, args=(store, frozen), daemon=True).start()
                time.sleep(3 * self._pause)
                self._leave(frozen)

    def _leave(self, frozen: Mapping[str, Any]) -> None:
        """End this worker, and the frozen process if it is on this machine: a launcher's SIGTERM could not."""
        self.has_failed = True
        if frozen["host"] == _host() and frozen["pid"] != os.getpid():
            with contextlib.suppress(OSError):
                os.kill(frozen["pid"], signal.SIGKILL)
        self._orders.put("fail")


def _leave_word(store: Store, frozen: Mapping[str, Any]) -> None:
    with contextlib.suppress(RuntimeError):
        store.set(_FROZEN, json.dumps(frozen))


def _host() -> str:
    """The machine, and what its process ids mean here."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


# Selects the one worker that reports errors which all workers find before rendezvous.
#
# Every worker of a machine finds the same problem with a file or the machine; the machine's first worker reports it.
# The others wait, because launchers end all workers when the first one ends, and could end the reporting one.

SPEAKING_S = 3.0
"""Seconds that a worker waits for the reporting one, before PyTorch is imported: the workers start together."""
APART_S = 10.0
"""The same behind the import, which on a busy machine takes some workers seconds longer than others."""

_LOCAL_RANK = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process is the first worker on its machine, or no launcher's worker at all."""
    stated = [environ[key] for key in (*_LOCAL_RANK, *_RANK) if key in environ]
    return not stated or stated[0] == "0"


def let_speak(seconds: float = SPEAKING_S) -> None:
    """Wait for the reporting worker, or until the launcher ends this one."""
    leave_quietly()
    time.sleep(seconds)


# torchrun's own report of a worker that refused a run: the reason, and no workers that only waited.
#
# torchrun (torch.distributed.elastic) prints a table of all workers that ended with another exit code than 0, and a
# traceback of itself; a worker cannot prevent either. It can give the reason that the table shows, through the file
# that TORCHELASTIC_ERROR_FILE names, and keep workers out of it that torchrun ended and that have nothing to say.

_FILE = "TORCHELASTIC_ERROR_FILE"
_RUN = "TORCHELASTIC_RUN_ID"
OTHERS_S = 1.0
"""Seconds by which workers of one machine start apart, at most, as a rule."""


def report_reason(text: str) -> None:
    """Have torchrun's report show `text` for this worker. Without torchrun, nothing."""
    path = os.environ.get(_FILE)
    if not path or _RUN not in os.environ:
        return
    data = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    # A report that cannot be written is no reason for another error.
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(data, file)


def let_others_come() -> None:
    """Wait under torchrun, after the reason is said, until the other workers of this machine will have come to the same
    error and `leave_quietly`."""
    if _RUN in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        time.sleep(OTHERS_S)


def leave_quietly() -> None:
    """From now on SIGTERM ends this worker with exit code 0 under torchrun: another worker has failed, which decides
    torchrun's exit code, and this one waited for it to say why. Nothing without torchrun, or in a thread."""
    if _RUN in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _left)


def _left(number: int, frame: FrameType | None) -> None:
    os._exit(0)
