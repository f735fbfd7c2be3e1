"""Another kind of thing in a file's place: a pipe, a link, a device, or what is left of the file."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def replace(folder: Path, name: str, how: str) -> None:
    """Put another kind of thing where a file of a folder is, or was to be."""
    file = folder / name
    held = file.read_bytes() if file.is_file() else b""
    file.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "socket":
        here = os.getcwd()
        os.chdir(folder)  # the address of a socket may be 107 bytes long
        try:
            socket.socket(socket.AF_UNIX).bind(name)
        finally:
            os.chdir(here)
    elif how == "empty":
        file.touch()
    elif how == "cut":
        file.write_bytes(held[: len(held) // 2])
    elif how == "longer":
        file.write_bytes(held + b"x" * 100)
    elif how == "zeros":
        file.symlink_to("/dev/zero")
    elif how == "loop":
        file.symlink_to(name)
    elif how == "nowhere":
        file.symlink_to("nowhere")
    elif how == "link":
        other = folder.parent / f"elsewhere-{name}"
        other.write_bytes(held)
        file.symlink_to(other)
    elif how == "sparse":
        with file.open("wb") as out:
            out.truncate(2**40)
    elif how == "text":
        file.write_text("root:x:0:0:root:/root:/bin/bash\n")
    else:
        raise ValueError(how)
