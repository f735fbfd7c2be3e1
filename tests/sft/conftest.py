"""For an environment with TRL: that of `make test-llamafactory`, or any other; elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.metadata

if not any(importlib.metadata.distributions(name="trl")):
    collect_ignore_glob = ["test_*.py"]
