"""A source -> the eager model that everything is compared with.

nothing                      the built-in classifier
classifier, embedder, ...    a built-in family
path/to/folder               a Hugging Face checkpoint, or a sentence-transformers folder
path/to/file.py:NAME         a user's nn.Module; also package.module:NAME
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tx_export import plugins
from tx_export._load_builtin import load_built_in
from tx_export._load_checkpoint import load_folder
from tx_export._load_module import load_module
from tx_export._load_onnx import load_onnx
from tx_export.errors import LoadError, PluginError
from tx_export.spec import BuiltInSpec, EagerModel

__all__ = ["load"]

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_ACCEPTED = (
    "a built-in name ({names}), a folder with a config.json, FILE.onnx, path/to/file.py:NAME or package.module:NAME"
)


def load(
    source: str | None,
    *,
    size: str = "small",
    settings: Mapping[str, str] = MappingProxyType({}),
    weights: str | None = None,
    task: str | None = None,
    inputs: Sequence[str] = (),
    max_length: int | None = None,
    tokenizer: str | None = None,
) -> EagerModel:
    """The eager model of a source; `weights` is FILE.safetensors or `random[:SEED]`, `tokenizer` a tokenizer.json.

    Raises LoadError for what can't be read, PluginError for an unknown source, size or setting.
    """
    if max_length is not None and max_length < 1:
        raise LoadError(f"max-length is {max_length}; it must be at least 1")
    source = "classifier" if source is None else source
    chosen = _parse_weights(weights)
    path, shown = Path(source), _shown(source)
    if path.suffix == ".onnx":
        _refuse_options(source, size=size, settings=settings)
        return load_onnx(
            path, inputs=inputs, weights=chosen, task=task, tokenizer=tokenizer, max_length=max_length, source=shown
        )
    _refuse_options(source, tokenizer=tokenizer)
    if path.is_dir():
        _refuse_options(source, size=size, settings=settings, inputs=inputs)
        name = _last_part(source)
        return load_folder(path, weights=chosen, task=task, max_length=max_length, name=name, source=shown)
    if ":" in source:
        _refuse_options(source, size=size, settings=settings)
        return load_module(source, inputs=inputs, weights=chosen, task=task, max_length=max_length, source=shown)
    spec = _built_in(source)
    _refuse_options(source, inputs=inputs)
    model = load_built_in(source, spec, size=size, settings=settings, weights=chosen, max_length=max_length)
    if task not in (None, model.task):
        raise PluginError(f"task {task!r}: {source} has the task {model.task} only")
    return model


def _built_in(source: str) -> type[BuiltInSpec]:
    """The family of that name; else an error that says what the source could have been."""
    if source in plugins.names("model"):
        spec: type = plugins.find("model", source)
        if issubclass(spec, BuiltInSpec):
            return spec
        raise PluginError(f"{source} is a family of checkpoints; give the folder of one, with its config.json")
    accepted = _ACCEPTED.format(names=", ".join(_built_in_names()))
    if Path(source).exists():
        raise PluginError(f"source {source!r} is a file; expected {accepted}")
    if _HUB_ID.fullmatch(source):
        raise LoadError(
            f"source {source!r}: no such folder, and nothing is downloaded here; if it is a model on a hub, "
            f"download it first (hf download {source} --local-dir DIR) and give the folder"
        )
    raise PluginError(f"unknown source {source!r}; expected {accepted}")


def _built_in_names() -> list[str]:
    return [name for name in plugins.names("model") if issubclass(plugins.find("model", name), BuiltInSpec)]


def _refuse_options(
    source: str,
    *,
    size: str = "small",
    settings: Mapping[str, str] = MappingProxyType({}),
    inputs: Sequence[str] = (),
    tokenizer: str | None = None,
) -> None:
    kinds = {"size": "a built-in model", "set": "a built-in model", "input": "a user's module or an ONNX file"}
    given = {"size": size != "small", "set": settings, "input": inputs, "tokenizer": tokenizer}
    for option, value in given.items():
        if value:
            kind = kinds.get(option, "an ONNX file")
            raise PluginError(f"--{option} is for {kind}; {source} is none")


def _parse_weights(text: str | None) -> Path | int | None:
    """A file, a seed, or None."""
    if text is None:
        return None
    kind, _, seed = text.partition(":")
    if kind == "random":
        if seed and not seed.isdecimal():
            raise PluginError(f"weights {text!r}: expected random:SEED with a whole number")
        return int(seed or 0)
    if not text.endswith(".safetensors"):
        raise PluginError(f"weights {text!r}: expected FILE.safetensors, random or random:SEED")
    return Path(text)


def _last_part(source: str) -> str:
    return Path(source).name if Path(source).name not in ("", "..") else Path(source).resolve().name


def _shown(source: str) -> str:
    """As typed if relative, else its last part, so that no absolute path reaches an artifact."""
    return Path(source).name if Path(source).is_absolute() else source
