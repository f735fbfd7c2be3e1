"""A server on loopback that speaks the part of the Hub's API which `huggingface_hub` and `datasets` need.

Repositories have commits, of which each has files; a branch or tag is at one of them. A repository may be gated.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


def commit_of(name: str) -> str:
    """A commit's hash."""
    return hashlib.sha1(name.encode()).hexdigest()


@dataclass
class Repository:
    """The files of each commit, and where branches and tags are."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def push(self, name: str, files: dict[str, bytes], *refs: str) -> str:
        """Add a commit, to which refs then point; its hash."""
        commit = commit_of(name)
        self.commits[commit] = files
        self.refs.update(dict.fromkeys(refs or ("main",), commit))
        return commit


class HubServer:
    """The repositories, what was asked for, and how the server behaves."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        """By ``models/org/name`` and ``datasets/org/name``."""
        self.asked: list[str] = []
        """Method and path of each request."""
        self.delay = 0.0
        """Seconds before each answer."""
        self.status: int | None = None
        """The status of each answer, if it is not what was asked for."""
        self.url = ""

    def repository(self, name: str, kind: str = "models") -> Repository:
        """A repository, which is made if there is none."""
        return self.repositories.setdefault(f"{kind}/{name}", Repository())

    def push_folder(self, name: str, folder: Path, commit: str, *refs: str, **changed: bytes) -> str:
        """Add the files of a folder as a commit. `changed`: files of other content, with ``__`` for a dot."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        files |= {name.replace("__", "."): content for name, content in changed.items()}
        return self.repository(name).push(commit, files, *refs)

    def downloads(self) -> list[str]:
        """The names of the files that were sent."""
        return [
            line.rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/resolve/" in line
        ]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer on a port of its own."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: _Answer(self, *given))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: HubServer, *given: Any) -> None:
        self.hub = hub
        super().__init__(*given)

    def log_message(self, *given: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """A file, or an answer of the API."""
        self._answer()

    def do_HEAD(self) -> None:
        """What describes a file."""
        self._answer()

    def do_POST(self) -> None:
        """The API's list of paths."""
        self._answer()

    def _answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        time.sleep(self.hub.delay)
        if self.hub.status is not None:
            self._send(self.hub.status, b"{}")
        elif path.startswith("/api/"):
            self._api(path.removeprefix("/api/"))
        else:
            self._file(path.removeprefix("/"))

    def _refused(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and the commit; or None, once the refusal is sent."""
        found = self.hub.repositories.get(name)
        if found is None:
            self._send(401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
            return None
        if found.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
            return None
        commit = found.refs.get(revision, revision if revision in found.commits else "")
        if not commit:
            self._send(404, b'{"error": "no revision"}', {"X-Error-Code": "RevisionNotFound"})
            return None
        return found, commit

    def _api(self, path: str) -> None:
        kind, org, name, *rest = path.split("/")
        named = f"{kind}/{org}/{name}"
        action = rest[0] if rest else "revision"
        revision = "/".join(rest[1:]) or "main"
        tree = action in ("tree", "paths-info")
        below = ""
        if tree:
            known = self.hub.repositories.get(named, Repository())
            every = sorted((*known.refs, *known.commits), key=len, reverse=True)
            fitting = next((one for one in every if f"{revision}/".startswith(f"{one}/")), revision)
            revision, below = fitting, revision.removeprefix(fitting).strip("/")
        found = self._refused(named, revision)
        if found is None:
            return
        repository, commit = found
        files = repository.commits[commit]
        if action == "paths-info":
            asked = json.loads(self.body or b"{}").get("paths", [])
            self._json([_entry(one, files[one]) for one in asked if one in files])
        elif action == "tree":
            within = [one for one in files if not below or one.startswith(f"{below}/")]
            self._json([_entry(one, files[one]) for one in within])
        else:
            siblings = [{"rfilename": one, "size": len(content)} for one, content in files.items()]
            self._json(
                {"id": f"{org}/{name}", "_id": "0", "sha": commit, "private": False, "gated": False,
                 "disabled": False, "tags": [], "siblings": siblings, "downloads": 0, "likes": 0}
            )  # fmt: skip

    def _file(self, path: str) -> None:
        kind = "datasets" if path.startswith("datasets/") else "models"
        org, name, _, rest = path.removeprefix("datasets/").split("/", 3)
        known = self.hub.repositories.get(f"{kind}/{org}/{name}", Repository())
        every = sorted((*known.refs, *known.commits), key=len, reverse=True)
        revision = next((one for one in every if rest.startswith(f"{one}/")), rest.partition("/")[0])
        found = self._refused(f"{kind}/{org}/{name}", revision)
        if found is None:
            return
        repository, commit = found
        content = repository.commits[commit].get(rest.removeprefix(f"{revision}/"))
        headers = {"X-Repo-Commit": commit}
        if content is None:
            self._send(404, b"{}", headers | {"X-Error-Code": "EntryNotFound"})
            return
        headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        self._send(200, content, headers)

    def _json(self, answer: Any) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
