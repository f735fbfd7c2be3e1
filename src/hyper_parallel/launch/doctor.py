"""Doctor: checks of the machine and the installation, and a bundle for bug reports."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import shutil
import socket
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hyper_parallel._version import __version__
from hyper_parallel.errors import ConfigError, HyperParallelError
from hyper_parallel.launch import logs, rendezvous
from hyper_parallel.proc import MEMORY, bytes_in, cores
from hyper_parallel.units import format_bytes

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "numpy",
    "datasets",
    "tensorboard",
    "wandb",
    "mlflow-skinny",
)
REQUIRED = {"torch": ("2.11", "2.14"), "transformers": ("5.3", None)}
"""Supported versions, as the package declares them: lower bound, and exclusive upper bound (None: open)."""

# Environment variables that a report may show. An allowlist, since secrets can have any name.
_SHOWN_PREFIXES = ("GLOO_", "MASTER_", "OMP_", "PYTORCH_", "SLURM_STEP_", "TORCH", "MKL_", "KMP_")
_SHOWN_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "LANG",
    "LC_ALL",
    "TERM",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
)
_LOW_MEMORY = 2 * 2**30
_LOW_DISK = 5 * 2**30
_LOW_FILES = 1024
_LOG_BYTES = 256 * 1024
_RUN_FILES = ("run.yaml", "summary.json")


def collect(integrations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The report, as data for JSON. Sizes are in bytes. Imports torch; problems that it finds do not raise.

    `integrations`: the status of each package of other trainers.
    """
    warnings: list[dict[str, str]] = []
    report: dict[str, Any] = {
        "versions": _versions(warnings),
        "integrations": dict(integrations or {}),
        "devices": _devices(warnings),
        "machine": _machine(warnings),
        "network": _network(warnings),
        "launcher": _launcher(warnings),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _SHOWN_NAMES or name.startswith(_SHOWN_PREFIXES)
        },
    }
    return {**report, "warnings": warnings}


def render(report: dict[str, Any], width: int = 110) -> str:
    """The report as a table to read, at most `width` columns wide, ending with the warnings."""
    # Recorded rather than printed, so that the command decides where it goes.
    console = Console(file=io.StringIO(), width=width, highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section in ("versions", "integrations", "devices", "machine", "network", "launcher", "environment"):
        if not report[section]:
            continue
        table.add_row(f"[bold]{section}[/bold]", "")
        for key, value in _rows(report[section]):
            table.add_row(escape(f"  {key}"), escape(value))
    console.print(table)
    for warning in report["warnings"]:
        console.print(f"warning: {warning['what']}; {warning['mend']}", markup=False)
    if not report["warnings"]:
        console.print("nothing stands in the way of a run")
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def bundle(path: Path, run: Path | None = None, report: dict[str, Any] | None = None) -> Path:
    """Write the material for a bug report to `path`, a .zip or .tar.gz, and return the path.

    The bundle has the doctor's `report`, collected now if none is given, and from a run's folder its configuration
    and the last parts of its metrics and of every rank's log. Only environment variables of a fixed list are included.
    Raises ConfigError for another suffix, a folder that is not there, or a path that cannot be written.
    """
    if not path.name.endswith((".zip", ".tar.gz", ".tgz")):
        raise ConfigError(f"a bundle is a .zip or a .tar.gz file; got {path.name!r}")
    if run is not None and not run.is_dir():
        raise ConfigError(f"there is no run's folder {run}; give the 'out' of the run file")
    report = report if report is not None else collect()
    members = {"doctor.json": json.dumps(report, indent=2), "doctor.txt": render(report)}
    if run is not None:
        members.update(_of_run(run))
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, text in members.items():
                    archive.writestr(name, text)
        else:
            with tarfile.open(path, "w:gz") as archive_tar:
                for name, text in members.items():
                    data = text.encode()
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    archive_tar.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give another place") from error
    return path


def _of_run(run: Path) -> Iterator[tuple[str, str]]:
    for name in _RUN_FILES:
        if (run / name).is_file():
            yield f"run/{name}", (run / name).read_text(errors="replace")
    for file in (run / "metrics.jsonl", *sorted((run / "logs").glob("rank-*.log"))):
        if file.is_file():
            yield f"run/{file.relative_to(run)}", logs.tail(file, _LOG_BYTES)


def _warn(warnings: list[dict[str, str]], what: str, mend: str) -> None:
    warnings.append({"what": what, "mend": mend})


def _versions(warnings: list[dict[str, str]]) -> dict[str, str]:
    versions = {
        "hyper-parallel": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in REQUIRED:
                _warn(warnings, f"{name} is not installed", f"pip install {name}")
            continue
        if name in REQUIRED:
            low, high = REQUIRED[name]
            found = _release(versions[name])
            if found < _release(low) or (high is not None and found >= _release(high)):
                wanted = f"{name}>={low}" + (f",<{high}" if high is not None else "")
                _warn(warnings, f"{name} {versions[name]} is not supported", f"pip install '{wanted}'")
    return versions


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _devices(warnings: list[dict[str, str]]) -> list[dict[str, Any]]:
    try:
        import torch

        from hyper_parallel import compat
    except Exception as error:
        _warn(
            warnings,
            f"torch cannot be imported: {error}",
            "reinstall it: pip install --force-reinstall torch",
        )
        return []
    devices: list[dict[str, Any]] = []
    for backend in (*compat.accelerators(), compat.backend("cpu")):
        for index in range(backend.device_count()):
            backend.set_device(backend.device(index))
            peak = backend.peak_flops(torch.bfloat16)
            devices.append(
                {
                    "device": str(backend.device(index)),
                    "name": backend.device_name(index),
                    "memory": backend.memory_total(),
                    "peak_bf16_flops": peak,
                    "collectives": backend.collective,
                    "driver": backend.driver(),
                    "links": backend.links() if index == 0 else [],
                }
            )
    for what, mend in compat.unused_accelerators():
        _warn(warnings, what, mend)
    return devices


def _machine(warnings: list[dict[str, str]]) -> dict[str, Any]:
    import resource

    available = bytes_in(MEMORY, "MemAvailable")
    if available is None:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    disk = shutil.disk_usage(Path.cwd())
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if available < _LOW_MEMORY:
        _warn(
            warnings,
            f"only {format_bytes(available)} of memory are available",
            "close other programs, or start fewer workers (each needs about 0.5 GiB before the model)",
        )
    if disk.free < _LOW_DISK:
        _warn(
            warnings,
            f"only {format_bytes(disk.free)} of disk are free here",
            "set 'out' to a larger disk; a checkpoint takes 12 bytes a parameter",
        )
    if files < _LOW_FILES:
        _warn(warnings, f"a process may open only {files} files", "raise it: ulimit -n 65536")
    return {
        "cores": os.cpu_count(),
        "cores usable": cores(),
        "memory available": available,
        "disk free": disk.free,
        "open files": files,
    }


def _network(warnings: list[dict[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "loopback rendezvous": "works",
    }
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is not None and chosen not in found["interfaces"]:
        _warn(warnings, f"GLOO_SOCKET_IFNAME={chosen} is no interface of this machine", "unset it")
    try:
        found["free port"] = _meet()
    except Exception as error:
        found["loopback rendezvous"] = "fails"
        _warn(
            warnings,
            f"workers on this machine cannot meet: {error}",
            "see whether loopback is up and not filtered (ip addr show lo)",
        )
    return found


def _meet() -> int:
    """Open a store on a free loopback port, write through one client and read through another; the port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = rendezvous.listen("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    limit = timedelta(seconds=10)
    server = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    client.set("doctor", "well")
    if server.get("doctor") != b"well":
        raise OSError("the store gave back another value than was written")
    return port


def _launcher(warnings: list[dict[str, str]]) -> dict[str, Any]:
    try:
        found = rendezvous.detect(os.environ, "127.0.0.1:0")
    except HyperParallelError as error:
        _warn(warnings, str(error), "or unset the launcher's variables to start local workers")
        return {"seen": "one that does not say where workers meet"}
    if found is None:
        return {"seen": "none: the command starts its own workers"}
    return {
        "seen": found.launcher,
        "rank": f"{found.rank} of {found.world}",
        "meet at": f"{found.host}:{found.port}",
    }


def _rows(section: dict[str, Any] | list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if isinstance(section, list):
        for device in section:
            peak = device["peak_bf16_flops"]
            facts = [device["name"], format_bytes(device["memory"]), device["collectives"]]
            facts += [f"{peak / 1e12:g} TFLOP/s bf16"] if peak else []
            facts += [device["driver"]] if device["driver"] else []
            yield device["device"], " · ".join(facts)
            for link in device["links"]:
                yield "", link
        return
    for key, value in section.items():
        if isinstance(value, list):
            yield key, ", ".join(map(str, value))
        elif key in ("memory available", "disk free"):
            yield key, format_bytes(value)
        else:
            yield key, str(value)
