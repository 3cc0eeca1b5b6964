"""A Hugging Face or sentence-transformers folder: config.json names the family, and its plug-in reads the rest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from tx_export import plugins
from tx_export._chat import read_chat
from tx_export._load_fit import build_seeded, fill, matched
from tx_export._load_generation import read_generation
from tx_export._load_scores import is_cross_encoder, read_scores
from tx_export._load_text import (
    bounded,
    bounded_cache,
    ending_open,
    read_optional,
    read_text,
    table_of,
    vocabulary,
)
from tx_export._load_weights import Weights, find_files, read_json, read_weights
from tx_export.errors import LoadError
from tx_export.spec import CacheSpec, CheckpointSpec, EagerModel, GenerationSpec, TextSpec

__all__ = ["load_folder"]

_POOLING = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "last"}
_LEGACY_POOLING = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def load_folder(
    folder: Path, *, weights: Path | int | None, task: str | None, max_length: int | None, name: str, source: str
) -> EagerModel:
    """The eager model; `weights` is a file to use instead of the folder's, or the seed of random ones."""
    whole = folder
    folder, pooling = _sentence_transformers(whole, task)
    if not (folder / "config.json").is_file():
        raise LoadError(f"{folder} has no config.json, so it is not the folder of a Hugging Face checkpoint")
    config = read_json(folder / "config.json")
    _refuse_code(folder, config)
    family, spec_class = _family(config)
    spec = spec_class.from_config(config, task, pooling)
    table = table_of(spec.inputs())
    if max_length is not None and table is not None and max_length > table:
        raise LoadError(f"max-length {max_length} is more than the {table} positions that {source} has")
    fields = json.loads(json.dumps(dataclasses.asdict(spec)))  # type: ignore[call-overload]
    scores = read_scores(whole, config, fields.get("labels") or ())
    cache = bounded_cache(spec.cache(), max_length)
    text = read_text(folder, fields, spec.inputs(), max_length if cache is None else max_length or table, scores)
    text, generation = _read_generation(folder, config, spec, cache, text)
    module, origin = _build(spec, folder, weights)
    return EagerModel(
        name=name,
        source=source,
        family=family,
        task=spec.task,
        module=module.eval(),
        inputs=bounded(spec.inputs(), max_length),
        outputs=bounded(spec.outputs(), max_length),
        config=fields,
        weights=origin,
        text=text,
        padding=spec.padding,
        cache=cache,
        generation=generation,
        pad_id=fields["pad_token_id"] if spec.counts_real_ids else None,
    )


def _read_generation(
    folder: Path, config: Mapping[str, Any], spec: CheckpointSpec, cache: CacheSpec | None, text: TextSpec | None
) -> tuple[TextSpec | None, GenerationSpec | None]:
    """What stands around a continuation; a prompt of a decoder alone ends where its text ends."""
    if cache is None:
        return text, None
    generation, own = read_generation(folder, config, vocabulary(spec.inputs()), cache.cross), spec.generation()
    if own is not None and generation.start is None:
        generation = dataclasses.replace(generation, start=own.start)
    if text is None or cache.cross:
        return text, generation
    text = ending_open(text, read_optional(folder / "tokenizer_config.json"))
    return text, dataclasses.replace(generation, chat=read_chat(folder))


def _build(spec: CheckpointSpec, folder: Path, weights: Path | int | None) -> tuple[torch.nn.Module, str]:
    if isinstance(weights, int):
        return _built(spec, weights), f"random seed {weights}"
    read = read_weights(find_files(folder) if weights is None else (weights,))
    tensors = _matched(spec, read)
    module = _built(spec, 0)
    fill(module, tensors)
    return module, f"checkpoint {read.sha256}"


def _matched(spec: CheckpointSpec, weights: Weights) -> dict[str, torch.Tensor]:
    # Compared with a module that has no memory yet, so that a config that lies about sizes allocates nothing.
    with torch.device("meta"):
        skeleton = _built(spec, 0)
    return matched(skeleton, weights, spec.renamed, spec.unused, spec.names)


def _built(spec: CheckpointSpec, seed: int) -> torch.nn.Module:
    try:
        module: torch.nn.Module = build_seeded(spec.build, seed)
    except (RuntimeError, ValueError, MemoryError, OverflowError) as error:
        raise LoadError(f"config.json: a model of these sizes can't be built here ({error})") from error
    return module


def _family(config: Mapping[str, Any]) -> tuple[str, type[CheckpointSpec]]:
    model_type = config.get("model_type")
    known = plugins.names("model")
    if isinstance(model_type, str) and model_type.replace("_", "-") in known:
        spec = plugins.find("model", model_type)
        if issubclass(spec, CheckpointSpec):
            return model_type.replace("_", "-"), spec
    families = [name for name in known if issubclass(plugins.find("model", name), CheckpointSpec)]
    raise LoadError(
        f"config.json: model_type is {model_type!r}; supported: {', '.join(families)}. Another model can be "
        "compiled as a module: give path/to/file.py:NAME, a function that returns it, and its inputs with --input"
    )


def _refuse_code(folder: Path, config: Mapping[str, Any]) -> None:
    """A checkpoint that brings code is refused by the name of the file; none of it is ever imported."""
    mapped = config.get("auto_map")
    if mapped:
        first = next(iter(mapped.values())) if isinstance(mapped, dict) else mapped
        reference = str(first[0] if isinstance(first, list) and first else first)
        raise LoadError(
            f"config.json: auto_map asks to run {reference.rpartition('.')[0] or reference}.py; a checkpoint's code "
            "is never run; compile such a model as a module, by path/to/file.py:NAME"
        )
    code = sorted(path.name for path in folder.glob("modeling_*.py"))
    if code:
        raise LoadError(
            f"{folder / code[0]}: a checkpoint's code is never run; remove the file if the model works without it"
        )


def _sentence_transformers(folder: Path, task: str | None) -> tuple[Path, tuple[str, ...]]:
    """Where config.json is, and the pooling that modules.json adds, if the task asks for it."""
    file = folder / "modules.json"
    if not file.is_file():
        return folder, ()
    modules = _read_modules(file)
    kinds = [kind for kind, _ in modules]
    if kinds == ["Transformer"] and is_cross_encoder(folder):
        _refuse_prompt(folder / "config_sentence_transformers.json")
        return folder / modules[0][1], ()
    if kinds[:1] == ["Transformer"] and task not in (None, "sentence-embedding"):
        return folder / modules[0][1], ()
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        listed = ", ".join(kinds) or "none"
        raise LoadError(f"{file}: the modules are {listed}; supported: Transformer, Pooling, and then maybe Normalize")
    _refuse_prompt(folder / "config_sentence_transformers.json")
    normalize = ("normalize",) if len(kinds) == 3 else ()
    return folder / modules[0][1], (_pooling(folder / modules[1][1] / "config.json"), *normalize)


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module of sentence-transformers, in order."""
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        modules = [(str(item["type"]), str(item["path"])) for item in sorted(listed, key=lambda item: item["idx"])]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise LoadError(f"{file}: expected a list of modules with idx, path and type ({error!r})") from error
    for kind, path in modules:
        if not kind.startswith("sentence_transformers."):
            raise LoadError(f"{file}: the module {kind} is code of the checkpoint's own, which is never run")
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise LoadError(f"{file}: the path {path!r} leaves the folder")
    return [(kind.rpartition(".")[2], path) for kind, path in modules]


def _pooling(file: Path) -> str:
    config = read_json(file)
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or ())
    modes = modes or [name for key, name in _LEGACY_POOLING.items() if config.get(key)]
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise LoadError(
            f"{file}: pooling is {' and '.join(map(str, modes)) or 'not set'}; supported: one of {', '.join(_POOLING)}"
        )
    return _POOLING[modes[0]]


def _refuse_prompt(file: Path) -> None:
    prompt = read_json(file).get("default_prompt_name") if file.is_file() else None
    if prompt:
        raise LoadError(
            f"{file}: default_prompt_name is {prompt!r}, a prompt that is put before each text; that is not "
            "supported: set it to null, and write the prompt into your texts"
        )
