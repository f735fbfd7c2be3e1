"""Failures of the Hub in one line: what was asked for, what happened, and how to mend it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from hyper_parallel.hub.hub_id import HubId
from hyper_parallel.units import format_bytes


def explain(error: BaseException, asked: HubId, key: str, *, bare: bool = False, data: bool = False) -> str:
    """The line for a failure to find or download `asked`, which `key` names. `bare`: it was written without ``hub:``,
    and could have meant a folder. `data`: it is a data set.
    """
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    what, shown = ("data set" if data else "model"), asked.shown
    page = f"{constants.ENDPOINT}/{'datasets/' if data else ''}{asked.name}"
    causes = list(_causes(error))
    command = asked.download_command + (" --repo-type dataset" if data else "")
    there = f"where there is a network, type: {command}"
    copied = f"{there}; the cache {constants.HF_HOME} (HF_HOME) may be copied here"
    for one in causes:
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{key}: {shown}: {full()}"
        if isinstance(one, hub.GatedRepoError):
            return (
                f"{key}: {shown} is gated: accept its terms on {page}, then log in with: hf auth login (or set "
                "HF_TOKEN)"
            )
        if isinstance(one, hub.RevisionNotFoundError):
            return (
                f"{key}: {asked.name} has no revision {asked.revision!r}; {page}/tree/main lists its branches and "
                "tags, or leave '@…' out"
            )
        if isinstance(one, hub.RepositoryNotFoundError):
            which = f"neither a folder here nor a {what}" if bare else f"no {what}"
            return (
                f"{key}: {shown} is {which} on the Hub ({constants.ENDPOINT}) that may be read; check the name, or if "
                "it is private, log in with: hf auth login"
            )
        if isinstance(one, hub.OfflineModeIsEnabled):
            folder = "no folder here, and " if bare else ""
            return (
                f"{key}: {shown} is {folder}not in the cache of the Hub, and HF_HUB_OFFLINE is set; unset it, or "
                f"{copied}"
            )
    for one in causes:
        if isinstance(one, hub.HfHubHTTPError):
            status = getattr(getattr(one, "response", None), "status_code", None)
            if status in (401, 403):
                return f"{key}: {shown}: the Hub refuses it ({status}); log in with: hf auth login (or set HF_TOKEN)"
            return f"{key}: {shown}: {constants.ENDPOINT} answers with status {status}; try again later, or {copied}"
    last = causes[-1]
    words = " ".join(f"{type(one).__name__} {one}" for one in causes)
    folder = "no folder here, and " if bare else ""
    if "Timeout" in words or "timed out" in words:
        return f"{key}: {shown} is {folder}not in the cache, and {constants.ENDPOINT} does not answer in time; {copied}"
    if isinstance(last, PermissionError):
        return (
            f"{key}: {shown}: cannot write to {last.filename}; set HF_HOME to a folder that may be written to"
        )
    if "Connect" in words or "Network" in words or "Protocol" in words or isinstance(last, ConnectionError):
        return f"{key}: {shown} is {folder}not in the cache, and {constants.ENDPOINT} cannot be reached; {copied}"
    told = " ".join(str(last).split())[:200]
    return f"{key}: {shown} cannot be downloaded: {type(last).__name__}: {told}; {there}"


def full(needed: int | None = None, free: int | None = None) -> str:
    """The words for a disk that is full, or will be."""
    from huggingface_hub import constants

    sizes = (
        ""
        if needed is None or free is None
        else f" ({format_bytes(needed)} needed, {format_bytes(free)} free)"
    )
    return f"the disk of {constants.HF_HUB_CACHE} is full{sizes}; free some, or set HF_HOME to a folder elsewhere"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The failure, and what it came from; the root is last."""
    found: BaseException | None = error
    seen = 0
    while found is not None and seen < 10:
        yield found
        found, seen = found.__cause__ or found.__context__, seen + 1
