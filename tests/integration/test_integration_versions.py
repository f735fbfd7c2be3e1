"""The table of tested releases: what is refused, what is warned of, and that the docs show it."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration import versions
from hyper_parallel.launch import doctor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The releases that are installed, as the test says."""
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    versions._warn_once.cache_clear()
    return found


@pytest.mark.parametrize("release", ["5.3", "5.3.0", "5.4.1", "5.23.7", "5.23.0+local"])
def test_releases_that_do_pass_without_a_word(
    installed: dict[str, str], caplog: pytest.LogCaptureFixture, release: str
) -> None:
    installed["transformers"] = release
    versions.check("transformers")
    assert not caplog.records


def test_a_release_that_is_too_old_is_refused_with_the_line_that_mends_it(installed: dict[str, str]) -> None:
    installed["llamafactory"] = "0.9.4"
    with pytest.raises(
        IntegrationError, match=r"llamafactory 0\.9\.4 is older .* use_hyper_parallel.*>=0\.9\.5'"
    ):
        versions.check("llamafactory")


def test_what_is_missing_is_refused(installed: dict[str, str]) -> None:
    with pytest.raises(IntegrationError, match=r"trl is not installed; pip install 'trl>="):
        versions.check("trl")


def test_an_integration_says_what_it_lacks_when_it_is_first_used(installed: dict[str, str]) -> None:
    from hyper_parallel.integration import trl

    with pytest.raises(IntegrationError, match="trl is not installed"):
        _ = trl.HyperParallelSFTTrainer


def test_a_newer_release_is_warned_of_once_and_on_rank_0(
    installed: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["llamafactory"] = "0.9.6.dev0"
    with caplog.at_level(logging.WARNING):
        monkeypatch.setenv("RANK", "1")
        versions.check("llamafactory")
        assert not caplog.records
        versions._warn_once.cache_clear()
        monkeypatch.setenv("RANK", "0")
        versions.check("llamafactory")
        versions.check("llamafactory")
    [record] = caplog.records
    assert "llamafactory 0.9.6.dev0 is newer than 0.9.5" in record.getMessage()


def test_every_range_is_one() -> None:
    for releases in versions.TESTED.values():
        keys = [versions._key(version) for version in (releases.floor, *releases.tested)]
        assert keys == sorted(keys)


def test_the_docs_show_the_table() -> None:
    lines = ["| Package | Needed | Tested | For |", "|---|---|---|---|"]
    lines += [
        f"| {package} | {releases.floor} or newer | {', '.join(releases.tested)} | {releases.why} |"
        for package, releases in versions.TESTED.items()
    ]
    assert "\n".join(lines) in (ROOT / "docs/versions.md").read_text()


def test_the_doctor_shows_it(installed: dict[str, str]) -> None:
    installed["torch"] = "2.10"
    shown = {row.package: str(row) for row in versions.rows()}
    assert shown["torch"].startswith("2.10 (too old; needs 2.11 or newer, tested ")
    assert shown["peft"].startswith("not installed (needs ")
    report = {"integrations": shown, "warnings": []}
    empty = dict.fromkeys(("versions", "devices", "machine", "network", "launcher", "environment"))
    assert "too old; needs 2.11 or newer" in doctor.render({**empty, **report})


def test_importing_the_integrations_imports_no_one_elses_package() -> None:
    script = (
        "import sys; import hyper_parallel.integration, hyper_parallel.integration.versions, hyper_parallel.platform; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'accelerate', 'trl')))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
