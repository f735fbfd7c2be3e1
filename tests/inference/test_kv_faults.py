"""A tier that fails ends the run with one line; answers that were given stay, and nothing is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hyper_parallel.errors import ConfigError, DataError, TierError
from hyper_parallel.inference import Generator
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from hyper_parallel.offloading.tiers.file_io import DirectFile
from inference.opened_tiers import opened
from inference.small_models import prompts, small


def generator_on_flash(folder: Path, device: int = 9) -> Generator:
    generator = Generator(small("llama"), page=16, max_tokens=20)
    generator._engine.cache.configure(KVCacheSizes(device=device, flash=200), opened(("flash",), folder))
    return generator


def test_a_disk_that_fails_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompts(small("llama"), (1, 31, 32, 33, 70))
    expected = Generator(small("llama"), page=16, max_tokens=20)(given)
    generator = generator_on_flash(tmp_path)
    own, writes = DirectFile.write, []

    def write(file: DirectFile, x: torch.Tensor, at: int) -> None:
        writes.append(at)
        if len(writes) > 3:
            raise TierError("no space is left on the disk")
        own(file, x, at)

    with monkeypatch.context() as patched:
        patched.setattr(DirectFile, "write", write)
        with pytest.raises(TierError, match="no space is left") as error:
            generator(given)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
    assert [one.tokens for one in generator(given)] == [one.tokens for one in expected]
    generator._engine.cache.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    """The file is open: answers are right, and closing does not fail."""
    given = prompts(small("llama"), (1, 31, 32, 33, 70))
    generator = generator_on_flash(tmp_path)
    answers = dict[int, list[int]]()
    for place, answer in generator.stream(given):
        answers[place] = answer.tokens
        shutil.rmtree(tmp_path, ignore_errors=True)
    generator._engine.cache.close()
    expected = Generator(small("llama"), page=16, max_tokens=20)(given)
    assert [answers[place] for place in range(len(given))] == [one.tokens for one in expected]


def test_a_run_that_is_left_gives_its_pages_back(tmp_path: Path) -> None:
    given = prompts(small("llama"), (1, 31, 32, 33, 70))
    generator = generator_on_flash(tmp_path)
    stream = generator.stream(given)
    next(stream)
    with pytest.raises(ConfigError, match="under way"):
        generator(given)
    stream.close()
    cache = generator._engine.cache
    assert cache._open is not None
    assert cache._open[1].available == 9
    assert len(generator(given)) == len(given)


def test_memory_that_is_too_small(tmp_path: Path) -> None:
    given = prompts(small("llama"), (400,))
    generator = Generator(small("llama"), page=16, max_tokens=20)
    cache = generator._engine.cache
    cache.configure(KVCacheSizes(device=9, host=20), opened(("host",), tmp_path))
    with pytest.raises(
        DataError, match="needs 27 pages of 16 tokens, and the KV cache has 9 on the device and 20"
    ):
        generator(given)
    cache.configure(KVCacheSizes(device=9, host=200, staging=256), opened(("host",), tmp_path))
    with pytest.raises(DataError, match="432 tokens, and the staging buffers have 256"):
        generator(given)
    cache.configure(KVCacheSizes(device=40, host=20), opened(("host",), tmp_path))
    assert generator(given)
    assert cache.report.unused == ("host",)


def test_other_weights_drop_what_was_kept(tmp_path: Path) -> None:
    import copy

    model = copy.deepcopy(small("llama"))
    given = [list(range(70)), list(range(90))]
    generator = Generator(model, page=16, max_tokens=5)
    generator._engine.cache.configure(KVCacheSizes(device=20, host=20), opened(("host",), tmp_path))
    generator(given)
    again = generator(given)
    assert generator.shared == 4 * 16 + 5 * 16
    # Not through autograd, so that no version counts it.
    next(model.parameters()).data.mul_(-1)
    changed = generator(given)
    assert generator.shared == 4 * 16
    assert [one.tokens for one in changed] == [
        one.tokens for one in Generator(model, page=16, max_tokens=5)(given)
    ]
    assert [one.tokens for one in changed] != [one.tokens for one in again]
