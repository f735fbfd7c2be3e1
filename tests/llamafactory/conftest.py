"""For the environment that `make test-llamafactory` makes; elsewhere nothing of this folder is collected."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

# Not by find_spec, which finds this very folder.
if not any(importlib.metadata.distributions(name="llamafactory")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the chats and the models."""
    import made

    folder = tmp_path_factory.mktemp("llamafactory")
    made.everything(folder)
    return folder
