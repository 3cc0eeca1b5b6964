"""What an artifact was made from, found again by its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tx_export import plugins
from tx_export.errors import ArtifactError, LoadError, PluginError
from tx_export.load import load
from tx_export.runtime import UsageError
from tx_export.spec import EagerModel, TextSpec

__all__ = ["Origin", "origin_of", "source_of", "with_own_text"]

_NEEDED = ("source", "weights", "config", "task", "pipeline", "min_onnxruntime", "fused", "verification")


@dataclass(frozen=True)
class Origin:
    """What `load` is to be asked for, to get the same model again."""

    source: str
    size: str
    settings: Mapping[str, str]
    weights: str | None
    task: str | None
    inputs: tuple[str, ...]
    max_length: int | None


def origin_of(manifest: Mapping[str, Any], source: str | None) -> Origin:
    """By the manifest, or by a folder, module or weight file given by hand; UsageError where neither says enough."""
    missing = [key for key in _NEEDED if key not in manifest]
    if missing:
        raise ArtifactError(f"manifest.json has no {', '.join(missing)}; its source can't be found again without")
    made_from, weights = str(manifest["source"]), str(manifest["weights"])
    names = plugins.names("model")
    # A checkpoint's folder may have the name of a built-in model: what is given by hand tells them apart.
    built_in = made_from in names and (source is None or source.endswith(".safetensors") or source in names)
    chosen, file = source or made_from, None
    if source is not None and source.endswith(".safetensors"):
        chosen, file = made_from, source
    elif weights.startswith("random seed"):
        file = weights.replace("random seed ", "random:")
    elif built_in and weights.startswith("checkpoint"):
        raise UsageError(f"made from {made_from} with {weights}; name it with --source, a FILE.safetensors or a folder")
    return Origin(
        source=chosen,
        size=_size_of(manifest) if built_in else "small",
        settings=_as_settings(manifest["config"]) if built_in else {},
        weights=file,
        task=None if built_in else manifest["task"],
        inputs=_input_specs(manifest) if ":" in chosen or chosen.endswith(".onnx") else (),
        max_length=_chosen_length(manifest),
    )


def source_of(manifest: Mapping[str, Any], source: str | None) -> EagerModel:
    """The eager model that an artifact was made from; UsageError if it isn't there or has other weights."""
    origin = origin_of(manifest, source)
    try:
        model = load(
            origin.source,
            size=origin.size,
            settings=origin.settings,
            weights=origin.weights,
            task=origin.task,
            inputs=origin.inputs,
            max_length=origin.max_length,
        )
    except (LoadError, PluginError) as error:
        wanted = f"made from {manifest['source']} with {manifest['weights']}"
        raise UsageError(f"{error} (the artifact was {wanted}; --source names it)") from error
    if model.weights != manifest["weights"]:
        raise UsageError(
            f"{origin.source} has other weights than the artifact was made from: "
            f"{model.weights}, not {manifest['weights']}"
        )
    return model


def with_own_text(model: EagerModel, artifact: Path, manifest: Mapping[str, Any]) -> EagerModel:
    """An ONNX file with the tokenizer that its artifact has, wherever that came from; other models as they are."""
    text = manifest.get("text")
    if model.family != "onnx" or text is None:
        return model
    tokenizer = (artifact / "tokenizer.json").read_text(encoding="utf-8")
    spec = TextSpec(tokenizer, text["max_length"], text["pad_id"], tuple(text["labels"]), text["scores"])
    return replace(model, text=spec)


def _size_of(manifest: Mapping[str, Any]) -> str:
    sizes = plugins.find("model", manifest["source"]).sizes
    fits = (size for size, fields in sizes.items() if fields.items() <= manifest["config"].items())
    return next(fits, "small")


def _as_settings(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: ",".join(value) if isinstance(value, list) else str(value) for key, value in config.items()}


def _input_specs(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{item['name']}:{item.get('source_dtype', item['dtype'])}[{','.join(map(str, item['dims']))}]"
        + ("{{{}..{}}}".format(*item["range"]) if "range" in item else "")
        for item in manifest["inputs"]
    )


def _chosen_length(manifest: Mapping[str, Any]) -> int | None:
    """The --max-length of the build: it bounds arrays too, unlike the limit that a checkpoint sets for text."""
    text = manifest["text"] or {"max_length": 0}
    bounded = any(f"tokens<={text['max_length']}" in item["dims"] for item in manifest["inputs"])
    return text["max_length"] if bounded else None
