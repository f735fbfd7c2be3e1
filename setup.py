"""What pyproject.toml cannot say: a wheel takes the folder ``examples`` along, for `hyper-parallel examples`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class _BuildWithExamples(build_py):
    """Copies the examples into the package; an installation that points at a checkout finds them in it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                Path(__file__).parent / "examples",
                Path(self.build_lib, "hyper_parallel", "examples"),
                ignore=shutil.ignore_patterns("runs", "__pycache__", ".*"),
                dirs_exist_ok=True,
            )


setup(cmdclass={"build_py": _BuildWithExamples})
