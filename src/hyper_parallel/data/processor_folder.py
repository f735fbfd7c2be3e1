"""Loads a model's Transformers processor from a folder, also where torchvision, which videos need, is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hyper_parallel.errors import DataError
from hyper_parallel.untrusted import refuse_irregular_entries

FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files that name a processor's class, in the order in which Transformers looks into them."""
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def has_processor(folder: Path) -> bool:
    """Whether the folder has the settings of a processor of images or sound."""
    return any((folder / name).is_file() for name in FILES[:2])


def load(folder: Path) -> Any:
    """The processor in a folder, as Transformers' ``save_pretrained`` writes it. Raises DataError.

    Where torchvision is missing, images are processed by Pillow, and a processor of videos is left out.
    """
    try:
        refuse_irregular_entries(folder)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    try:
        found = _load(folder)
    except Exception as error:  # the library's errors are of many kinds
        raise DataError(f"the processor of {folder} cannot be loaded: {_line(error)}") from error
    if not hasattr(found, "tokenizer"):
        raise DataError(
            f"{folder} has no whole processor, only a {type(found).__name__}; put the files of the model's processor "
            "there (AutoProcessor's save_pretrained writes them)"
        )
    return found


def _load(folder: Path) -> Any:
    import transformers
    from transformers.utils import is_torchvision_available

    kind = getattr(transformers, _class_name(folder) or "", None)
    if is_torchvision_available() or kind is None or "video_processor" not in kind.get_attributes():
        return transformers.AutoProcessor.from_pretrained(str(folder), **_LOCAL)
    loaders: dict[str, Any] = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    parts = [
        _NoVideos() if name == "video_processor" else loaders[name].from_pretrained(str(folder), **_LOCAL)
        for name in kind.get_attributes()
    ]
    settings, _ = kind.get_processor_dict(str(folder), **_LOCAL)
    return _unchecked(kind).from_args_and_dict(parts, settings)


def _unchecked(kind: Any) -> Any:
    """The class without the check that each part is what its name says, and without showing all of its settings."""
    own = {
        "check_argument_for_proper_class": lambda self, name, given: type(given),
        "__repr__": lambda self: kind.__name__,
    }
    return type(kind.__name__, (kind,), own)


class _NoVideos:
    """In place of a processor of videos: there are none."""

    model_input_names: tuple[str, ...] = ()


def _class_name(folder: Path) -> str | None:
    for name in FILES:
        file = folder / name
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8")).get("processor_class")
            if isinstance(found, str):
                return found
    return None


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
