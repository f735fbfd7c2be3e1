"""Tested releases of the packages that we integrate with.

`TESTED` is the table; docs/versions.md and `hyper-parallel doctor` show it. Each integration calls `check` with what
it stands on when a class of it is first used. Reads only what is installed; imports none of the packages.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import re
from dataclasses import dataclass

from hyper_parallel.errors import IntegrationError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Releases:
    """The releases of a package that do. A release stands for its later patches: 5.23 for 5.23.1."""

    floor: str
    """The first that has what is needed."""
    tested: tuple[str, ...]
    """Those with which the tests have run, in order."""
    why: str
    """What is needed of the package, and since when."""

    @property
    def newest(self) -> str:
        """The newest that was tested."""
        return self.tested[-1]


TESTED = {
    "torch": Releases(
        "2.11", ("2.13",), "FSDP2 with shared parameters, several groups and gradients that are sums"
    ),
    "transformers": Releases("5.3", ("5.3", "5.6", "5.23"), "attention and experts by registered functions"),
    "accelerate": Releases("1.6", ("1.6", "1.11", "1.15"), "data loaders for some of the ranks, FSDP2"),
    "peft": Releases("0.17", ("0.18", "0.21"), "LoRA on models whose weights are split"),
    "trl": Releases("0.24", ("0.24", "1.16"), "SFTTrainer"),
    "llamafactory": Releases("0.9.5", ("0.9.5",), "the switch use_hyper_parallel"),
}
"""Each package by the name that it is installed by."""


@dataclass(frozen=True)
class VersionRow:
    """A package of the table, as it is installed here."""

    package: str
    installed: str | None
    """None: it is not."""
    releases: Releases

    @property
    def too_old(self) -> bool:
        """Whether it lacks what is needed."""
        return self.installed is not None and _key(self.installed) < _key(self.releases.floor)

    @property
    def too_new(self) -> bool:
        """Whether it is newer than any that was tested."""
        newest = _key(self.releases.newest)
        return self.installed is not None and _key(self.installed)[: len(newest)] > newest

    def __str__(self) -> str:
        state = "too old" if self.too_old else "newer than tested" if self.too_new else ""
        needs = f"needs {self.releases.floor} or newer, tested {', '.join(self.releases.tested)}"
        return f"{self.installed or 'not installed'} ({state}{'; ' if state else ''}{needs})"


def rows() -> list[VersionRow]:
    """The table, with what is installed."""
    return [VersionRow(package, _installed(package), releases) for package, releases in TESTED.items()]


def check(*packages: str) -> None:
    """See whether the named packages of the table are there, in releases that do.

    One that is newer than any that was tested gives a line of warning, once in a process and on rank 0. Raises
    IntegrationError for one that is missing or older than what is needed.
    """
    for package in packages:
        row = VersionRow(package, _installed(package), TESTED[package])
        floor = row.releases.floor
        if row.installed is None:
            raise IntegrationError(f"{package} is not installed; pip install '{package}>={floor}'")
        if row.too_old:
            raise IntegrationError(
                f"{package} {row.installed} is older than {floor}, the first release that has what HyperParallel "
                f"needs of it ({row.releases.why}); pip install '{package}>={floor}'"
            )
        if row.too_new:
            _warn_once(package, row.installed, row.releases.newest)


@functools.cache
def _warn_once(package: str, installed: str, newest: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        log.warning(
            "%s %s is newer than %s, the newest release that HyperParallel was tested with (docs/versions.md)",
            package,
            installed,
            newest,
        )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _key(version: str) -> tuple[int, ...]:
    """The release numbers, by which releases are ordered: 0.9.6.dev0 and 0.9.6 are (0, 9, 6)."""
    found = re.match(r"\d+(\.\d+)*", version)
    assert found is not None, f"{version!r} is no version"
    return tuple(int(number) for number in found.group().split("."))
