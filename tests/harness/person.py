"""Someone with a shell in a folder of their own, who types commands and looks at what they print."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Person:
    """Commands are lines for bash, as they would be typed."""

    folder: Path
    environment: dict[str, str]

    def types(self, line: str, *, code: int = 0, timeout: float = 240) -> str:
        """What a command prints. Fails where it ends with another exit code than `code`."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        shown = done.stdout + done.stderr
        assert done.returncode == code, f"$ {line}\nexit code {done.returncode}\n{shown[-4000:]}"
        assert "Traceback" not in shown, f"$ {line}\n{shown[-4000:]}"
        return shown

    def starts(self, line: str) -> subprocess.Popen[str]:
        """A command that goes on while its output is read; in a process group of its own, as a shell starts it."""
        return subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def writes(self, name: str, text: str) -> Path:
        """A file that she writes with an editor."""
        (self.folder / name).write_text(text)
        return self.folder / name

    def python(self, program: str) -> str:
        """What a short program of hers prints."""
        return self.types(f"python {self.writes('program.py', program).name}")
