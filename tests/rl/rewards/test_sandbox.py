"""Programs that attack the sandbox: each ends within its limits, leaves no process, and reaches nothing outside."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel.errors import ConfigError, LaunchError
from hyper_parallel.rl.rewards import sandbox, sandbox_fork_server
from hyper_parallel.rl.rewards.sandbox import Limits, run

ISOLATES = not run("pass").missing
needs_isolation = pytest.mark.skipif(not ISOLATES, reason="this machine does not allow namespaces")
BOTH = pytest.mark.parametrize("isolation", ["preferred", "none"])
KEYS = {"x86_64": (248, 250), "aarch64": (217, 219)}
"""Numbers of add_key(2) and keyctl(2)."""
SHORT = Limits(wall_s=1.5, cpu_s=5)


def _left(word: str) -> list[str]:
    """Processes whose name or command line holds a word that the program put there."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if word in (folder / "comm").read_text() + (folder / "cmdline").read_text():
                    found.append(folder.name)
            except OSError:
                continue
    return found


@pytest.fixture
def word() -> Iterator[str]:
    """A word for command lines; no process with it may be left."""
    word = f"attack{secrets.token_hex(4)}"  # 15 characters at most
    yield word
    end = time.monotonic() + 5
    while _left(word) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _left(word)


def test_input_output_and_exit_code() -> None:
    outcome = run(
        "import sys\nprint(sys.stdin.read()[::-1])\nprint('e', file=sys.stderr)\nsys.exit(3)", b"abc"
    )
    assert (outcome.ended, outcome.code, outcome.stdout, outcome.stderr) == ("exit", 3, b"cba\n", b"e\n")
    assert not outcome.succeeded
    assert run("x = 1").succeeded


def test_a_large_input_that_is_not_read_is_no_obstacle() -> None:
    assert run("print(1)", b"x" * 10_000_000).stdout == b"1\n"
    assert run("import sys; print(len(sys.stdin.buffer.read()))", b"x" * 3_000_000).stdout == b"3000000\n"


def test_a_traceback_shows_the_program_only() -> None:
    outcome = run("def f():\n    return 1 / 0\nf()")
    assert outcome.code == 1
    assert outcome.stderr.startswith(
        b'Traceback (most recent call last):\n  File "program.py", line 3, in <module>'
    )


def test_the_program_is_the_main_module_and_exits_normally() -> None:
    program = """
        import atexit, dataclasses, threading
        @dataclasses.dataclass
        class A:
            x: "int"
        atexit.register(print, "bye")
        threading.Timer(0.05, print, ["late"]).start()
        print(__name__, A(1))
    """
    assert run("\n".join(line[8:] for line in program.splitlines())).stdout == b"__main__ A(x=1)\nlate\nbye\n"


def test_a_program_ends_as_it_does_in_python() -> None:
    """What it has is let go of, and written, though the interpreter is not taken apart."""
    program = """
import atexit, sys, threading
class A:
    def __del__(self): print("gone", self.name)
def made(name):
    one = A(); one.name = name; one.self = one
    return one
a, out = made("a"), open(1, "w", closefd=False)
atexit.register(out.write, "kept\\n")
threading.Thread(target=print, args=["thread"]).start()
def daemon():
    while True: threading.Event().wait(0.01)
if sys.stdin.read():
    threading.Thread(target=daemon, daemon=True).start()
sys.exit("why")
"""
    outcome = run(program)
    assert (outcome.code, outcome.stderr) == (1, b"why\n")
    assert sorted(outcome.stdout.split(b"\n")) == [b"", b"gone a", b"kept", b"thread"]
    assert run(program, b"1").stderr == b"why\n"
    assert [run(f"import sys; sys.exit({code})").code for code in ("None", "256 + 7", "-1", "[]")] == [
        0,
        7,
        255,
        1,
    ]
    assert run("import os, sys; sys.stdout.write('x'); os.close(1)").code == 120


def test_sets_have_the_same_order_in_each_run() -> None:
    program = "print(list({str(number) for number in range(50)}))"
    assert run(program).stdout == run(program).stdout


@BOTH
def test_a_fork_bomb_is_bounded(isolation: sandbox.Isolation, word: str) -> None:
    program = f"""
import ctypes, os
ctypes.CDLL(None).prctl(15, {word!r}.encode(), 0, 0, 0)  # PR_SET_NAME, which children inherit
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    outcome = run(program, limits=SHORT, isolation=isolation)
    assert outcome.ended in ("wall time", "cpu time")
    assert run("print(1)").stdout == b"1\n"


@needs_isolation
def test_the_number_of_processes_and_threads_is_limited() -> None:
    program = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    print(made)
"""
    assert run(program, limits=Limits(processes=5)).stdout == b"4\n"


@BOTH
def test_endless_output_is_cut(isolation: sandbox.Isolation) -> None:
    for stream in ("stdout", "stderr"):
        program = f"import sys\nwhile True:\n    sys.{stream}.write('x' * 1000)"
        outcome = run(program, limits=Limits(output_bytes=5000), isolation=isolation)
        assert outcome.ended == "output"
        assert len(getattr(outcome, stream)) == 5000


@BOTH
def test_memory_is_limited(isolation: sandbox.Isolation) -> None:
    outcome = run("x = bytearray(10**9)", limits=Limits(memory_bytes=200 << 20), isolation=isolation)
    assert outcome.code == 1
    assert b"MemoryError" in outcome.stderr
    assert run("x = bytearray(10**8)", limits=Limits(memory_bytes=200 << 20), isolation=isolation).succeeded


@needs_isolation
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        outcome = run(program)
        assert outcome.code == 1
        assert b"unreachable" in outcome.stderr or b"refused" in outcome.stderr
        assert b"OSError" in run("import socket; socket.create_connection(('192.0.2.1', 80), 1)").stderr
    name = f"\0hyper-parallel-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)  # of the abstract name space, which has no files
        server.listen()
        program = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({name!r})"
        assert b"refused" in run(program).stderr


@needs_isolation
def test_no_file_outside_can_be_read_or_written(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("answer")
    tmp_path.chmod(0o777)
    for attack in (
        f"open({str(secret)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "open('/usr/new', 'w')",
        "open('/new', 'w')",
        "import os; os.mkdir('/dev/new')",
        "import json; open(json.__file__, 'a')",
        "import os; os.chdir('..'); os.chroot('..'); open('../../../etc/passwd')",
    ):
        outcome = run(attack)
        assert outcome.code == 1, attack
        assert b"Error" in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@needs_isolation
def test_privileges_cannot_be_regained() -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print([libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)])
print(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))
for change in (os.setuid, os.seteuid, os.setgid):
    try:
        change(0)
        print("changed")
    except OSError:
        pass
print(open("/dev/null").read() == "", os.listdir("/tmp"))
"""
    assert run(program).stdout == b"[-1, -1, -1]\n-1\nTrue []\n"


@BOTH
def test_the_working_folder_is_empty_and_removed(isolation: sandbox.Isolation, tmp_path: Path) -> None:
    program = "import os; print(os.listdir()); open('f', 'w').write('x'); os.mkdir('d'); print(os.getcwd())"
    first, second = (run(program, isolation=isolation).stdout.decode().split() for _ in range(2))
    assert first[0] == second[0] == "[]"
    if isolation == "none":
        assert not Path(first[1]).exists()


@BOTH
def test_a_child_in_a_session_of_its_own_dies_too(isolation: sandbox.Isolation, word: str) -> None:
    program = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)", {word!r}]
        os.execv(sys.executable, sleep)
    os._exit(0)
time.sleep(0.3)
"""
    outcome = run(program, isolation=isolation)
    assert outcome.succeeded, outcome
    assert outcome.wall_s < 60


@BOTH
def test_a_program_that_stops_itself_ends_at_the_limit(isolation: sandbox.Isolation) -> None:
    outcome = run(
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", limits=SHORT, isolation=isolation
    )
    assert outcome.ended == "wall time"


def test_processor_time_is_limited() -> None:
    deaf = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(deaf, limits=Limits(wall_s=120, cpu_s=1)).ended == "cpu time"


def test_a_signal_is_reported() -> None:
    outcome = run("import os; os.kill(os.getpid(), 9)")
    assert (outcome.ended, outcome.code) == ("signal", 9)
    assert run("import os; os.abort()").ended == "signal"


@BOTH
def test_the_environment_is_empty(isolation: sandbox.Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    program = "import os; print(dict(os.environ), os.listdir('/proc') if os.path.isdir('/proc') else [])"
    outcome = run(program, isolation=isolation)
    assert outcome.stdout.startswith(b"{} ")
    if ISOLATES and isolation == "preferred":
        assert outcome.stdout == b"{} []\n"


CALLS = {
    "x86_64": {"shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "mq_open": 240, "memfd_create": 319},
    "aarch64": {
        "shmget": 194,
        "shmat": 196,
        "semget": 190,
        "msgget": 186,
        "mq_open": 180,
        "memfd_create": 279,
    },
}


def _objects() -> list[str]:
    """System V objects of this machine."""
    return [
        line
        for kind in ("shm", "sem", "msg")
        for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
    ]


@BOTH
def test_memory_that_no_limit_counts_is_refused(isolation: sandbox.Isolation) -> None:
    calls = CALLS[platform.machine()]
    before = _objects()
    program = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {calls}.items():
    arguments = [0, 4096, 0o1600] if name.endswith("get") else [b"/name", 0, 0]
    print(name, libc.syscall(number, *arguments), ctypes.get_errno())
child = os.fork()
if not child:
    os._exit(libc.shmget(0, 4096, 0o1600) != -1)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    outcome = run(program, isolation=isolation)
    assert outcome.stdout.decode().split("\n") == [*(f"{name} -1 1" for name in calls), "0", ""]
    assert _objects() == before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the calls of 32-bit programs")
def test_calls_of_another_architecture_end_the_program() -> None:
    # mov eax, 20 (getpid of i386); int 0x80; ret
    program = (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    )
    outcome = run(program)
    assert outcome.ended == "signal" and outcome.code in (11, 31)


def test_a_machine_without_filters_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _changed(monkeypatch, "_libc.prctl(_GET_SECCOMP", "(lambda *_: -1)(_GET_SECCOMP")
    monkeypatch.setattr(sandbox, "_warned", False)
    assert run("print(1)").missing[-1:] == ("shared memory",)
    assert "shared memory on this machine" in caplog.text


@needs_isolation
def test_files_are_limited_each_and_together() -> None:
    limits = Limits(disk_bytes=1 << 20)
    one = run("f = open('f', 'wb'); f.write(bytes(2 << 20)); f.flush()", limits=limits)
    assert one.code == 1 or one.ended == "signal"
    many = "for i in range(100):\n    with open(str(i), 'wb') as f: f.write(bytes(100_000))"
    assert b"No space left" in run(many, limits=limits).stderr


def test_open_files_are_limited() -> None:
    assert b"Too many open files" in run("x = [open('/dev/null') for _ in range(100)]").stderr


@needs_isolation
def test_other_processes_are_invisible() -> None:
    program = f"""
import os
try:
    os.kill({os.getpid()}, 0)
except ProcessLookupError:
    print("none")
try:
    os.kill(-1, 9)
except OSError as error:
    print(error)
"""
    outcome = run(program)
    assert outcome.stdout.startswith(b"none")
    assert run("import os; os.kill(1, 9); print(1)").stdout == b"1\n"


def test_a_program_that_does_not_compile() -> None:
    assert b"SyntaxError" in run("def").stderr
    assert run("x = '\ud800'").ended == "exit"
    assert run("\0").code == 1


def test_runs_at_one_time_do_not_disturb_one_another() -> None:
    outputs: dict[int, bytes] = {}

    def one(number: int) -> None:
        outputs[number] = run(f"open('f', 'x').write('x'); print({number})").stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"{number}\n".encode() for number in range(6)}


def _changed(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """A fork server whose launchers have another line."""
    source = Path(sandbox.__file__).with_name("sandbox_launcher.py").read_text()
    assert source.count(old) >= 1
    code = compile(source.replace(old, new), "launcher", "exec")
    monkeypatch.setattr(sandbox_fork_server, "launcher", lambda: code)
    monkeypatch.setattr(sandbox_fork_server, "_of_thread", threading.local())


def test_what_is_not_isolated_is_one_warning_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A kernel that refuses unshare(2), as in most containers.
    _changed(monkeypatch, "_libc.unshare(flags", "(lambda *_: -1)(flags")
    monkeypatch.setattr(sandbox, "_warned", False)
    with caplog.at_level(logging.WARNING):
        assert run("print(1)").missing == ("network", "processes", "files")
        assert run("print(1)").stdout == b"1\n"
    assert len(caplog.records) == 1
    assert "network, processes and files" in caplog.text
    with pytest.raises(ConfigError, match="cannot isolate network, processes and files"):
        run("print(1)", isolation="required")


@needs_isolation
def test_a_kernel_that_keeps_its_file_system_still_isolates_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _changed(monkeypatch, "_PIVOT_ROOT[os.uname().machine]", "_PIVOT_ROOT['?']")
    monkeypatch.setattr(sandbox, "_warned", False)
    program = "import os, json; open('f', 'w').write('x'); print(os.getpid(), os.getcwd())"
    outcome = run(program)
    assert outcome.missing == ("files",)
    pid, folder = outcome.stdout.decode().split()
    assert (int(pid), Path(folder).exists()) == (2, False)
    assert "does not isolate files on this machine" in caplog.text
    assert b"unreachable" in run("import socket; socket.create_connection(('192.0.2.1', 80), 1)").stderr


def test_a_machine_without_processes_says_nothing_about_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in (
        ("    first = os.fork()", "    raise OSError('no process')"),  # in the launcher
        ("launcher = os.fork()", "raise OSError(11, '')"),  # in the server
        ("    if os.getppid() != parent:", "    raise OSError('no process')\n    if True:"),
    ):
        with monkeypatch.context() as patch:
            _changed(patch, old, new)
            for _ in range(2):
                with pytest.raises(
                    LaunchError, match=r"could not start a program: .*(no process|unavailable)"
                ):
                    run("pass")
    assert run("print(1)").stdout == b"1\n"


@BOTH
def test_a_program_sees_nothing_of_another_one(isolation: sandbox.Isolation) -> None:
    """Nor a descriptor of the fork server."""
    attack = "import math, signal, sys; secret = 1; math.pi = 3; sys.setrecursionlimit(77); signal.signal(10, print)"
    assert run(attack, isolation=isolation).succeeded
    search = """
import math, os, signal, sys
opened = []
for descriptor in range(256):
    try:
        os.fstat(descriptor)
        opened.append(descriptor)
    except OSError:
        pass
print(opened, math.pi == 3.141592653589793, sys.getrecursionlimit(), "secret" in globals(), signal.getsignal(10))
"""
    outcome = run(search, isolation=isolation)
    assert outcome.stdout == b"[0, 1, 2] True 1000 False 0\n", outcome


def test_the_memory_of_the_server_has_no_program() -> None:
    """All of it is searched, from outside: a fork has a copy of it."""
    secret = secrets.token_hex(16).encode()
    program = (
        f"import sys; print({secret.decode()!r}[:2] + sys.stdin.read()[:2]); sys.exit('{secret.decode()}')"
    )
    for _ in range(3):
        assert run(program, secret).code == 1
    server = sandbox_fork_server.fork_server()
    process = Path(f"/proc/{server._process.pid}")
    size = 0
    with (process / "mem").open("rb", buffering=0) as memory:
        for line in (process / "maps").read_text().splitlines():
            span, mode, *rest = line.split()
            if not mode.startswith("rw") or rest[-1].startswith("[v"):
                continue
            first, end = (int(place, 16) for place in span.split("-"))
            memory.seek(first)
            found = memory.read(end - first)
            size += len(found)
            assert secret not in found
    assert size > 1 << 20


@pytest.mark.skipif(platform.machine() not in KEYS, reason="the numbers of system calls are others")
def test_keys_of_the_kernel_end_with_a_program() -> None:
    """Also where the caller has a keyring of its session, which its processes inherit (keyrings(7))."""
    add, control = KEYS[platform.machine()]
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
there = libc.syscall({control}, 10, -3, b"user", b"attack", 0)  # KEYCTL_SEARCH of the session's keyring
print(there, libc.syscall({add}, b"user", b"attack", b"secret", 6, -3) > 0)
"""
    outputs: list[bytes] = []

    def in_a_session() -> None:
        if ctypes.CDLL(None).syscall(control, 1, None) > 0:  # KEYCTL_JOIN_SESSION_KEYRING
            outputs.extend(run(program).stdout for _ in range(2))

    thread = threading.Thread(target=in_a_session)
    thread.start()
    thread.join()
    if not outputs:
        pytest.skip("this kernel has no keys for this process")
    assert outputs in ([b"-1 True\n"] * 2, [b"-1 False\n"] * 2)


@needs_isolation
def test_nothing_runs_when_a_program_was_killed(word: str) -> None:
    """Also what it left behind, at once: another program starts in the same server."""
    program = f"""
import ctypes, os, time
ctypes.CDLL(None).prctl(15, {word!r}.encode(), 0, 0, 0)
for _ in range(2):
    os.fork()
    os.getpgid(0) == os.getpid() or os.setsid()
time.sleep(600)
"""
    assert run(program, limits=Limits(wall_s=0.5)).ended == "wall time"
    assert not _left(word)


def test_a_server_that_was_killed_is_started_again() -> None:
    run("print(1)")
    server = sandbox_fork_server.fork_server()
    os.kill(server._process.pid, 9)
    assert run("print(1)").stdout == b"1\n"
    assert sandbox_fork_server.fork_server() is not server


def test_the_server_ends_with_its_thread(word: str) -> None:
    """And what it runs."""
    program = f"""
import os, sys
os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", {word!r}])
"""
    pids: list[int] = []

    def short() -> None:
        run("pass")
        pids.append(sandbox_fork_server.fork_server()._process.pid)

    thread = threading.Thread(target=short)
    thread.start()
    thread.join()
    end = time.monotonic() + 5
    while Path(f"/proc/{pids[0]}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{pids[0]}").exists()

    child = os.fork()
    if not child:
        threading.Timer(0.5, os._exit, [0]).start()
        run(program)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_of_the_caller_has_its_own_server() -> None:
    run("pass")
    mine = sandbox_fork_server.fork_server()._process.pid
    child = os.fork()
    if not child:
        good = run("print(1)").stdout == b"1\n" and sandbox_fork_server.fork_server()._process.pid != mine
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sandbox_fork_server.fork_server()._process.pid == mine
    assert run("print(2)").stdout == b"2\n"


def test_no_descriptor_is_left_open() -> None:
    run("print(1)")
    before = len(os.listdir("/proc/self/fd"))
    for limits in (Limits(), Limits(wall_s=0.05), Limits(output_bytes=10)):
        run("while True: print('x' * 100)", limits=limits)
    assert len(os.listdir("/proc/self/fd")) == before
