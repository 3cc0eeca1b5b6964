"""The eager model that an artifact was made from, found again by its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tx_export import plugins
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.spec import EagerModel

__all__ = ["source_of"]


def source_of(manifest: Mapping[str, Any], source: str | None) -> EagerModel:
    """The eager model that an artifact was made from; LoadError if it isn't there or has other weights."""
    built_in = manifest["source"] in plugins.names("model")
    weights = str(manifest["weights"])
    chosen, file = source or str(manifest["source"]), None
    if source is not None and source.endswith(".safetensors"):
        chosen, file = str(manifest["source"]), source
    elif weights.startswith("random seed"):
        file = weights.replace("random seed ", "random:")
    elif built_in and weights.startswith("checkpoint"):
        raise LoadError(
            f"the artifact was made from {manifest['source']} with {weights}; --source FILE.safetensors names it"
        )
    model = load(
        chosen,
        size=_size_of(manifest) if built_in else "small",
        settings=_as_settings(manifest["config"]) if built_in else {},
        weights=file,
        task=None if built_in else manifest["task"],
        inputs=_input_specs(manifest) if ":" in chosen else (),
        max_length=_chosen_length(manifest),
    )
    if model.weights != weights:
        raise LoadError(f"{chosen} has other weights than the artifact was made from: {model.weights}, not {weights}")
    return model


def _size_of(manifest: Mapping[str, Any]) -> str:
    sizes = plugins.find("model", manifest["source"]).sizes
    fits = (size for size, fields in sizes.items() if fields.items() <= manifest["config"].items())
    return next(fits, "small")


def _input_specs(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{item['name']}:{item['dtype']}[{','.join(map(str, item['dims']))}]"
        + ("{{{}..{}}}".format(*item["range"]) if "range" in item else "")
        for item in manifest["inputs"]
    )


def _chosen_length(manifest: Mapping[str, Any]) -> int | None:
    """The --max-length of the build: it bounds arrays too, unlike the limit that a checkpoint sets for text."""
    text = manifest["text"] or {"max_length": 0}
    bounded = any(f"tokens<={text['max_length']}" in item["dims"] for item in manifest["inputs"])
    return text["max_length"] if bounded else None


def _as_settings(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: ",".join(value) if isinstance(value, list) else str(value) for key, value in config.items()}
