"""A model's folder may be anybody's: whatever lies there ends in one line, and runs no code of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.hostile import attempts
from harness.hostile import models as hostile_models
from hyper_parallel.config import ModelConfig
from hyper_parallel.config.model import implausible
from hyper_parallel.step.build import transformers_config

MUST = ("a config", "an index", "a head", "a shape", "bytes", "a tensor", "vocab_size", "model_type")
"""Begin the names of what can never be loaded."""


def test_every_damaged_folder_is_refused_or_harmless(tmp_path: Path) -> None:
    found = list(attempts.models(1, len(hostile_models.CASES) + 15, tmp_path))
    assert len(hostile_models.CASES) > 150
    assert [o for o in found if o.verdict not in attempts.GOOD] == []
    named = [o for o in found if o.name in hostile_models.CASES]
    assert [o.name for o in named if o.name.startswith(MUST) and o.verdict != "refused"] == []
    assert sum(o.verdict == "refused" for o in named) > 0.7 * len(named)
    # Refused for what is wrong with each, and not for something that all of them have.
    assert len({o.said for o in found}) > 60


def test_code_that_a_config_names_is_not_run_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = hostile_models.pristine(tmp_path / "model")
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(
        f"open({str(canary)!r}, 'w')\nfrom transformers import LlamaConfig as Config\n"
    )
    hostile_models.field("auto_map", {"AutoConfig": "evil.Config"})(folder)
    assert transformers_config(ModelConfig(path=str(folder))).model_type == "llama"
    assert "(auto_map), which is not run" in caplog.text
    assert not canary.exists()


def test_what_models_have_is_plausible() -> None:
    assert implausible({"num_hidden_layers": 126, "vocab_size": 262_144, "n_routed_experts": 512}) is None
    assert "num_hidden_layers is 20000" in str(implausible({"text_config": {"num_hidden_layers": 20_000}}))
    assert "dozens of digits" in str(implausible({"x": 10**5000}))
