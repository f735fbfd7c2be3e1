"""`model` section: a model's config or folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from hyper_parallel.errors import ConfigError
from hyper_parallel.hub.hub_id import local_folder, reading
from hyper_parallel.strategy.section import PathText, Section
from hyper_parallel.untrusted_files import read_json, refuse_irregular_entries

LARGEST = 16 * 2**20
"""Upper limit for the bytes of a ``config.json``."""
_MOST_OF_ANY = 2**31
_MOST = (("layer", 10_000), ("expert", 100_000))
"""Part of a field's name, and the largest value that such a field may have."""


class AdapterConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) of the library peft; the model's own weights are frozen."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "r": "write rank",
        "lora_alpha": "write alpha",
        "lora_dropout": "write dropout",
        "target_modules": "write targets",
        "use_rslora": "write rslora",
        "use_dora": "write dora",
    }

    rank: PositiveInt
    """Columns of an adapter's first matrix."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that have one, by the ends of their names, such as q_proj; `all-linear`: all but the head."""
    alpha: PositiveInt | None = None
    """What the adapter's result is multiplied with, times 1 / rank, or 1 / √rank with `rslora`. Default: twice the
    rank."""
    rslora: bool = False
    """Whether an adapter's result is scaled by alpha / √rank in place of alpha / rank (arXiv 2312.03732)."""
    dora: bool = False
    """Whether the norm of each row of an adapted matrix is trained apart from its direction (DoRA, arXiv 2402.09353);
    on the axes `replicate`, `shard`, `context` and `pipeline`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped while it trains."""


class ModelConfig(Section):
    """An unmodified Transformers causal language model, which may take images or sound too, from a config (new weights)
    or a folder (its weights)."""

    config: dict[str, Any] | None = None
    """A Transformers config: `model_type` and the fields that differ from its defaults. Weights are
    initialised. `vocab_size` defaults to the tokenizer's.
    """
    path: PathText | None = None
    """A folder with `config.json` and safetensors weights, as `save_pretrained` writes it; or an id of the Hugging Face
    Hub, `org/name` or `org/name@revision`, whose files are downloaded once. An existing folder wins; `hub:org/name`
    always means the Hub (docs/hub.md).
    """
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Transformers' attention implementation; `auto` is Transformers' choice for the family."""

    adapter: AdapterConfig | None = None
    """Adapters that are trained in place of the whole model."""

    @property
    def folder(self) -> str | None:
        """The folder of `path`: itself, or that of the Hub's cache. Raises ConfigError for an id without a commit."""
        return local_folder(self.path)

    @classmethod
    def _hint(cls, key: str, known: set[str]) -> str:
        if key == "revision":
            return "unknown key; write the revision behind the id, as path: org/name@revision"
        return super()._hint(key, known)

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.config is None) == (self.path is None):
            raise ValueError(
                "give either 'config' (a Transformers config, new weights) or 'path' (a folder), and leave the other "
                "out or null"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("'config' needs a 'model_type', for example llama")
        if self.config is not None and (problem := implausible(self.config)):
            raise ValueError(f"'config': {problem}")
        return self


def read_config(folder: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a model's folder, which is untrusted. Raises ConfigError, also if the folder
    contains anything but files, or if a number is implausible for a model.
    """
    file = Path(folder).expanduser() / "config.json"
    hint = f"give a folder as save_pretrained writes it{reading(str(folder))}"
    fields = read_fields(file, "model.path", hint, check_folder=True)
    if not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"model.path: {file} names no model_type, for example llama")
    if problem := implausible(fields):
        raise ConfigError(f"model.path: {file}: {problem}")
    return fields


def read_fields(file: Path, source: str, hint: str, *, check_folder: bool = False) -> dict[str, Any]:
    """Return the fields of a Transformers config's JSON file, which is untrusted; `check_folder`: its folder, too.

    Raises ConfigError, which begins with the `source` of the path; `hint`: what to give for a file that does not exist.
    """
    try:
        if check_folder:
            refuse_irregular_entries(file.parent)
        fields = read_json(file, LARGEST)
    except FileNotFoundError:
        raise ConfigError(f"{source}: {file} does not exist; {hint}") from None
    except OSError as error:
        raise ConfigError(f"{source}: {error.filename or file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {file} cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        kind = type(fields).__name__
        raise ConfigError(f"{source}: {file} must be a JSON object of a config's fields; it is a {kind}")
    return fields


def implausible(fields: Mapping[str, Any]) -> str | None:
    """Describes implausible sizes: building such a model would take all memory or hours before any check
    could fail.
    """
    for key, value in fields.items():
        if isinstance(value, Mapping):
            if (found := implausible(value)) is not None:
                return found
        elif type(value) is int:
            if value < 0 and str(key).startswith(("num_", "n_")):
                return f"{key} is {max(value, -_MOST_OF_ANY)}, and a number of things is not below zero"
            most = next((most for part, most in _MOST if part in str(key)), _MOST_OF_ANY)
            if abs(value) > most:
                return f"{key} is {value if abs(value) < 10**30 else 'a number of dozens of digits'}, more than {most}"
        elif isinstance(value, list) and len(value) > _MOST_OF_ANY // 2**15:
            return f"{key} has {len(value)} elements, more than {_MOST_OF_ANY // 2**15}"
    return None
