"""The check that keeps the names of devices in compat/ finds them in code, and leaves prose alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_device_words.py"


def check(folder: Path, file: str, code: str) -> subprocess.CompletedProcess[str]:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return subprocess.run(
        [sys.executable, str(TOOL), str(folder)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.cuda.synchronize()\n",
        'device = "cuda:0"\n',
        "import torch_npu\n",
        "def f():\n    return is_nccl_available()\n",
        'x = f"hccl:{1}"\n',
        "class CudaStream: ...\n",
        'os.environ["NCCL_DEBUG"]\n',
    ],
)
def test_a_device_named_in_code_is_refused(tmp_path: Path, code: str) -> None:
    done = check(tmp_path, "train/loop.py", code)
    assert done.returncode == 1
    assert f"loop.py:{code.count(chr(10)) if not code.startswith('class') else 1}: " in done.stdout


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (
            "train/loop.py",
            '"""On CUDA this is a stream; on an NPU too."""\n# cuda is prose here\ninputs = GatheredInput(input_ids)\n',
        ),
        ("train/loop.py", 'class A:\n    x: int = 1\n    """Bytes that NCCL keeps."""\n'),
        ("compat/accelerator.py", "import torch\ntorch.cuda.synchronize()\n"),
        ("config/launch.py", 'device: Literal["auto", "cpu", "cuda", "npu"]\n'),
    ],
)
def test_prose_compat_and_reasoned_exceptions_pass(tmp_path: Path, file: str, code: str) -> None:
    done = check(tmp_path, file, code)
    assert done.returncode == 0, done.stdout


def test_an_exception_that_is_not_used_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "config/launch.py", 'device: Literal["cuda"]\n')
    assert done.returncode == 1
    assert 'the exception for "npu" is not used' in done.stdout
