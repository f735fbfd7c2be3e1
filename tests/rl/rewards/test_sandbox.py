"""Programs that attack the sandbox: each ends within its limits, leaves no process, and reaches nothing outside."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel.errors import ConfigError, LaunchError
from hyper_parallel.rl.rewards import sandbox
from hyper_parallel.rl.rewards.sandbox import Limits, run

ISOLATES = not run("pass").missing
needs_isolation = pytest.mark.skipif(not ISOLATES, reason="this machine does not allow namespaces")
BOTH = pytest.mark.parametrize("isolation", ["preferred", "none"])
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


def test_what_is_not_isolated_is_one_warning_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = Path(sandbox.__file__).with_name("sandbox_launcher.py").read_text()
    # A kernel that refuses unshare(2), as in most containers.
    refused = compile(source.replace("_libc.unshare(flags", "(lambda *_: -1)(flags"), "launcher", "exec")
    monkeypatch.setattr(sandbox, "_launcher", lambda: refused)
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
    source = Path(sandbox.__file__).with_name("sandbox_launcher.py").read_text()
    code = compile(source.replace("_PIVOT_ROOT[os.uname().machine]", "_PIVOT_ROOT['?']"), "launcher", "exec")
    monkeypatch.setattr(sandbox, "_launcher", lambda: code)
    monkeypatch.setattr(sandbox, "_warned", False)
    program = "import os, json; open('f', 'w').write('x'); print(os.getpid(), os.getcwd())"
    outcome = run(program)
    assert outcome.missing == ("files",)
    pid, folder = outcome.stdout.decode().split()
    assert (int(pid), Path(folder).exists()) == (2, False)
    assert "does not isolate files on this machine" in caplog.text
    assert b"unreachable" in run("import socket; socket.create_connection(('192.0.2.1', 80), 1)").stderr


def test_a_machine_without_processes_says_nothing_about_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(sandbox.__file__).with_name("sandbox_launcher.py").read_text()
    broken = compile(
        source.replace("    first = os.fork()", "    raise OSError('no process')"), "launcher", "exec"
    )
    monkeypatch.setattr(sandbox, "_launcher", lambda: broken)
    with pytest.raises(LaunchError, match="could not start a program: OSError: no process"):
        run("pass")


def test_no_descriptor_is_left_open() -> None:
    run("print(1)")
    before = len(os.listdir("/proc/self/fd"))
    for limits in (Limits(), Limits(wall_s=0.05), Limits(output_bytes=10)):
        run("while True: print('x' * 100)", limits=limits)
    assert len(os.listdir("/proc/self/fd")) == before
