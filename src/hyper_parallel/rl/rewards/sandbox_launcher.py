"""The sandbox's inside: isolates itself with namespaces and limits, then runs one program.

An interpreter that `sandbox_fork_server` starts executes this module's code; nothing else imports it, and it imports
nothing of HyperParallel. Four processes take part:

- the fork server (`serve`) forks a launcher for each program, which reads what it shall run from its own standard
  input: the server's memory holds nothing of any program;
- the launcher makes the namespaces and the file system, and waits; the program cannot see it;
- the first process of the PID namespace waits for the program; the kernel kills the whole namespace when it ends;
- the program.

With a PID namespace the kernel ends every descendant, whatever session it is in. Without one the launcher is a
"child subreaper" (prctl(2)), to which orphans are handed, and it kills its descendants itself.
"""

from __future__ import annotations

import _socket
import atexit
import ctypes
import gc
import io
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # to import `typing` takes longer than to isolate
    from typing import Any, NoReturn

# unshare(2), mount(2), prctl(2), capset(2)
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PDEATHSIG, _DUMPABLE, _KEEPCAPS, _GET_SECCOMP, _SET_SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = (
    1,
    4,
    8,
    21,
    22,
    36,
    38,
)
_FILTER = 2
"""Mode of seccomp(2)."""
_DAC_READ_SEARCH = 1 << 2
_CAPABILITY_VERSION = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "loongarch64": 41, "ppc64le": 203}
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "loongarch64": 219, "ppc64le": 271}
_JOIN_SESSION = 1
_NSFLAGS = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of statvfs(3) to those of mount(2). A remount in a user namespace may not drop any of them."""
_KILL, _TERM = 9, 15
_GRACE_S = 5.0
"""For a launcher without a PID namespace to kill its descendants."""
_FIRST_UID = 0x60000000
"""Of user ids that no account has. Root's programs get one each, which bounds the number of processes of each."""

_LOADED = (
    "bisect",
    "collections",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "re",
    "string",
    "typing",
)
"""Modules that programs often import, which takes longer than to isolate them. A program has its own copy of each."""

_libc: Any = None


def serve(control: int, parent: int) -> NoReturn:
    """Fork launchers, one after another, until the other end of the socket `control` is closed or `parent` ends. Never
    returns; raises in a launcher's process only.

    `f` with four descriptors (the program's standard streams, and the launcher's reports) is answered by the process id
    of a launcher, or the negative number of an error, in 8 bytes; then `k`, or `t` for one without a PID namespace,
    ends it and all that it left, and is answered by the same byte.
    """
    global _libc
    _libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform.startswith("linux"):
        for name in ("capset", "mount", "prctl", "syscall", "umount2", "unshare"):
            getattr(_libc, name)  # found here once, and not in each fork
        _libc.prctl(_PDEATHSIG, _KILL)
        _libc.prctl(_SUBREAPER, 1)
        # A program of the same user, where there are no namespaces, cannot trace the server of those after it.
        _libc.prctl(_DUMPABLE, 0)
    if os.getppid() != parent:
        os._exit(1)
    channel, own = _socket.socket(fileno=control), os.getpid()
    for name in _LOADED:
        __import__(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, the pages of all that was made until now
    launcher = 0
    reply = b"r"
    while True:
        try:
            channel.sendall(reply)
            asked, files = _asked(channel)
        except OSError:
            asked, files = b"", []
        if not asked:
            os._exit(0)
        reply = asked
        if asked == b"f":
            try:
                launcher = os.fork()
            except OSError as error:
                launcher = -(error.errno or 1)
            if launcher == 0:
                channel.detach()
                _begin(files, own)
            for descriptor in files:
                os.close(descriptor)
            reply = launcher.to_bytes(8, "little", signed=True)
        else:
            _finish(launcher, gently=asked == b"t")


def _asked(channel: _socket.socket) -> tuple[bytes, list[int]]:
    """A request and its descriptors."""
    size = 4
    asked, given, _, _ = channel.recvmsg(1, _socket.CMSG_SPACE(4 * size))
    data = b"".join(part for _, _, part in given)
    return asked, [int.from_bytes(data[at : at + size], sys.byteorder) for at in range(0, len(data), size)]


def _begin(files: list[int], parent: int) -> NoReturn:
    """The launcher: its descriptors are the standard ones and its reports' (3), and no other."""
    os.setsid()
    for target, descriptor in enumerate(files):
        os.dup2(descriptor, target, inheritable=target < 3)
    os.closerange(4, 64)
    settings, program = marshal.loads(_read(int.from_bytes(_read(8), "little")))
    _main({**settings, "parent": parent, "status": 3}, program)


def _read(count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = os.read(0, count - len(found))
        if not part:
            os._exit(1)
        found += part
    return found


def _finish(launcher: int, gently: bool) -> None:
    """End a launcher and all that it left."""
    _kill(launcher, _TERM if gently else _KILL)
    end = time.monotonic() + (_GRACE_S if gently else 0)
    while not os.waitpid(launcher, os.WNOHANG)[0]:
        if time.monotonic() >= end:
            _kill(launcher)
            os.waitpid(launcher, 0)
            break
        time.sleep(0.001)
    if not sys.platform.startswith("linux"):
        _kill(-launcher)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # the usual case: nothing is left
        return
    _kill_descendants(None)


def _main(settings: dict[str, Any], program: str) -> NoReturn:
    """Run a program. `settings`: see `sandbox.run`."""
    linux = sys.platform.startswith("linux")
    if linux:
        _libc.prctl(_PDEATHSIG, _KILL)
        _libc.prctl(
            _DUMPABLE, 1
        )  # else /proc/self belongs to root, and the maps of a user namespace are in it
        # A keyring of its own: what the caller's session has, if any, programs would share.
        _libc.syscall(_KEYCTL.get(os.uname().machine, -1), _JOIN_SESSION, None)
    if os.getppid() != settings["parent"]:
        os._exit(1)
    status: int = settings["status"]
    os.umask(0o022)
    private, identity, missing = _isolated(settings) if linux and settings["isolate"] else (False, False, ALL)
    # The kernel has no filters, or none is known for this machine: System V objects are not refused.
    filters: bytes = settings["filter"]
    if linux and (not filters or _libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) < 0):
        filters, missing = b"", (*missing, "shared memory")
    folder = ""
    if "files" in missing:
        folder = f"{settings['temporary']}/hyper-parallel-sandbox-{os.getpid()}-{os.urandom(8).hex()}"
    os.write(status, f"missing {','.join(missing)}\nfolder {folder}\n".encode())
    if missing and settings["required"]:
        os._exit(0)
    if folder:
        os.mkdir(folder, 0o700)
        os.chdir(folder)
    user, reads = _user(folder, identity)
    if linux and not private:
        _libc.prctl(_SUBREAPER, 1)
    # Of the first process and, in a user namespace, of this one.
    others = 2 if identity else 1
    if not private and user is None:
        others = _processes_of(os.getuid())
    alive, held = os.pipe()
    first = os.fork()
    if first:
        os.close(alive)
        _wait(first, private, user, status)
    os.close(held)
    _drop(user, reads)
    if linux:
        _libc.prctl(_PDEATHSIG, _KILL)
        _libc.prctl(_DUMPABLE, 0)  # so that the program cannot trace the first process
        if _ended(alive):
            os._exit(1)
    child = os.fork()
    if child:
        _reap(child, status)
    os.close(alive)
    _limit(settings, others)
    if linux and filters:
        _filter(filters)
    os.write(status, b"ready\n")
    os.close(status)
    _execute(program)


ALL = ("network", "processes", "files")
"""All kinds of isolation by namespaces; `missing` lists those that this machine does not allow."""


def _isolated(settings: dict[str, Any]) -> tuple[bool, bool, tuple[str, ...]]:
    """(own PID namespace, own user namespace, what is not isolated)."""
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    user, group = os.getuid(), os.getgid()
    identity = False
    if user or _libc.unshare(flags):
        if _libc.unshare(flags | _NEWUSER):
            return False, False, ALL
        identity = True
        try:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"65534 {user} 1")
            _write("/proc/self/gid_map", f"65534 {group} 1")
        except OSError:
            return True, True, ("files",)
    try:
        _make_root(settings)
    except (OSError, KeyError):
        return True, identity, ("files",)
    return True, identity, ()


def _make_root(settings: dict[str, Any]) -> None:
    """Change to a file system of the interpreter's own files, read-only, and a small folder in memory: /tmp."""
    _mount(None, "/", None, _REC | _PRIVATE)
    base = next(path for path in ("/sys", "/mnt", "/media", "/srv") if os.path.isdir(path))
    _mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    root = base + "/root"  # below the top, since the kernel refuses user namespaces to a process in a chroot
    os.mkdir(root)
    for path in settings["paths"]:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            os.makedirs(root + path)
            _bind(path, root + path)
        elif os.path.exists(path):
            _bind_file(path, root + path)
    for name in ("null", "zero", "urandom"):
        _bind_file("/dev/" + name, f"{root}/dev/{name}", writable=True)
    os.mkdir(root + "/tmp")
    options = f"size={settings['disk']},nr_inodes=4096,mode=1777"
    _mount("tmpfs", root + "/tmp", "tmpfs", _NOSUID | _NODEV, options)
    _mount(None, base, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(base)
    # The old root is stacked over the new one, and then taken off: pivot_root(2), "pivot_root(".", ".")".
    _checked(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."))
    _checked(_libc.umount2(b".", _DETACH))
    os.chroot("/root")
    os.chdir("/tmp")


def _bind_file(path: str, target: str, writable: bool = False) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _bind(path, target, writable)


def _bind(path: str, target: str, writable: bool = False) -> None:
    _mount(path, target, None, _BIND | _REC)
    if not writable:
        present = os.statvfs(target).f_flag
        flags = sum(mount for found, mount in _NSFLAGS.items() if present & found)
        _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | flags & ~(_RDONLY | _NOSUID))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    _checked(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _user(folder: str, identity: bool) -> tuple[int | None, bool]:
    """(the user id to change to, whether it needs root's right to read); None if this process is not root."""
    if identity or os.getuid():
        return None, False
    user = _FIRST_UID + os.getpid() % 0x10000000
    if not folder:
        return user, False
    os.chown(folder, user, user)
    library = os.path.dirname(os.__file__)
    os.seteuid(user)
    try:
        os.listdir(library)
        return user, False
    except OSError:  # an interpreter below /root
        return user, True
    finally:
        os.seteuid(0)


def _drop(user: int | None, reads: bool) -> None:
    """Give up every privilege, for good, except reading (`reads`)."""
    linux = sys.platform.startswith("linux")
    if user is not None:
        if linux and reads:
            _libc.prctl(_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if linux:
        _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        right = _DAC_READ_SEARCH if reads else 0
        _libc.capset(header, (ctypes.c_uint32 * 6)(right, right))


def _limit(settings: dict[str, Any], others: int) -> None:
    cpu: int = settings["cpu"]
    wanted = {
        "CPU": (cpu, cpu + 1),
        "AS": (settings["memory"],) * 2,
        "FSIZE": (settings["disk"],) * 2,
        "NOFILE": (settings["files"],) * 2,
        "NPROC": (settings["processes"] + others,) * 2,
        "CORE": (0, 0),
        "MEMLOCK": (0, 0),
        "MSGQUEUE": (0, 0),
    }
    for name, pair in wanted.items():
        kind = getattr(resource, "RLIMIT_" + name, None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            pair = (min(pair[0], hard), min(pair[1], hard))
        resource.setrlimit(kind, pair)


def _filter(program: bytes) -> None:
    """Put this process under a filter of system calls (`seccomp`), which what it forks inherits."""
    # struct sock_fprog: the number of instructions of 8 bytes, and, after padding, their address.
    code = ctypes.create_string_buffer(program, len(program))
    header = (ctypes.c_size_t * 2)(len(program) // 8, ctypes.addressof(code))
    _checked(_libc.prctl(_SET_SECCOMP, _FILTER, header, 0, 0))


def _execute(program: str) -> NoReturn:
    os.environ.clear()
    sys.argv = ["program.py"]
    names = sys.modules["__main__"].__dict__
    builtins = names["__builtins__"]
    names.clear()
    names.update({"__name__": "__main__", "__builtins__": builtins, "__doc__": None, "__spec__": None})
    # Interpreters have them from `site`, which takes longer to import than the rest.
    builtins.exit = builtins.quit = sys.exit
    if not os.path.exists("/dev/stdin"):
        builtins.open = io.open = _opening(io.open)
    code = 0
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), names)
    except SystemExit as end:
        code = _code(end.code)
    except BaseException as error:
        shown = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        code = 1
    _leave(names, code)


def _opening(original: Any) -> Any:
    """`open`, for which /dev/stdin and its like are there: they are links into /proc, which programs do not have."""
    streams = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}

    def open(file: Any, *given: Any, **named: Any) -> Any:
        name = file if isinstance(file, int) else os.fspath(file)
        return original(os.dup(streams[name]) if name in streams else file, *given, **named)

    return open


def _code(given: object) -> int:
    """The exit code of `sys.exit(given)`, which writes a text."""
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 0xFF
    sys.stderr.write(f"{given}\n")
    return 1


def _leave(names: dict[str, Any], code: int) -> NoReturn:
    """End as Python does (Py_FinalizeEx): wait for threads, call what `atexit` has, let go of what the program has, and
    flush. The rest of the interpreter stays as it is: to take it apart would copy most of its memory from the server.
    """
    threading = sys.modules.get("threading")
    if threading is not None:
        try:
            threading._shutdown()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    code = _flushed(code)
    if len(sys._current_frames()) == 1:  # a daemon thread would go on without its names
        for name in list(names):
            if name != "__builtins__":
                names[name] = None
        gc.collect()
        code = _flushed(code)
    os._exit(code)


def _flushed(code: int) -> int:
    """The code, or Python's 120 where standard output cannot be written."""
    for name in ("stdout", "__stdout__", "stderr", "__stderr__"):
        stream = getattr(sys, name, None)
        if stream is not None and not getattr(stream, "closed", False):
            try:
                stream.flush()
            except BaseException:
                code = 120 if "out" in name else code
    return code


def _wait(first: int, private: bool, user: int | None, status: int) -> NoReturn:
    """Wait for the first process. The launcher holds no end of a pipe that the program writes to."""
    for descriptor in (0, 1, 2, status):
        os.close(descriptor)
    if private:
        os.waitpid(first, 0)
        os._exit(0)
    import _signal  # type: ignore[import-not-found]  # `signal` takes as long to import as all the rest

    def end(*_: object) -> None:
        _kill_descendants(user)
        os._exit(0)

    _signal.signal(_TERM, end)
    while os.waitpid(-1, 0)[0] != first:
        pass
    end()
    raise AssertionError


def _reap(child: int, status: int) -> NoReturn:
    """Wait for the program, and for the orphans that the kernel hands to this process; report how it ended."""
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        ended, code, used = os.wait4(-1, 0)
        if ended == child:
            break
    how = f"signal {os.WTERMSIG(code)}" if os.WIFSIGNALED(code) else f"exit {os.WEXITSTATUS(code)}"
    os.write(status, f"{how} {round((used.ru_utime + used.ru_stime) * 1000)}\n".encode())
    os._exit(0)


def _ended(pipe: int) -> bool:
    """Whether the launcher has ended, and so closed its end: before this process asked to be killed with it."""
    return bool(select.select([pipe], [], [], 0)[0])


def _kill_descendants(user: int | None) -> None:
    """Kill all processes of the program's own user, or else this process's descendants, over and over until there is
    none: they may fork meanwhile.
    """
    if user is not None:
        killer = os.fork()
        if not killer:
            os.setresuid(user, user, user)
            _kill(-1)
            os._exit(0)
        os.waitpid(killer, 0)
    for _ in range(1000):
        parents = {pid: parent for pid, parent, _, _ in _processes()}
        ours: set[int] = set()
        wave = {os.getpid()}
        while wave:
            wave = {pid for pid, parent in parents.items() if parent in wave} - ours
            ours |= wave
        if not ours:
            return
        for pid in ours:
            _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except OSError:
            pass


def _kill(pid: int, signal: int = _KILL) -> None:
    try:  # noqa: SIM105 (to import contextlib takes longer than the rest)
        os.kill(pid, signal)
    except OSError:
        pass


def _processes_of(user: int) -> int:
    """The number of a user's threads, which is what the kernel compares with RLIMIT_NPROC."""
    return sum(threads for _, _, owner, threads in _processes() if owner == user)


def _processes() -> list[tuple[int, int, int, int]]:
    """(process, parent, user, threads) of each process that this one can see. Empty without a /proc."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                found.append((int(name), int(fields[1]), os.stat(f"/proc/{name}").st_uid, int(fields[17])))
            except OSError:
                pass
    return found
