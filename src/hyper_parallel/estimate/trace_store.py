"""A folder of Traces: a step that was captured and lowered for one prediction is read by later ones of the same step.

    key = blake2b(versions, code, settings of PyTorch, model, run file, cluster, order and pricing of the Trace)

It follows `step.graph_store`: the same digests of code and model, the same private folder, files put in place at once,
and the sources of the code named in each file. Where a digest cannot be made, a source has changed, or a file is
damaged, the step is captured.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.kernel_settings import kernel_settings
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import TraceError
from hyper_parallel.graph.compiled.artifacts import own
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.step.code_digest import NoDigest, names, source_digest, sources, versions
from hyper_parallel.step.graph_key import described, environment
from hyper_parallel.step.graph_store import LARGEST, tidy
from hyper_parallel.trace import Trace
from hyper_parallel.trace.serialize import dump_trace, load_trace
from hyper_parallel.untrusted import open_regular, read_bytes

log = logging.getLogger(__name__)

_UNREADABLE = (OSError, TraceError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class StoredTrace:
    """What is kept of a step."""

    trace: Trace
    notes: Sequence[str]
    """What was repeated and planned, a sentence each."""


class TraceStore:
    """The Traces of predictions."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the cache; it is made where it is missing."""
        self._folder = folder

    def key(
        self, model: nn.Module, config: RunConfig, cluster: Cluster, pricing: Mapping[str, bool]
    ) -> str | None:
        """32 hexadecimal digits; predictions with the same have the same Trace. None where there is no digest, which is
        logged. `pricing`: what else decides the Trace."""
        try:
            content = {
                "versions": versions(),
                "code": names(),
                "settings": [kernel_settings(), environment()],
                "context": described(current_step()),
                "model": described(model),
                "trained": [[name, one.requires_grad] for name, one in model.named_parameters()],
                "run": described(config),
                "cluster": described(cluster),
                "pricing": dict(pricing),
            }
        except NoDigest as why:
            log.info("the trace is not cached: %s", why)
            return None
        # Classes of the user's are asked what they are.
        except Exception as error:
            log.info("the trace is not cached: %s: %s", type(error).__name__, error, exc_info=True)
            return None
        text = json.dumps(content, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def find(self, key: str) -> StoredTrace | None:
        """The Trace of this key; None where the step is to be captured."""
        try:
            path = own(self._folder) / f"{key}.trace"
            data: dict[str, Any] = json.loads(read_bytes(open_regular(path, links=False), LARGEST))
            changed = [file for file, digest in data["sources"].items() if source_digest(file) != digest]
            if changed:
                log.info("the cached trace is of other code: %s has changed", changed[0])
                return None
            found = StoredTrace(load_trace(data["trace"]), tuple(map(str, data["notes"])))
            os.utime(path)
        except FileNotFoundError:
            return None
        except _UNREADABLE as error:
            log.info("the cached trace cannot be read and the step is captured anew: %s", error)
            return None
        return found

    def save(self, key: str, found: StoredTrace) -> None:
        """Keep a Trace; where that is not possible, it is logged, and nothing else happens."""
        try:
            data = {"sources": sources(), "notes": list(found.notes), "trace": dump_trace(found.trace)}
            content = json.dumps(data).encode()
            if len(content) > LARGEST:
                log.info("the trace is not cached: it takes %d bytes", len(content))
                return
            folder = own(self._folder)
            temporary = folder / f"{key}.{os.getpid()}.{time.monotonic_ns()}.new"
            try:
                temporary.write_bytes(content)
                os.replace(temporary, folder / f"{key}.trace")
            finally:
                temporary.unlink(missing_ok=True)
            tidy(folder)
        except (NoDigest, OSError) as error:
            log.info("the trace is not cached: %s", error)
