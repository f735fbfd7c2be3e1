"""Names of reward functions: the verifiers, modules, files next to the run file, and errors in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.rewards.reward import BUILTIN, load_reward


def test_the_verifiers() -> None:
    assert load_reward("exact_match")("", "a", {"answer": "a"}) == 1.0
    assert load_reward("math")("", "2/4", {"answer": "1/2"}) == 1.0
    assert load_reward("code")("", "print(1)", {"tests": [{"input": "", "output": "1"}]}) == 1.0


def test_a_file_and_a_module_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "helper_of_reward.py").write_text("VALUE = 0.25\n")
    (tmp_path / "my_reward.py").write_text(
        "from helper_of_reward import VALUE\ndef reward(prompt, answer, task): return VALUE\n"
    )
    path = list(sys.path)
    assert load_reward("my_reward.py:reward", tmp_path)("", "", {}) == 0.25
    assert load_reward("my_reward:reward", tmp_path)("", "", {}) == 0.25
    assert load_reward("my_reward.py:reward", tmp_path) is load_reward("my_reward.py:reward", tmp_path)
    assert sys.path == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "did you mean 'exact_match'"),
        ("maths", "did you mean 'math'"),
        ("module:", "unknown name of a reward"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("missing.py:f", "is not a file"),
        ("wrong.py:rewrd", "did you mean 'reward'"),
        ("wrong.py:value", "has no function 'value'"),
        ("broken.py:f", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_errors(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("value = 3\ndef reward(prompt, answer, task): return 0\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=message) as error:
        load_reward(name, tmp_path)
    assert "\n" not in str(error.value)


def test_options(tmp_path: Path) -> None:
    (tmp_path / "scaled.py").write_text("def reward(prompt, answer, task, scale=1.0): return scale\n")
    assert load_reward("scaled.py:reward", tmp_path, {"scale": 0.5})("", "", {}) == 0.5
    with pytest.raises(ConfigError, match="do not fit it: got an unexpected keyword argument 'scales'"):
        load_reward("scaled.py:reward", tmp_path, {"scales": 0.5})
    with pytest.raises(ConfigError, match="do not fit it"):
        load_reward("math", options={"isolation": "required"})
    assert (
        load_reward("code", options={"isolation": "none"})("", "", {"tests": [{"input": "", "output": ""}]})
        == 1.0
    )


def test_no_verifier_imports_torch() -> None:
    names = [*BUILTIN, "hyper_parallel.rl.environments:Calculator"]
    program = (
        "import sys\nfrom hyper_parallel.rl.rewards.reward import load_reward\n"
        "from hyper_parallel.rl import environment_pool, tasks\n"
        f"for name in {names}: load_reward(name)\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'sympy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
