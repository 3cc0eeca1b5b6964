"""A built-in family: a size and settings give its fields; shipped weights where they fit, else seeded random ones."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import logging
import typing
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import torch

from tx_export._load_fit import build_seeded, fill, matched
from tx_export._load_text import (
    bounded,
    bounded_cache,
    check_tokenizer,
    ending_open,
    read_utf8,
    table_of,
    vocabulary,
)
from tx_export._load_weights import Weights, read_metadata, read_weights
from tx_export.errors import LoadError, PluginError
from tx_export.spec import BuiltInSpec, EagerModel, TextSpec

__all__ = ["load_built_in", "parse_settings"]

_log = logging.getLogger("tx_export")
_FREE = frozenset(
    {"dropout", "labels", "max_length"}
)  # fields that may differ from those that weights were trained with
_SHIPPED = "tx_export.models.weights"
_TOKENIZER = "classifier-small.tokenizer.json"  # also for the families and sizes that have none of their own


def load_built_in(
    family: str,
    spec_class: type[BuiltInSpec],
    *,
    size: str,
    settings: Mapping[str, str],
    weights: Path | int | None,
    max_length: int | None,
) -> EagerModel:
    """The eager model; `weights` is a safetensors file, the seed of random ones, or None for the shipped ones."""
    if size not in spec_class.sizes:
        raise PluginError(f"{family} has no size {size!r}; known: {', '.join(spec_class.sizes)}")
    changed = parse_settings(family, spec_class, settings)
    spec, module, origin, tokenizer = _choose(family, spec_class, size, changed, weights)
    table = table_of(spec.inputs())
    if max_length is not None and table is not None and max_length > table:
        raise LoadError(
            f"max-length {max_length} is more than the {table} positions of {family}; --set max_length=... adds some"
        )
    fields = json.loads(json.dumps(dataclasses.asdict(spec)))  # type: ignore[call-overload]
    text, cache = _text(tokenizer, spec, fields, max_length or table or 512), bounded_cache(spec.cache(), max_length)
    return EagerModel(
        name=size if family == "classifier" else f"{family}-{size}",
        source=family,
        family=family,
        task=spec.task,
        module=module.eval(),
        inputs=bounded(spec.inputs(), max_length),
        outputs=bounded(spec.outputs(), max_length),
        config=fields,
        weights=origin,
        text=text if text is None or cache is None or cache.cross else ending_open(text),
        padding="any",
        cache=cache,
        generation=spec.generation(),
    )


def _choose(
    family: str, spec_class: type[BuiltInSpec], size: str, changed: dict[str, Any], weights: Path | int | None
) -> tuple[BuiltInSpec, torch.nn.Module, str, Traversable | Path]:
    """Spec, module, where the weights come from, and where the tokenizer is."""
    folder = importlib.resources.files(_SHIPPED)
    shipped, tokenizer = folder / f"{family}-{size}.safetensors", folder / f"{family}-{size}.tokenizer.json"
    tokenizer = tokenizer if tokenizer.is_file() else folder / _TOKENIZER
    base = dict(spec_class.sizes[size])
    if isinstance(weights, Path):
        spec = spec_class(**(base | _stored_fields(weights, spec_class) | changed))
        for beside in (weights.with_suffix(".tokenizer.json"), weights.with_name("tokenizer.json")):
            if beside.is_file():
                check_tokenizer(read_utf8(beside), vocabulary(spec.inputs()), beside)
                tokenizer = beside
                break
        read = read_weights((weights,))
        return spec, _filled(spec, read), f"checkpoint {read.sha256}", tokenizer
    if weights is None and shipped.is_file():
        with importlib.resources.as_file(shipped) as file:
            stored = base | _stored_fields(file, spec_class)
            spec = spec_class(**(stored | changed))
            if _fits(spec, spec_class(**stored)):
                return spec, _filled(spec, read_weights((file,))), "shipped", tokenizer
    if weights is None:
        reason = "don't fit these settings" if shipped.is_file() else "don't exist"
        _log.warning(
            "%s-%s: shipped weights %s; using random ones (seed 0), predictions mean nothing", family, size, reason
        )
    spec = spec_class(**(base | changed))
    seed = weights if isinstance(weights, int) else 0
    return spec, build_seeded(spec.build, seed), f"random seed {seed}", tokenizer


def _fits(spec: BuiltInSpec, stored: BuiltInSpec) -> bool:
    """The same arithmetic and the same shapes."""
    ours, theirs = dataclasses.asdict(spec), dataclasses.asdict(stored)  # type: ignore[call-overload]
    return all(ours[name] == theirs[name] for name in ours if name not in _FREE) and _shapes(spec) == _shapes(stored)


def _shapes(spec: BuiltInSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        module = build_seeded(spec.build, 0)
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _filled(spec: BuiltInSpec, weights: Weights) -> torch.nn.Module:
    module: torch.nn.Module = build_seeded(spec.build, 0)
    fill(module, matched(module, weights, str, ()))
    return module


def _stored_fields(file: Path, spec_class: type[BuiltInSpec]) -> dict[str, Any]:
    """The fields in the header of a weight file; none where it doesn't say."""
    text = read_metadata(file).get("config", "{}")
    try:
        fields = json.loads(text)
        known = {field.name for field in dataclasses.fields(spec_class)}  # type: ignore[arg-type]
        if not set(fields) <= known:
            raise LoadError(
                f"{file}: its header sets {', '.join(sorted(set(fields) - known))}; known: {', '.join(sorted(known))}"
            )
        return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise LoadError(f"{file}: its header has a config that isn't a JSON object of fields") from error


def _text(place: Traversable | Path, spec: BuiltInSpec, fields: Mapping[str, Any], max_length: int) -> TextSpec | None:
    if not place.is_file():
        _log.warning("%s is not there: the artifact takes arrays only", place.name)
        return None
    text = place.read_text(encoding="utf-8")
    try:
        tokenizer = check_tokenizer(text, vocabulary(spec.inputs()), place.name)
    except LoadError as error:
        _log.warning("the tokenizer does not fit, the artifact takes arrays only (%s)", error)
        return None
    labels = tuple(fields.get("labels") or ())
    scores: Literal["softmax", "sigmoid"] = "sigmoid" if len(labels) == 1 else "softmax"
    return TextSpec(text, max_length, tokenizer.token_to_id("[PAD]") or 0, labels, scores)


def parse_settings(family: str, spec_class: type[BuiltInSpec], settings: Mapping[str, str]) -> dict[str, Any]:
    """KEY=VALUE texts as values of the fields' types."""
    known = [field.name for field in dataclasses.fields(spec_class)]  # type: ignore[arg-type]
    hints = typing.get_type_hints(spec_class)
    for key in settings:
        if key not in known:
            raise PluginError(f"{family} has no setting {key!r}; known: {', '.join(known)}")
    return {key: _parse_value(f"{family}: setting {key}", hints[key], text) for key, text in settings.items()}


def _parse_value(what: str, hint: Any, text: str) -> Any:
    if typing.get_origin(hint) is Literal:
        if text not in typing.get_args(hint):
            raise PluginError(f"{what} is {text!r}; known: {', '.join(map(str, typing.get_args(hint)))}")
        return text
    if typing.get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if hint is bool:
        if text not in ("true", "false"):
            raise PluginError(f"{what} is {text!r}; expected true or false")
        return text == "true"
    assert hint in (int, float, str, NoneType), hint
    try:
        return hint(text)
    except ValueError as error:
        raise PluginError(f"{what} is {text!r}; expected {'a whole number' if hint is int else 'a number'}") from error
