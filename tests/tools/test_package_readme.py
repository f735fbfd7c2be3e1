"""The description that a package index shows has no relative link, with and without an address of the repository."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from docs_site.links import LINK, is_remote, outside_code
from package_readme import absolute, source_of

ROOT = Path(__file__).parents[2]
SOURCE = "https://host.example/owner/repository/blob/main"


def relative(text: str) -> list[str]:
    """Targets of links and images, also those written as HTML, that are no addresses."""
    found: list[str] = []

    def look(prose: str) -> str:
        found.extend(target for _, _, target in LINK.findall(prose))
        found.extend(re.findall(r"""<(?:a|img)\b[^>]*?(?:href|src)=["']([^"']*)""", prose))
        return prose

    outside_code(text, look)
    return [target for target in found if not is_remote(target)]


def test_the_readme_has_relative_links_and_the_package_has_none() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(relative(readme)) > 40
    for source in ("", SOURCE):
        assert relative(absolute(readme, source)) == []
    assert absolute(readme, SOURCE).count(SOURCE) > 40


@pytest.mark.parametrize(
    ("text", "with_source", "without"),
    [
        ("[plan](docs/plan.md#ties)", f"[plan]({SOURCE}/docs/plan.md#ties)", "plan"),
        ("[`x.py`](examples/x.py)", f"[`x.py`]({SOURCE}/examples/x.py)", "`x.py`"),
        ("[here](#is-it-right)", f"[here]({SOURCE}/README.md#is-it-right)", "here"),
        ("a ![page](docs/p.png)", f"a ![page]({SOURCE.replace('blob', 'raw')}/docs/p.png)", "a "),
        ("[far](https://x.y/z)", "[far](https://x.y/z)", "[far](https://x.y/z)"),
        ("`[code](docs/a.md)`", "`[code](docs/a.md)`", "`[code](docs/a.md)`"),
    ],
)
def test_links(text: str, with_source: str, without: str) -> None:
    assert absolute(text, SOURCE) == with_source
    assert absolute(text, "") == without


def test_the_address_stands_in_one_place() -> None:
    assert (
        source_of('extra:\n  generator: false\n  source: "https://h/o/r/blob/main/"\n')
        == "https://h/o/r/blob/main"
    )
    assert source_of('extra:\n  source: ""\n') == ""
    with pytest.raises(ValueError, match="needs one"):
        source_of("extra: {}\n")
    source = source_of((ROOT / "mkdocs.yml").read_text())
    assert source == "" or is_remote(source)


def test_the_wheel_has_that_description(tmp_path: Path) -> None:
    subprocess.run(
        [str(ROOT / "tools/build_wheel.sh"), sys.executable, str(tmp_path)], check=True, timeout=200
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        [name] = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(content.read(name))
    shown = metadata.get_payload()
    assert isinstance(shown, str)
    assert shown.lstrip().startswith("# HyperParallel")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert relative(shown) == []
