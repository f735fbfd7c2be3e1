"""For the environment that `make test-ray` makes; elsewhere nothing of this folder is collected."""

from __future__ import annotations

import importlib.metadata

if not any(importlib.metadata.distributions(name="ray")):
    collect_ignore_glob = ["test_*.py"]
