"""Runs an artifact with numpy, onnxruntime and (for text) tokenizers; copied into each artifact as run.py.

    texts --tokenize--> ids --sort, batch--> feeds --check--> session --rows--> results, in input order

As a program: `python run.py --help`. As a module: `Model(folder)(["a text"])` and `Model(folder).run_arrays(feeds)`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import mmap
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TextIO, TypeAlias

import numpy as np

__all__ = [
    "ArtifactError",
    "Model",
    "ProviderError",
    "TxExportError",
    "UsageError",
    "available_threads",
    "bench",
    "converse",
    "cpu_name",
    "external_files",
    "main",
    "open_session",
    "pair_up",
    "read_manifest",
    "read_texts",
    "run",
    "self_test",
]

Text: TypeAlias = "str | tuple[str, str]"  # one text, or a pair of them
Result: TypeAlias = dict[str, Any]  # the JSON of one text


class TxExportError(Exception):
    """Anything that tx-export refuses or fails to do; the message is one line for people."""

    exit_code = 1


class ArtifactError(TxExportError):
    """An artifact that is missing, damaged or not ours."""


class ProviderError(TxExportError):
    """An execution provider that isn't there, or fails."""


class UsageError(TxExportError):
    """A program called in a way that it can't follow."""

    exit_code = 2


# ---- The artifact: a manifest, and files that are what the manifest says they are

_FORMAT = 1
_KEYS: dict[str, type] = {
    "format_version": int,
    "name": str,
    "task": str,
    "min_onnxruntime": str,
    "inputs": list,
    "outputs": list,
    "session": dict,
    "files": dict,
}
_OPTIONAL_KEYS: dict[str, type] = {
    "source": str,
    "config": dict,
    "weights": str,
    "pipeline": str,
    "opset": int,
    "ir_version": int,
    "domains": dict,
    "text": dict,
    "generation": dict,
    "fused": dict,
    "quantized": dict,
    "pruned": dict,
    "verification": dict,
    "verified_on": dict,
    "versions": dict,
}
_TEXT_KEYS: dict[str, type] = {"pad_id": int, "labels": list, "scores": str}
_CACHE_KEYS = ("layers", "heads", "head_dim", "max_length")
_COUNTS = {
    "layers": 0,
    "heads": 1,
    "head_dim": 1,
    "max_length": 1,
    "beams": 1,
    "no_repeat_ngram": 0,
    "min_new_tokens": 0,
}
_MOST = 2**31 - 1  # of each
_IDS = ("bos", "pad", "start", "forced_bos", "forced_eos")
_CHAT = ("first", "reply", "next", "ask")  # what stands around the messages of a conversation
_GENERATION_KEYS: dict[str, type] = {
    "eos": list,
    "suppressed": list,
    "length_penalty": float,
    "repetition_penalty": float,
    "early_stopping": bool,
    "chat": dict,
    **dict.fromkeys(_IDS, int),
    **dict.fromkeys(_COUNTS, int),
}
_SETTINGS_KEYS: dict[str, type] = {
    "provider": str,
    "provider_options": dict,
    "config": dict,
    "run_config": dict,
    "give_back_config": dict,
    "environment": dict,
    "disabled_optimizers": list,
    "graph_optimization": str,
    "arena": bool,
    "mem_pattern": bool,
    "one_thread_workers": bool,
    "batch_tokens": int,
}
_NAMES_A_FILE = re.compile(r"path|file|folder|dir\b|directory|library", re.IGNORECASE)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Read manifest.json and check it: keys, and that each file is inside the folder, whole and unchanged.

    Raises ArtifactError, which names the file and what is wrong with it.
    """
    folder = Path(folder)
    path = folder / "manifest.json"
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder; an artifact is a folder with a manifest.json")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: missing, so this is not an artifact") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: can't be read: {error}") from error
    _check_keys(path, manifest)
    _check_files(folder, manifest["files"])
    for name in sorted(manifest["files"]):
        if name.endswith(".onnx"):
            _check_listed(folder / name, manifest["files"])
    return dict(manifest)


def _graphs(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of its .onnx files: what generates from a source has an encoder, and a decoder with a cache."""
    cache = (manifest.get("generation") or {}).get("cache") or {}
    return ("encoder", "decoder") if cache.get("cross") else ("model",)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _check_keys(path: Path, manifest: Any) -> None:
    if not isinstance(manifest, dict):
        raise ArtifactError(f"{path}: holds no object")
    version = manifest.get("format_version")
    if version != _FORMAT or not _is(version, int):
        newer = "; update what reads it" if isinstance(version, int) and version > _FORMAT else ""
        raise ArtifactError(f"{path}: format_version is {version!r}; this program reads {_FORMAT}{newer}")
    _check_types(path, manifest, _KEYS, needed=tuple(_KEYS))
    _check_types(path, manifest, _OPTIONAL_KEYS)
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", manifest["min_onnxruntime"]):
        raise ArtifactError(f"{path}: key 'min_onnxruntime' is {manifest['min_onnxruntime']!r}, not X.Y.Z")
    text = manifest.get("text")
    graphs = [f"{name}.onnx" for name in _graphs(manifest)]
    for name in graphs if text is None else [*graphs, "tokenizer.json"]:
        if name not in manifest["files"]:
            raise ArtifactError(f"{path}: lists no file {name}")
    for settings in manifest["session"].values() or [None]:
        _check_settings(path, settings)
    inputs, outputs = (_check_tensors(path, manifest, key) for key in ("inputs", "outputs"))
    if not outputs:
        raise ArtifactError(f"{path}: has no outputs")
    if text is not None:
        _check_text(path, text, inputs)
    if manifest.get("generation") is not None:
        _check_generation(path, manifest["generation"], inputs)
    _check_verification(path, manifest.get("verification") or {}, manifest.get("verified_on") or {})


def _check_settings(path: Path, settings: Any) -> None:
    if not isinstance(settings, dict):
        raise ArtifactError(f"{path}: key 'session' has no settings for a provider")
    _check_types(path, settings, _SETTINGS_KEYS, needed=("provider",))
    _check_strings(path, "disabled_optimizers", settings.get("disabled_optimizers"))
    for key in ("provider_options", "config", "run_config", "give_back_config"):
        for option, value in (settings.get(key) or {}).items():
            if _NAMES_A_FILE.search(option):
                raise ArtifactError(f"{path}: key {key!r} sets {option}; an artifact's settings name no files; refused")
            if not isinstance(value, (str, int, float)):
                raise ArtifactError(f"{path}: key {key!r} sets {option} to a {type(value).__name__}")
    for variable, value in (settings.get("environment") or {}).items():
        if not re.fullmatch(r"ORT_\w+", variable) or value not in ("0", "1"):
            raise ArtifactError(
                f"{path}: key 'environment' sets {variable} to {value!r}; allowed: ORT_... to '0' or '1'"
            )


def _check_tensors(path: Path, manifest: Mapping[str, Any], key: str) -> list[_Tensor]:
    try:
        tensors = [_Tensor.parse(item) for item in manifest[key]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path}: key {key!r}: an input or output can't be read: {error!r}") from error
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ArtifactError(f"{path}: key {key!r} has one name twice: {', '.join(names)}")
    return tensors


def _check_text(path: Path, text: Mapping[str, Any], inputs: Sequence[_Tensor]) -> None:
    _check_types(path, text, _TEXT_KEYS)
    _check_strings(path, "labels", text.get("labels"), "a label is not a str")
    if text.get("scores") not in (None, "softmax", "sigmoid", "identity"):
        raise ArtifactError(f"{path}: key 'scores' is {text['scores']!r}; known: softmax, sigmoid, identity")
    if not _is(text.get("max_length"), int) or text["max_length"] < 1:
        raise ArtifactError(f"{path}: key 'text' has no max_length from 1 up")
    if not any(tensor.name == "input_ids" and len(tensor.dims) == 2 for tensor in inputs):
        raise ArtifactError(f"{path}: takes text, but has no input_ids with two dims")


def _check_generation(path: Path, generation: Mapping[str, Any], inputs: Sequence[_Tensor]) -> None:
    _check_types(path, generation, {"cache": dict}, needed=("cache",))
    told = {**generation, **generation["cache"]}
    _check_types(path, told, _GENERATION_KEYS, needed=_CACHE_KEYS)
    _check_types(path, told, {"cross": bool, "shared": bool})
    for key, least in _COUNTS.items():
        if told.get(key) is not None and not least <= told[key] <= _MOST:
            raise ArtifactError(f"{path}: key {key!r} is {told[key]}; allowed {least}..{_MOST}")
    high = next((tensor.high for tensor in inputs if tensor.name == "input_ids" and tensor.high is not None), _MOST)
    single = [told[key] for key in _IDS if told.get(key) is not None]
    for index in [*(told.get("eos") or ()), *(told.get("suppressed") or ()), *single]:
        if not _is(index, int) or not 0 <= index <= high:
            raise ArtifactError(f"{path}: key 'generation' has the id {index!r}; allowed 0..{high:g}")
    chat = told.get("chat")
    if chat is not None and not all(isinstance(chat.get(key), str) for key in _CHAT):
        raise ArtifactError(f"{path}: key 'chat' has no texts {', '.join(_CHAT)}")


def _check_verification(path: Path, verification: Mapping[str, Any], verified_on: Mapping[str, Any]) -> None:
    _check_types(path, verification, {"self_test": dict, "passes": list, "overall": dict})
    for key, value in (verification.get("self_test") or {}).items():
        limits = value.values() if isinstance(value, dict) else [value]
        if not all(_is(limit, float) for limit in limits):
            raise ArtifactError(f"{path}: key 'self_test' has a limit {key} that is not a number")
    _check_types(path, verified_on, {"provider": str, "instruction_sets": list})
    _check_strings(path, "instruction_sets", verified_on.get("instruction_sets"))


def _check_types(path: Path, found: Mapping[str, Any], keys: Mapping[str, type], needed: Sequence[str] = ()) -> None:
    for key, kind in keys.items():
        value = found.get(key)
        if not _is(value, kind) and (key in needed or value is not None):
            raise ArtifactError(f"{path}: key {key!r} is missing or not a {kind.__name__}")


def _check_strings(path: Path, key: str, values: Any, reason: str = "an item is not a str") -> None:
    if not all(isinstance(value, str) for value in values or ()):
        raise ArtifactError(f"{path}: key {key!r}: {reason}")


def _is(value: Any, kind: type) -> bool:
    """As JSON has types: a whole number is a float too, and true is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _check_files(folder: Path, files: Mapping[str, Any]) -> None:
    for name, expected in sorted(files.items()):
        path = _inside(folder, name)
        if not path.is_file():
            raise ArtifactError(f"{path}: missing; the manifest lists it")
        if not isinstance(expected, dict) or "bytes" not in expected or "sha256" not in expected:
            raise ArtifactError(f"{folder / 'manifest.json'}: has no bytes and sha256 for {name}")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise ArtifactError(f"{path}: has {size} bytes where the manifest says {expected['bytes']}")
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ArtifactError(f"{path}: can't be read: {error.strerror}") from error
        if found != expected["sha256"]:
            raise ArtifactError(f"{path}: damaged or changed; its sha256 is not the one in the manifest")


def _inside(folder: Path, name: str) -> Path:
    """The path of a file of the artifact; one that leaves the folder, by name or by link, is refused."""
    parts, path = PurePosixPath(name).parts, folder / name
    plain = bool(parts) and ".." not in parts and not name.startswith("/") and "\\" not in name and ":" not in name
    try:
        inside = plain and path.resolve().is_relative_to(folder.resolve())
        path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # no name of a file, or links in a circle
        raise ArtifactError(f"{folder}: the file {name!r} can't be looked for: {error}") from error
    if not inside:
        link = " (it is a symlink; cp -rL makes a copy that holds the files themselves)" if plain else ""
        raise ArtifactError(f"{folder}: the file {name!r} lies outside the artifact; refused{link}")
    return path


# The parts of an ONNX file in which tensors can hide: message -> field number -> message (onnx.proto).
_ONNX = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external"},
}


def _check_listed(path: Path, files: Mapping[str, Any]) -> None:
    for name in external_files(path):
        if name not in files:
            raise ArtifactError(f"{path}: its weights are in {name!r}, which the manifest doesn't list; refused")


def external_files(path: Path) -> list[str]:
    """Names of the files in which an ONNX file's weights lie, found without the onnx package.

    Raises ArtifactError for what is no ONNX file, and for a name or link that leaves its folder.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            view = memoryview(data)
            try:
                names = sorted(set(_external_locations(view, 0, len(view), "model")))
            finally:
                view.release()
    except (OSError, IndexError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not an ONNX file that can be read: {error}") from error
    for name in names:
        try:
            _inside(path.parent, name)
        except ArtifactError as error:
            raise ArtifactError(f"{path}: its weights are in {name!r}: {error}") from error
    return names


def _external_locations(view: memoryview, start: int, end: int, message: str) -> Iterator[str]:
    for number, low, high in _protobuf_fields(view, start, end):
        inner = _ONNX[message].get(number)
        if inner == "external":
            entry = {key: bytes(view[a:b]) for key, a, b in _protobuf_fields(view, low, high)}
            if entry.get(1) == b"location":
                yield entry.get(2, b"").decode("utf-8")
        elif inner is not None:
            yield from _external_locations(view, low, high, inner)


def _protobuf_fields(view: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, end) of each length-delimited field; the others are skipped."""
    while start < end:
        key, start = _varint(view, start)
        wire = key & 7
        if wire == 0:
            start = _varint(view, start)[1]
        elif wire == 2:
            size, start = _varint(view, start)
            yield key >> 3, start, start + size
            start += size
        elif wire in (1, 5):
            start += 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
    if start != end:
        raise ValueError("cut short")


def _varint(view: memoryview, start: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[start]
        value |= (byte & 127) << shift
        start, shift = start + 1, shift + 7
        if byte < 128:
            return value, start
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


# ---- The machine: threads, CPU, and what is said about them

_MOST_THREADS = 4 * max(16, os.cpu_count() or 1)  # more only wait for one another


def available_threads() -> int:
    """CPUs that this process may use: the least of affinity and cgroup quota (v1 and v2), at least 1."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        allowed = os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(quota) for quota in _cgroup_quotas(Path("/")))]))


def _cgroup_quotas(root: Path) -> Iterator[float]:
    """CPU quotas, in CPUs, of this process's control groups and their parents below `root`."""
    groups = {"": "/", "cpu": "/"}
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), group)
    for mount, group in (("sys/fs/cgroup", groups[""]), ("sys/fs/cgroup/unified", groups[""])):
        for folder in _with_parents(root / mount, group):
            with contextlib.suppress(OSError, ValueError):  # "max 100000" is no quota
                quota, period = (folder / "cpu.max").read_text().split()
                yield int(quota) / int(period)
    for mount in ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct"):
        for folder in _with_parents(root / mount, groups["cpu"]):
            with contextlib.suppress(OSError, ValueError):
                quota = (folder / "cpu.cfs_quota_us").read_text()
                if int(quota) > 0:  # -1 is no quota
                    yield int(quota) / int((folder / "cpu.cfs_period_us").read_text())


def _with_parents(mount: Path, group: str) -> Iterator[Path]:
    # Inside a container the group's own path may not be mounted; its files then stand at the mount itself.
    parts = [part for part in group.split("/") if part not in ("", "..")]
    return (mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))


def cpu_name() -> str:
    """The CPU's model name."""
    found = _cpu_fields().get("model name", "")
    return found or platform.processor() or platform.machine() or "unknown"


def _cpu_fields() -> dict[str, str]:
    """The first CPU of /proc/cpuinfo; empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _lacks_vnni() -> bool:
    """Whether this is an x86 CPU without 8-bit dot products; an unknown platform is not."""
    flags = _cpu_fields().get("flags", "").split()
    return bool(flags) and not {"avx512_vnni", "avx_vnni"} & set(flags)


class _Notices:
    """Says things on stderr, each kind once in the life of a model."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            print(f"notice: {message}", file=sys.stderr, flush=True)


# ---- Arrays: what a graph takes, checked before the session sees it

_DIM = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:<=(?P<bound>\d+))?")


@dataclass(frozen=True)
class _Dim:
    name: str
    bound: int | None

    def __str__(self) -> str:
        return self.name if self.bound is None else f"{self.name}<={self.bound}"


def _size_key(dim: int | _Dim) -> int | str:
    return dim if isinstance(dim, int) else dim.name


@dataclass(frozen=True)
class _Tensor:
    """An input or output as the manifest declares it."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | _Dim, ...]
    low: float | None
    high: float | None

    @classmethod
    def parse(cls, item: Mapping[str, Any]) -> _Tensor:
        dims = tuple(_parse_dim(dim) for dim in item["dims"])
        low, high = item.get("range") or (None, None)
        if not (low is high is None or (_is(low, float) and _is(high, float) and low <= high)):  # type: ignore[operator]
            raise ValueError(f"range {low!r}, {high!r}")
        name, dtype = item["name"], np.dtype(str(item["dtype"]))
        if not isinstance(name, str) or not name:
            raise ValueError(f"name {name!r}")
        if dtype.kind not in "biuf":
            raise ValueError(f"dtype {dtype} holds no numbers")
        return cls(name, dtype, dims, low, high)

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}[{','.join(str(dim) for dim in self.dims)}]"


def _parse_dim(dim: int | str) -> int | _Dim:
    if _is(dim, int) and int(dim) >= 0:
        return int(dim)
    found = _DIM.fullmatch(dim) if isinstance(dim, str) else None
    if found is None:
        raise ValueError(f"dim {dim!r}")
    return _Dim(found["name"], int(found["bound"]) if found["bound"] else None)


_DEFAULTS = {"attention_mask": 1, "token_type_ids": 0}  # all positions are real, all of the first text


def _check_feeds(inputs: Sequence[_Tensor], feeds: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays as the session wants them, and the size of each named dim; TxExportError says what doesn't fit."""
    if not isinstance(feeds, Mapping):
        raise TxExportError(
            f"inputs: {type(feeds).__name__} given; expected arrays by name: {', '.join(map(str, inputs))}"
        )
    missing = [str(tensor) for tensor in inputs if tensor.name not in feeds and tensor.name not in _DEFAULTS]
    unknown = sorted(str(name) for name in feeds if name not in {tensor.name for tensor in inputs})
    if missing or unknown:
        parts = [f"missing {', '.join(missing)}"] if missing else []
        parts += [f"unknown {', '.join(unknown)}"] if unknown else []
        raise TxExportError(f"inputs: {'; '.join(parts)}; expected {', '.join(map(str, inputs))}")
    arrays: dict[str, np.ndarray] = {}
    owners: dict[str, tuple[int, str]] = {}
    for tensor in (tensor for tensor in inputs if tensor.name in feeds):
        arrays[tensor.name] = _convert(tensor, feeds[tensor.name])
        _check_shape(tensor, arrays[tensor.name], owners)
        _check_range(tensor, arrays[tensor.name])
    sizes = {name: size for name, (size, _) in owners.items()}
    for tensor in (tensor for tensor in inputs if tensor.name not in feeds):
        shape = [dim if isinstance(dim, int) else sizes.get(dim.name, 1) for dim in tensor.dims]
        arrays[tensor.name] = np.full(shape, _DEFAULTS[tensor.name], tensor.dtype)
    return arrays, sizes


def _convert(tensor: _Tensor, value: Any) -> np.ndarray:
    """The value in the declared dtype and in C order; nothing but the precision of a float may get lost."""
    try:
        array = np.asarray(value)
    except Exception as error:  # ragged lists, and arrays of other libraries that don't let themselves be read
        raise TxExportError(f"input {tensor.name!r}: {_first_line(error)}; expected {tensor}") from error
    if array.dtype == tensor.dtype:
        return np.asarray(array, order="C")
    kinds, words = (
        ("biuf", "any float, integer or bool") if tensor.dtype.kind == "f" else ("biu", "bool and any integer")
    )
    if array.dtype.kind not in kinds and array.size:
        raise TxExportError(f"input {tensor.name!r}: dtype {array.dtype} given; accepted: {words} (for {tensor})")
    with np.errstate(all="ignore"):
        converted = np.asarray(array, dtype=tensor.dtype, order="C")
    # Floats may be rounded, but not become infinite; everything else is kept exactly.
    kept = np.isfinite if array.dtype.kind == "f" else np.asarray
    if not np.array_equal(kept(converted), kept(array)):
        raise TxExportError(f"input {tensor.name!r}: {array.dtype} values don't fit into {tensor.dtype}")
    return converted


def _check_shape(tensor: _Tensor, array: np.ndarray, owners: dict[str, tuple[int, str]]) -> None:
    if array.ndim != len(tensor.dims):
        raise TxExportError(
            f"input {tensor.name!r}: shape {list(array.shape)} has {array.ndim} dims, not {len(tensor.dims)}: {tensor}"
        )
    for dim, size in zip(tensor.dims, array.shape, strict=True):
        if isinstance(dim, int):
            if size != dim:
                raise TxExportError(f"input {tensor.name!r}: a dim is {size} and must be {dim}: {tensor}")
            continue
        known, owner = owners.setdefault(dim.name, (size, tensor.name))
        if size != known:
            raise TxExportError(f"input {tensor.name!r}: {dim.name} is {size}, but {known} in {owner!r}")
        if dim.bound is not None and size > dim.bound:
            raise TxExportError(f"input {tensor.name!r}: {dim.name} is {size}; the limit is {dim.bound}")


def _check_range(tensor: _Tensor, array: np.ndarray) -> None:
    """Every value is in the declared range; without one, floats are finite: nothing else was proven."""
    low, high, allowed = tensor.low, tensor.high, f"{tensor.low}..{tensor.high}"
    if low is None or high is None:
        if array.dtype.kind != "f":
            return
        low, high, allowed = np.finfo(array.dtype).min, np.finfo(array.dtype).max, "finite numbers"
    if not array.size or (array.min() >= low and array.max() <= high):
        return
    place = tuple(int(index) for index in np.argwhere(~((array >= low) & (array <= high)))[0])
    names = ("row", "position", "channel")
    where = ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=False))
    raise TxExportError(f"input {tensor.name!r}: {array[place]} at {where or 'its only place'}; allowed {allowed}")


# ---- The session: ONNX Runtime with the settings of the manifest


_REPAID = 32  # batches: opening a session takes as long as one-thread workers save on so many


class _Sessions:
    """Sessions of one graph on one provider: one with all threads and, while it pays, one for workers of one thread.

    A run of more positions than a batch of texts may have is large. It gives its memory back when it ends, for up to
    a fifth of its time; where large runs follow each other, that waits for the end of the next short one.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], provider: str, threads: int) -> None:
        self.settings = _settings(manifest, provider)
        self.batch_tokens: int = self.settings.get("batch_tokens") or 256
        self.threads = threads
        self._opening = {
            name: functools.partial(
                open_session, folder / f"{name}.onnx", manifest["min_onnxruntime"], provider, self.settings
            )
            for name in _graphs(manifest)
        }
        self._lock = threading.Lock()
        self._by_threads: dict[int, dict[str, Any]] = {threads: self._open(threads)}
        self._memory: dict[int, Literal["small", "given back", "large"]] = {}
        onnxruntime = _import_onnxruntime(manifest["min_onnxruntime"])
        usual = self.settings.get("run_config") or {}
        self.usual = _run_options(onnxruntime, usual)
        self._giving_back = _run_options(onnxruntime, usual | (self.settings.get("give_back_config") or {}))

    def _open(self, threads: int) -> dict[str, Any]:
        return {name: opening(threads) for name, opening in self._opening.items()}

    def by_name(self, threads: int) -> dict[str, Any]:
        """The session of `model`, or those of `encoder` and `decoder`."""
        with self._lock:
            return self._by_threads[threads]

    def run(
        self, threads: int, outputs: Sequence[str], arrays: Mapping[str, np.ndarray], graph: str = "model"
    ) -> dict[str, np.ndarray]:
        """Outputs by name."""
        positions = max((math.prod(array.shape[:2]) for array in arrays.values()), default=0)
        with self._lock:
            if threads not in self._by_threads:
                _map_large_blocks()  # or what this session takes stays scattered over the heap when it is closed
                self._by_threads[threads] = self._open(threads)
            session = self._by_threads[threads][graph]
            gives_back = self._gives_back(threads, positions > self.batch_tokens)
        try:
            found = session.run(list(outputs), dict(arrays), self._giving_back if gives_back else self.usual)
        except Exception as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
            raise TxExportError(f"onnxruntime failed on {shapes}: {_first_line(error)}") from error
        if gives_back:
            _trim_memory()
        return dict(zip(outputs, found, strict=True))

    def _gives_back(self, threads: int, is_large: bool) -> bool:
        before = self._memory.get(threads, "small")
        self._memory[threads] = "small" if not is_large else "given back" if before == "small" else "large"
        return before == "small" if is_large else before == "large"

    def workers_pay(self, batches: int) -> bool:
        """Whether workers of one thread each are the faster way for so many batches."""
        if not self.settings.get("one_thread_workers") or self.threads == 1:
            return False
        fewest = 2 * self.threads
        return batches >= (fewest if 1 in self._by_threads else max(fewest, _REPAID))

    def close_workers(self) -> None:
        """Give the memory of the workers' session back."""
        if self.threads == 1 or 1 not in self._by_threads:
            return
        with self._lock:
            self._by_threads.pop(1, None)
            self._memory.pop(1, None)
        _trim_memory()


def _map_large_blocks() -> None:
    """Let glibc map every block of 128 kB and more by itself, its first setting, which it otherwise soon raises."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD


def _trim_memory() -> None:
    """Let the C library give freed memory to the system; glibc would keep much of it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _import_onnxruntime(least: str) -> Any:
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise TxExportError(f"onnxruntime can't be imported ({error}); pip install -r requirements.txt") from error
    found = str(onnxruntime.__version__)
    if _version(found) < _version(least):
        raise TxExportError(f"onnxruntime is too old: needs >= {least}, found {found}")
    return onnxruntime


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _settings(manifest: Mapping[str, Any], provider: str) -> Mapping[str, Any]:
    """What the manifest says about a provider; see tx_export/providers for the keys."""
    try:
        return dict(manifest["session"][provider])
    except (KeyError, TypeError) as error:
        known = ", ".join(manifest["session"])
        raise ProviderError(f"provider {provider}: this artifact has settings for {known} only{_offered()}") from error


def _offered() -> str:
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError:
        return ""
    return f"; onnxruntime {onnxruntime.__version__} here has {', '.join(onnxruntime.get_available_providers())}"


def open_session(model: Path, least: str, provider: str, settings: Mapping[str, Any], threads: int) -> Any:
    """An onnxruntime session with a provider's settings; ProviderError unless that provider is the one that it got."""
    onnxruntime = _import_onnxruntime(least)
    wanted = settings["provider"]
    if wanted not in onnxruntime.get_available_providers():
        raise ProviderError(f"provider {provider}: {wanted} isn't available{_offered()}")
    try:
        with environment_of(settings):
            session = onnxruntime.InferenceSession(
                str(model),
                _session_options(onnxruntime, settings, threads),
                providers=[
                    (wanted, {key: str(value) for key, value in (settings.get("provider_options") or {}).items()})
                ],
                disabled_optimizers=settings.get("disabled_optimizers"),
                enable_fallback=0,
            )
    except Exception as error:
        kind = ProviderError if wanted != "CPUExecutionProvider" else ArtifactError
        version = onnxruntime.__version__
        what = f"{model}: onnxruntime {version} can't load it with provider {provider}"
        raise kind(f"{what}: {_first_line(error)}") from error
    used = session.get_providers()[0]
    if used != wanted:
        raise ProviderError(f"provider {provider}: asked for {wanted}, but the session runs on {used}{_offered()}")
    _trim_memory()  # loading leaves behind as much as a small model holds
    return session


@contextlib.contextmanager
def environment_of(settings: Mapping[str, Any]) -> Iterator[None]:
    """What a provider's settings want in the environment while a session is made; what is there already wins."""
    mine = {key: value for key, value in (settings.get("environment") or {}).items() if key not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for key in mine:
            os.environ.pop(key, None)


def _session_options(onnxruntime: Any, settings: Mapping[str, Any], threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    # Set by hand, so that ONNX Runtime neither counts the host's CPUs nor pins threads to them.
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what goes wrong is raised, and told once
    options.enable_cpu_mem_arena = settings.get("arena", True)
    options.enable_mem_pattern = settings.get("mem_pattern", False)
    levels = {"all": "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC"}
    level = levels.get(settings.get("graph_optimization", "all"), "ORT_DISABLE_ALL")
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    for key, value in (settings.get("config") or {}).items():
        options.add_session_config_entry(key, str(value))
    return options


def _run_options(onnxruntime: Any, config: Mapping[str, Any]) -> Any:
    options = onnxruntime.RunOptions()
    for key, value in config.items():
        options.add_run_config_entry(key, str(value))
    return options


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


# ---- Text: tokens, cut to the limit


@dataclass(frozen=True)
class _Row:
    """One text as the model takes it."""

    index: int  # of the text in the input
    ids: Sequence[int]
    encoding: Any  # of the tokenizer: type_ids, tokens, special_tokens_mask
    cut: bool


class _Tokenizer:
    """The artifact's tokenizer.json; its own padding and truncation are replaced by ours."""

    def __init__(self, tokenizer: Any, text: Mapping[str, Any], ids: _Tensor, notices: _Notices) -> None:
        self.max_length: int = text["max_length"]
        pad = text.get("pad_id") or 0
        # A tokenizer may pad with an id that the model lacks; the mask covers whatever stands there.
        self.pad_id: int = pad if ids.low is None or ids.high is None or ids.low <= pad <= ids.high else int(ids.low)
        self._tokenizer = tokenizer
        self._tokenizer.enable_truncation(self.max_length, strategy="longest_first")
        self._ids, self._notices = ids, notices

    def encode(self, index: int, text: Text) -> _Row:
        """Tokens of one text or pair, special tokens kept and the longer of a pair cut first."""
        parts = [_repaired(index, part, self._notices) for part in _parts(index, text)]
        try:
            parts = [self._shorten(part) for part in parts]
            found = self._tokenizer.encode(parts[0], parts[1] if len(parts) == 2 else None)
        except Exception as error:
            raise TxExportError(f"text {index}: the tokenizer failed: {_first_line(error)}") from error
        ids, cut = found.ids, bool(found.overflowing)
        if not ids:
            raise TxExportError(f"text {index}: has no tokens, and this tokenizer adds no special ones")
        if len(ids) > self.max_length:  # the tokenizers package doesn't cut special tokens, and then nothing at all
            raise TxExportError(
                f"text {index}: the limit of {self.max_length} tokens is too low for its special tokens"
            )
        if self._ids.high is not None and max(ids) > self._ids.high:
            raise TxExportError(f"text {index}: token id {max(ids)}; the model takes {self._ids.low}..{self._ids.high}")
        if cut:
            rest = 'more such texts are not announced; --json marks them all with "truncated": true'
            self._notices.say("cut", f"text {index} was cut to {self.max_length} tokens; {rest}")
        return _Row(index, ids, found, cut)

    def _shorten(self, text: str) -> str:
        """A prefix with the same first tokens up to the limit, so that cost doesn't grow with what is thrown away.

        It ends between two words, well behind the last token kept; as long as a prefix has too few tokens (one long
        word, many spaces) it is made longer.
        """
        size = 2 * self.max_length
        while size < len(text):
            prefix = next(iter(text[:size].rsplit(None, 1)), "")
            if len(prefix) < size - 1000:
                prefix = text[:size]
            plain = self._tokenizer.encode(prefix, add_special_tokens=False)
            if len(plain.ids) + sum(len(rest.ids) for rest in plain.overflowing) > self.max_length + 128:
                return prefix
            size *= 2
        return text


def _open_tokenizer(path: Path) -> Any:
    """Without its own padding and truncation."""
    try:
        import tokenizers
    except ImportError as error:
        raise TxExportError(f"tokenizers can't be imported ({error}); pip install -r requirements.txt") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
    except Exception as error:
        raise ArtifactError(f"{path}: the tokenizer can't be loaded: {_first_line(error)}") from error
    return tokenizer


def _repaired(index: int, text: str, notices: _Notices) -> str:
    """Half characters become U+FFFD, the mark of what can't be read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        notices.say("half", f"text {index} holds half of a surrogate pair; U+FFFD is put in its place")
        return _whole(text)
    return text


def _parts(index: int, text: Any) -> list[str]:
    """The one or two strings of a text."""
    parts = [text] if isinstance(text, str) else list(text) if isinstance(text, (tuple, list)) else []
    if len(parts) not in (1, 2) or not all(isinstance(part, str) for part in parts):
        raise TxExportError(f"text {index}: expected a str or a pair of them, not {type(text).__name__}")
    return parts


def _whole(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# ---- Results: from the arrays of a batch to the JSON of a text


def _scores(kind: str, logits: np.ndarray) -> np.ndarray:
    """Probabilities of the labels: softmax over them, or a sigmoid for each; one label alone takes the sigmoid.

    The scores of a regression, or of a cross-encoder that says so, are the logits themselves.
    """
    logits = logits.astype(np.float64)
    if kind == "identity":
        return logits
    if kind == "sigmoid" or logits.shape[-1] == 1:
        return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)))
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def _classify(logits: np.ndarray, labels: Sequence[str], kind: str) -> Result:
    if logits.ndim != 1:
        raise ArtifactError(f"a text-classification gives one score for each label, not shape {list(logits.shape)}")
    scores = _scores(kind, logits)
    best = int(scores.argmax())
    names = _label_names(labels, len(scores))
    by_name = {name: float(score) for name, score in zip(names, scores, strict=True)}
    return {"label": names[best], "score": float(scores[best]), "scores": by_name}


def _label_names(labels: Sequence[str], count: int) -> list[str]:
    if labels and len(labels) != count:
        raise ArtifactError(f"manifest.json: has {len(labels)} labels for {count} scores")
    return list(labels) or [str(number) for number in range(count)]


def _label_tokens(logits: np.ndarray, row: _Row, labels: Sequence[str]) -> Result:
    if logits.shape[:-1] != (len(row.ids),):
        raise ArtifactError(f"a token-classification gives scores for each token, not shape {list(logits.shape)}")
    names = _label_names(labels, logits.shape[-1])
    kept = [place for place, special in enumerate(row.encoding.special_tokens_mask) if not special]
    best, tokens = logits.argmax(axis=-1), row.encoding.tokens
    return {"tokens": [tokens[place] for place in kept], "labels": [names[best[place]] for place in kept]}


# ---- Continuations: a prompt's ids in, text out as it comes

_USUAL = 128  # new tokens, where no number is given and the limit leaves so many
_TOGETHER = 8  # rows at most: each has a cache
_OWN_OPTIONS = {"beams": 1, "length_penalty": 1.0, "repetition_penalty": 1.0, "early_stopping": False}
_OWN_OPTIONS |= {"no_repeat_ngram": 0, "min_new_tokens": 0}
_NOTHING_ASKED: dict[str, Any] = {"eos": [], "suppressed": [], "chat": None, **dict.fromkeys(_IDS), **_OWN_OPTIONS}


@dataclass(frozen=True)
class _Asked:
    """How texts are continued."""

    options: Any  # generate.Options
    stops: tuple[str, ...]  # before the first of which a continuation ends

    def at_most(self, new: int) -> _Asked:
        return dataclasses.replace(self, options=dataclasses.replace(self.options, max_new_tokens=new))


class _Writer:
    """Continues texts, none of which is cut: its tokenizer and its generator."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        manifest: Mapping[str, Any],
        ids: _Tensor,
        sessions: _Sessions,
        notices: _Notices,
    ) -> None:
        told = {key: value for key, value in manifest["generation"].items() if value is not None}
        self.generation: dict[str, Any] = _NOTHING_ASKED | told
        self.notices = notices
        cache = self.generation["cache"]
        self._length: int = cache["max_length"]
        self._source_length: int | None = manifest["text"]["max_length"] if cache.get("cross") else None
        self._folder, self._tokenizer, self._ids, self._sessions = folder, tokenizer, ids, sessions
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {index for index, token in added.items() if token.special}

    @functools.cached_property
    def _generator(self) -> Any:
        try:
            return _import_generate().Generator(
                self._sessions.by_name(self._sessions.threads), self.generation, self._sessions.usual
            )
        except Exception as error:
            raise ArtifactError(f"{self._folder}: a graph that continues no text: {_first_line(error)}") from error

    def asked(self, given: Mapping[str, Any]) -> _Asked:
        """What the artifact asks for, and what is given instead."""
        generate = _import_generate()
        known = ["stop", *(field.name for field in dataclasses.fields(generate.Options))]
        if unknown := sorted(set(given) - set(known)):
            raise UsageError(f"{unknown[0]}: no option of a generation; known: {', '.join(known)}")
        options = {name: self.generation[name] for name in _OWN_OPTIONS}
        if given.get("temperature"):
            options["beams"] = 1  # what is drawn is no search for the likeliest
        options |= {name: value for name, value in given.items() if name != "stop"}
        stops = given.get("stop", ())
        if isinstance(stops, str) or not all(isinstance(text, str) and text for text in stops):
            raise UsageError(f"stop: expected a list of texts, none of them empty, not {stops!r}")
        try:
            return _Asked(generate.Options(**options), tuple(stops))
        except generate.LimitError as error:
            raise UsageError(_first_line(error)) from error

    def prompt(self, index: int, text: Text) -> _Row:
        """The ids of a text, with the special tokens that its tokenizer puts before it."""
        parts = _parts(index, text)
        if len(parts) == 2:
            raise TxExportError(f"text {index}: a pair given; what is continued is one text")
        try:
            found = self._tokenizer.encode(_repaired(index, parts[0], self.notices))
        except Exception as error:
            raise TxExportError(f"text {index}: the tokenizer failed: {_first_line(error)}") from error
        return self.row(index, found.ids)

    def row(self, index: int, ids: Sequence[int]) -> _Row:
        """Ids that can be continued."""
        if self._ids.high is not None and max(ids, default=0) > self._ids.high:
            raise TxExportError(f"text {index}: token id {max(ids)}; the model takes {self._ids.low}..{self._ids.high}")
        if self._source_length is not None and len(ids) > self._source_length:
            raise TxExportError(f"text {index}: has {len(ids)} tokens; the limit is {self._source_length}")
        if self._room(ids) < 1:
            limit = f"the limit, continuation included, is {self._length}"
            raise TxExportError(f"text {index}: has {len(ids)} tokens; {limit}")
        return _Row(index, ids, None, False)

    def _room(self, ids: Sequence[int]) -> int:
        """For new tokens; behind an encoder they stand alone."""
        return self._length - (len(ids) if self._source_length is None else 1)

    def _new(self, ids: Sequence[int], asked: _Asked) -> int:
        """How many new tokens a row gets at most."""
        return asked.options.max_new_tokens or max(min(_USUAL, self._room(ids)), 1)

    def fits(self, ids: Sequence[int], asked: _Asked) -> bool:
        return self._room(ids) >= self._new(ids, asked)

    def write(self, rows: Sequence[_Row], asked: _Asked) -> Iterator[Result]:
        """Results in the order of rows; those of like length are read together."""
        new = sorted({self._new(row.ids, asked) for row in rows})
        alike = ((most, [row for row in rows if self._new(row.ids, asked) == most]) for most in new)
        batches = ((most, batch) for most, some in alike for batch in _batches(some, self._sessions.batch_tokens))
        found = (
            self._write(batch[start : start + _TOGETHER], asked.at_most(most))
            for most, batch in batches
            for start in range(0, len(batch), _TOGETHER)
        )
        return _in_order(rows, found)

    def _write(self, rows: Sequence[_Row], asked: _Asked) -> dict[int, Result]:
        streams, texts = [self._stream(row, asked) for row in rows], [list[str]() for _ in rows]

        def listen(place: int, ids: list[int]) -> bool:
            texts[place].append(streams[place].push(ids))
            return bool(streams[place].stopped)

        several = asked.options.beams > 1
        with self._explained(rows):
            prompts, numbers = [row.ids for row in rows], [row.index for row in rows]
            found = self._generator.generate(prompts, asked.options, None if several else listen, numbers)
            for place, ids in enumerate(found if several else ()):
                listen(place, ids)
        parts = zip(rows, texts, streams, strict=True)
        return {row.index: {"text": "".join([*text, stream.finish()])} for row, text, stream in parts}

    def stream(self, row: _Row, asked: _Asked, new: list[int]) -> Iterator[str]:
        """Text as it becomes final, of several beams at the end; `new` gets the ids."""
        asked = asked.at_most(self._new(row.ids, asked))
        stream, several = self._stream(row, asked), asked.options.beams > 1
        generator = self._generator
        with self._explained([row]):
            found = generator.generate([row.ids], asked.options)[0] if several else None
            for token in generator.stream(row.ids, asked.options) if found is None else found:
                new.append(token)
                yield stream.push([token])
                if stream.stopped:
                    return
            yield stream.finish()

    def _stream(self, row: _Row, asked: _Asked) -> Any:
        """Decoded behind the prompt's last token, or a space between them might be lost."""
        last = list(row.ids[-1:]) if self._source_length is None else []
        before = [] if self._special.issuperset(last) else last
        start = len(self._decode(before))
        return _import_generate().TextStream(lambda ids: self._decode(before + ids)[start:], asked.stops)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    @contextlib.contextmanager
    def _explained(self, rows: Sequence[_Row]) -> Iterator[None]:
        """What goes wrong is told with the numbers of the texts."""
        try:
            yield
        except TxExportError:
            raise
        except Exception as error:
            named = re.search(r"^prompt (\d+): ", str(error))
            row = rows[int(named[1])] if named else rows[0]
            reason = _first_line(error)[named.end() if named else 0 :]
            raise TxExportError(f"text {row.index}: {reason}") from error

    def message(self, before: str, text: str, behind: str) -> list[int]:
        """Ids of a message and what stands around it; special tokens that the message spells are plain text."""
        ids, parts = self._plain_ids(before + text + behind), [self._plain_ids(part) for part in (before, behind)]
        if self.special(ids) == self.special(parts[0] + parts[1]):
            return ids
        literal = self._literal.encode(text, add_special_tokens=False).ids
        return [*parts[0], *literal, *parts[1]]

    def _plain_ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def special(self, ids: Sequence[int]) -> list[int]:
        """Those of special tokens."""
        return [index for index in ids if index in self._special]

    @functools.cached_property
    def _literal(self) -> Any:
        """A tokenizer to which special tokens are plain text."""
        tokenizer = _open_tokenizer(self._folder / "tokenizer.json")
        tokenizer.encode_special_tokens = True
        return tokenizer


class _Conversation:
    """Questions and answers, put together as the artifact's chat pieces say."""

    def __init__(self, writer: _Writer, asked: _Asked) -> None:
        self._writer, self._chat = writer, writer.generation["chat"]
        # Where the next message begins, the answer ends, whether or not the checkpoint says so.
        ends = writer.special(writer.message(self._chat["next"], "", "")[:1])
        options = dataclasses.replace(asked.options, stop_ids=(*asked.options.stop_ids, *ends))
        self._asked = dataclasses.replace(asked, options=options)
        self._turns: list[tuple[str, list[int]]] = []

    def say(self, text: str) -> Iterator[str]:
        """The answer, as it comes."""
        question, answer = _repaired(0, text, self._writer.notices).strip(), list[int]()
        row = self._writer.row(0, self._prompt(question))
        yield from self._writer.stream(row, self._asked, answer)
        self._turns.append((question, answer))

    def _prompt(self, question: str) -> list[int]:
        """The ids of all turns that the limit leaves room for; the oldest are forgotten first."""
        while True:
            ids = self._ids(question)
            if not self._turns or self._writer.fits(ids, self._asked):
                return ids
            del self._turns[0]
            self._writer.notices.say(
                "forgotten", "the conversation is longer than the limit; its oldest turns are left out"
            )

    def _ids(self, question: str) -> list[int]:
        before, ids = self._chat["first"], list[int]()
        for earlier, answer in self._turns:
            ids += self._writer.message(before, earlier, self._chat["reply"]) + answer
            before = self._chat["next"]
        return ids + self._writer.message(before, question, self._chat["ask"])


# ---- The model

_WINDOW = 512  # the least number of texts that are sorted by length together, when there are many
_FEW = 64  # texts that are continued before the first of them is shown


class Model:
    """An opened artifact: call it on a list of texts or pairs, or `run_arrays` on arrays; threads may share it.

    `provider` None is the first one in the manifest, `threads` None all CPUs that the process may use.
    Raises ArtifactError or ProviderError when the artifact can't be opened.
    """

    def __init__(self, folder: str | Path, provider: str | None = None, threads: int | None = None) -> None:
        self.folder = Path(folder)
        self.threads = available_threads() if threads is None else threads
        if not isinstance(self.threads, (int, np.integer)) or isinstance(self.threads, bool):
            raise UsageError(f"threads: {self.threads!r} is not a whole number")
        if self.threads < 1:
            raise UsageError(f"threads: {self.threads} is not at least 1")
        if self.threads > _MOST_THREADS:
            raise UsageError(f"threads: {self.threads} is more than {_MOST_THREADS}; CPUs: {available_threads()}")
        self.manifest = read_manifest(self.folder)
        self.provider: str = provider if provider is not None else next(iter(self.manifest["session"]))
        self.inputs = tuple(_Tensor.parse(item) for item in self.manifest["inputs"])
        self.outputs = tuple(_Tensor.parse(item) for item in self.manifest["outputs"])
        self._notices = _Notices()
        self._cache = (self.manifest.get("generation") or {}).get("cache")
        self._text: Mapping[str, Any] = self.manifest.get("text") or {}
        self._tokenizer: _Tokenizer | None = None
        self._writer: _Writer | None = None
        if self._text:
            self._ids = next(tensor for tensor in self.inputs if tensor.name == "input_ids")
            read = _open_tokenizer(self.folder / "tokenizer.json")
            _trim_memory()  # reading a tokenizer leaves as much behind as it holds
        if self._cache is not None:
            _map_large_blocks()  # where weights are read, the heap keeps a seventh of them
        self._sessions = _Sessions(self.folder, self.manifest, self.provider, self.threads)
        if self._text and self._cache is None:
            self._tokenizer = _Tokenizer(read, self._text, self._ids, self._notices)
        elif self._text:
            self._writer = _Writer(self.folder, read, self.manifest, self._ids, self._sessions, self._notices)
        self._warn_without_vnni()

    def __call__(self, texts: Iterable[Text]) -> list[Result]:
        """One result per text, in order. Raises TxExportError for a text that can't be taken."""
        return [result for _, result in self._answers(texts, itertools.repeat(self._window()), {})]

    def stream(self, texts: Iterable[Text]) -> Iterator[Result]:
        """The same results, each as soon as it and all before it are there; `texts` is read as they are needed."""
        return (result for _, result in self.stream_with_texts(texts))

    def stream_with_texts(self, texts: Iterable[Text], **options: Any) -> Iterator[tuple[Text, Result]]:
        """Each text with its result, as `stream`; options as for `generate`."""
        # The first result waits for one text only; soon enough texts come together to be worth sorting.
        most = _FEW if self.generates else self._window()
        return self._answers(texts, (min(2**power, most) for power in itertools.count()), options)

    @property
    def generates(self) -> bool:
        """Whether it continues texts."""
        return self._cache is not None

    def generate(self, texts: Iterable[str], **options: Any) -> list[Result]:
        """[{"text": continuation}], in order.

        Options are those of generate.Options (max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty,
        seed, beams, length_penalty, early_stopping, no_repeat_ngram, min_new_tokens, stop_ids), and `stop`, a list of
        texts before the first of which a continuation ends. What isn't given is as the artifact has it.
        Raises UsageError for an option, TxExportError for a text that can't be continued.
        """
        return [result for _, result in self._continued(texts, itertools.repeat(self._window()), options)]

    def stream_text(self, text: str, **options: Any) -> Iterator[str]:
        """The continuation of one text in pieces, each as soon as it is there; options as for `generate`."""
        writer = self._opened_writer()
        return writer.stream(writer.prompt(0, text), writer.asked(options), [])

    def converse(self, **options: Any) -> Callable[[str], Iterator[str]]:
        """Gives the answer to one line after another as `stream_text` does, to each with those before in mind.

        Without a chat template each line is continued on its own, which is said once. Options as for `generate`.
        """
        writer = self._opened_writer()
        asked = writer.asked(options)
        if writer.generation["chat"] is not None:
            return _Conversation(writer, asked).say
        self._notices.say("chat", "this artifact has no chat template: each line is continued on its own")
        return lambda line: writer.stream(writer.prompt(0, line), asked, [])

    def run_arrays(self, feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs by name. Any layout, lists too; integers of any width, and floats of any width for float inputs.

        A missing attention_mask is all ones, missing token_type_ids are zeros. Raises TxExportError for what doesn't
        fit: names, dtypes, shapes, limits, values out of range. An empty batch gives empty outputs.
        """
        arrays, sizes = _check_feeds(self.inputs, feeds)
        if 0 in sizes.values():
            return self._empty(sizes)
        self._sessions.close_workers()
        return self._run(self.threads, arrays)

    def _run(self, threads: int, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = self._read(threads, arrays)
        for tensor in self.outputs:
            if found[tensor.name].ndim != len(tensor.dims):
                raise ArtifactError(f"output {tensor}: the graph gives shape {list(found[tensor.name].shape)}")
        return found

    def _read(self, threads: int, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [tensor.name for tensor in self.outputs]
        if self._cache is None:
            return self._sessions.run(threads, names, arrays)
        generate = _import_generate()
        names += generate.names(self._cache, "present")
        graphs = list(self._sessions.by_name(threads))
        if graphs == ["model"]:
            run: Any = functools.partial(self._sessions.run, threads, names)
        else:
            cross = generate.names(self._cache, "cross")
            run = tuple(
                functools.partial(self._sessions.run, threads, outputs, graph=graph)
                for outputs, graph in zip((cross, names), graphs, strict=True)
            )
        found: dict[str, np.ndarray] = generate.logits_with_cache(run, self._cache, arrays)
        return found

    def _empty(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        batch = _batch_name(self)
        empty = sorted(name for name, size in sizes.items() if size == 0 and name != batch)
        if empty:
            raise TxExportError(f"inputs: {', '.join(empty)} is 0; at least 1 is needed")
        outputs = {}
        for tensor in self.outputs:
            shape = [dim if isinstance(dim, int) else sizes.get(dim.name) for dim in tensor.dims]
            known = [size for size in shape if size is not None]
            if len(known) < len(shape):
                raise TxExportError(f"inputs: the batch is empty ({batch} is 0)")
            outputs[tensor.name] = np.zeros(known, tensor.dtype)
        return outputs

    def _warn_without_vnni(self) -> None:
        integers = (self.manifest.get("quantized") or {}).get("done") and self.manifest.get("batch_dependent", True)
        if integers and self.manifest.get("isa") != "avx2" and _lacks_vnni():
            verified = (self.manifest.get("verified_on") or {}).get("instruction_sets") or ["a machine not recorded"]
            slower = "this CPU has no VNNI: int8 products run in an exact but slower form"
            self._notices.say("vnni", f"{slower}; the accuracy was verified on {', '.join(verified)}")

    def _window(self) -> int:
        return max(_WINDOW, 128 * self.threads)

    def _answers(
        self, texts: Iterable[Text], windows: Iterator[int], options: Mapping[str, Any]
    ) -> Iterator[tuple[Text, Result]]:
        if self.generates or options:
            return self._continued(texts, windows, options)
        if self._tokenizer is None:
            raise TxExportError(f"{self.folder}: has no tokenizer; it takes arrays (Model.run_arrays), not text")
        return _windowed(texts, windows, self._tokenizer.encode, self._answer)

    def _continued(
        self, texts: Iterable[Text], windows: Iterator[int], options: Mapping[str, Any]
    ) -> Iterator[tuple[Text, Result]]:
        writer = self._opened_writer()
        asked = writer.asked(options)
        return _windowed(texts, windows, writer.prompt, lambda rows: writer.write(rows, asked))

    def _opened_writer(self) -> _Writer:
        if not self.generates:
            raise UsageError(f"{self.folder}: continues no text; its task is {self.manifest['task']}")
        if self._writer is None:
            raise TxExportError(f"{self.folder}: has no tokenizer; it takes arrays (Model.run_arrays), not text")
        return self._writer

    def _answer(self, rows: Sequence[_Row]) -> Iterator[Result]:
        """Results of a window, in order: many batches go to workers of one thread each, few to all threads in turn."""
        batches = _batches(rows, self._sessions.batch_tokens)
        if not self._sessions.workers_pay(len(batches)):
            self._sessions.close_workers()
            yield from _in_order(rows, map(functools.partial(self._run_rows, self.threads), batches))
            return
        pool = ThreadPoolExecutor(self.threads)
        try:
            yield from _in_order(rows, pool.map(functools.partial(self._run_rows, 1), batches))
        finally:
            pool.shutdown(cancel_futures=True)

    def _run_rows(self, threads: int, rows: Sequence[_Row]) -> dict[int, Result]:
        """Results by the text's index."""
        outputs = self._run(threads, _check_feeds(self.inputs, self._feeds(rows))[0])
        return {row.index: self._result(row, place, outputs) for place, row in enumerate(rows)}

    def _feeds(self, rows: Sequence[_Row]) -> dict[str, np.ndarray]:
        """Rows padded on the right to the longest of them."""
        assert self._tokenizer is not None
        shape = (len(rows), max(len(row.ids) for row in rows))  # [batch, tokens]
        feeds = {"input_ids": np.full(shape, self._tokenizer.pad_id, np.int64)}
        feeds |= {name: np.zeros(shape, np.int64) for name in ("attention_mask", "token_type_ids")}
        for place, row in enumerate(rows):
            feeds["input_ids"][place, : len(row.ids)] = row.ids
            feeds["token_type_ids"][place, : len(row.ids)] = row.encoding.type_ids
            feeds["attention_mask"][place, : len(row.ids)] = 1
        return {tensor.name: feeds[tensor.name] for tensor in self.inputs if tensor.name in feeds}

    def _result(self, row: _Row, place: int, outputs: Mapping[str, np.ndarray]) -> Result:
        """The JSON of one text; a value that isn't finite is an error, never an answer."""
        task, labels = self.manifest["task"], self._text.get("labels") or ()
        own = {tensor.name: self._own(tensor, outputs[tensor.name], row, place) for tensor in self.outputs}
        for name, array in own.items():
            if not np.isfinite(array).all():
                raise TxExportError(f"text {row.index}: output {name!r} is not finite")
        main = own[self.outputs[0].name]
        if task == "text-classification":
            result = _classify(main, labels, self._text.get("scores", "softmax"))
        elif task == "sentence-embedding":
            result = {"embedding": main.tolist()}
        elif task == "token-classification":
            result = _label_tokens(main, row, labels)
        else:
            result = {"outputs": {name: array.tolist() for name, array in own.items()}}
        return result | {"truncated": True} if row.cut else result

    def _own(self, tensor: _Tensor, array: np.ndarray, row: _Row, place: int) -> np.ndarray:
        """One text's part of an output, padding left out."""
        batch, tokens = (_size_key(dim) for dim in self._ids.dims)
        keys: dict[int | str, int | slice] = {tokens: slice(len(row.ids)), batch: place}
        return np.asarray(array[tuple(keys.get(_size_key(dim), slice(None)) for dim in tensor.dims)])


def _windowed(
    texts: Iterable[Text],
    windows: Iterator[int],
    encode: Callable[[int, Text], _Row],
    answer: Callable[[Sequence[_Row]], Iterator[Result]],
) -> Iterator[tuple[Text, Result]]:
    """Each text with its result; so many texts as the next window holds are read and answered together."""
    if not isinstance(texts, Iterable) or isinstance(texts, (str, bytes, Mapping)):
        raise TxExportError(f"texts: expected a list of texts, not one {type(texts).__name__}")
    source, start = iter(texts), 0
    while window := list(itertools.islice(source, next(windows))):
        rows = [encode(start + place, text) for place, text in enumerate(window)]
        yield from zip(window, answer(rows), strict=True)
        start += len(window)


@functools.cache
def _import_generate() -> Any:
    """The file beside this one, wherever that is."""
    here = Path(__file__).resolve().parent
    path = next(path for path in (here / "generate.py", here / "runtime_generate.py") if path.is_file())
    spec = importlib.util.spec_from_file_location("tx_export_generate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def _batch_name(model: Model) -> int | str | None:
    """The first dim of the first input."""
    dims = model.inputs[0].dims if model.inputs else ()
    return _size_key(dims[0]) if dims else None


def _in_order(rows: Sequence[_Row], found: Iterator[dict[int, Result]]) -> Iterator[Result]:
    """Results in the order of `rows`, from those of batches in any order."""
    ready: dict[int, Result] = {}
    for row in rows:
        while row.index not in ready:
            ready |= next(found)
        yield ready.pop(row.index)


def _batches(rows: Sequence[_Row], budget: int) -> list[list[_Row]]:
    """Rows sorted by length, the longest first, and cut so that rows x longest <= budget (one row may be more)."""
    batches: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].ids) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


# ---- The self-test: the samples of the artifact, on this machine


def self_test(model: Model) -> dict[str, Any]:
    """Compare the model here with the eager outputs in samples.npz, at real positions, all samples together.

    Returns {"agrees", "provider", "onnxruntime_provider", "onnxruntime", "cases", "outputs": {name: {"max_abs",
    "sqnr_db", "non_finite", "agrees", "limit"}}}; an infinite ratio is None. Non-finite values never agree.
    """
    limits = (model.manifest.get("verification") or {}).get("self_test")
    if not isinstance(limits, dict) or not limits or "samples.npz" not in model.manifest["files"]:
        raise ArtifactError(f"{model.folder}: has no samples.npz with limits, so there is nothing to test")
    cases = _read_samples(model.folder / "samples.npz")
    differences: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for case in cases:
        found = model.run_arrays(case["input"])
        for tensor in model.outputs:
            name, expected = tensor.name, case["output"].get(tensor.name, np.zeros(0))
            if found[name].shape != expected.shape:
                shapes = f"has shape {list(found[name].shape)}, not {list(expected.shape)}"
                raise ArtifactError(f"{model.folder / 'samples.npz'}: output {name!r} {shapes}")
            real = _real_positions(model, tensor, case["input"], expected)
            differences.setdefault(name, []).append((found[name][real].ravel(), expected[real].ravel()))
    outputs = {name: _agreement(pairs, limits.get(name, limits)) for name, pairs in differences.items()}
    agrees = bool(outputs) and all(output["agrees"] for output in outputs.values())
    used = model.manifest["session"][model.provider]["provider"]
    return {
        "agrees": agrees,
        "provider": model.provider,
        "onnxruntime_provider": used,
        "onnxruntime": str(_import_onnxruntime(model.manifest["min_onnxruntime"]).__version__),
        "cases": len(cases),
        "outputs": outputs,
    }


def _read_samples(path: Path) -> list[dict[str, dict[str, np.ndarray]]]:
    cases: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            for key in archive.files:
                case, _, rest = key.partition("/")
                kind, _, name = rest.partition("/")
                if kind in ("input", "output"):
                    cases.setdefault(case, {"input": {}, "output": {}})[kind][name] = archive[key]
    except Exception as error:  # zipfile, zlib and numpy have many ways to say that a file is damaged
        raise ArtifactError(f"{path}: can't be read: {_first_line(error)}") from error
    if not cases:
        raise ArtifactError(f"{path}: holds no samples")
    return [cases[case] for case in sorted(cases)]


def _real_positions(model: Model, output: _Tensor, feeds: Mapping[str, np.ndarray], array: np.ndarray) -> np.ndarray:
    """Where an output's values count: those of [batch, tokens, ...] where the mask is not 0, all of others."""
    mask = next((tensor for tensor in model.inputs if tensor.name == "attention_mask"), None)
    if mask is None or mask.name not in feeds or output.dims[:2] != mask.dims:
        return np.ones(array.shape, bool)
    return np.asarray(feeds[mask.name] != 0)


def _agreement(pairs: Sequence[tuple[np.ndarray, np.ndarray]], limit: Mapping[str, float]) -> Result:
    found = np.concatenate([pair[0] for pair in pairs]).astype(np.float64)
    expected = np.concatenate([pair[1] for pair in pairs]).astype(np.float64)
    non_finite = int((~np.isfinite(found)).sum() + (~np.isfinite(expected)).sum())
    report: Result = {"max_abs": None, "sqnr_db": None, "non_finite": non_finite, "agrees": False, "limit": dict(limit)}
    if non_finite or not found.size:
        return report
    noise = float(((found - expected) ** 2).sum())
    sqnr = math.inf if noise == 0 else 10 * math.log10(max(float((expected**2).sum()), 1e-300) / noise)
    report["max_abs"] = float(np.abs(found - expected).max())
    report["sqnr_db"] = sqnr if math.isfinite(sqnr) else None
    report["agrees"] = sqnr >= limit.get("sqnr_db", math.inf) or report["max_abs"] <= limit.get("max_abs", 0.0)
    return report


# ---- The bench: how long one call takes, by batch and tokens


def bench(
    folder: str | Path,
    batches: Sequence[int] = (1, 8),
    tokens: Sequence[int] = (16, 128, 512),
    provider: str | None = None,
    threads: int | None = None,
    seconds: float = 2.0,
) -> dict[str, Any]:
    """Time full random batches, `seconds` a row, warm-up left out; tokens over the bound are dropped with a notice."""
    if not batches or not tokens or min(*batches, *tokens) < 1:
        raise UsageError("bench: batch and tokens are numbers from 1 up")
    start = time.perf_counter()
    model = Model(folder, provider, threads)
    load_ms = round(1000 * (time.perf_counter() - start), 3)
    bound = _token_bound(model)
    dropped = [count for count in tokens if bound is not None and count > bound]
    if dropped:
        over = ", ".join(map(str, dropped))
        _Notices().say("bound", f"bench: {over} tokens are over the bound of {bound}; left out")
    rows = [
        _time_row(model, batch, count, seconds) | {"load_ms": load_ms}
        for count in tokens
        for batch in batches
        if count not in dropped
    ]
    onnxruntime = _import_onnxruntime(model.manifest["min_onnxruntime"])
    for row in rows:
        if row["p95_ms"] > 2 * row["p50_ms"]:
            spread = (
                f"{row['batch']} x {row['tokens']} tokens took {row['p50_ms']:g} ms and sometimes {row['p95_ms']:g}"
            )
            _Notices().say("spread", f"bench: {spread}; is the machine busy?")
    return {"rows": rows, "threads": model.threads, "cpu": cpu_name(), "onnxruntime": str(onnxruntime.__version__)}


def _token_bound(model: Model) -> int | None:
    bounds = [dim.bound for tensor in model.inputs for dim in tensor.dims[1:] if isinstance(dim, _Dim)]
    return min((bound for bound in bounds if bound is not None), default=None)


def _time_row(model: Model, batch: int, tokens: int, seconds: float) -> dict[str, Any]:
    feeds = _random_feeds(model, batch, tokens)

    def once() -> float:
        start = time.perf_counter()
        model.run_arrays(feeds)
        return 1000 * (time.perf_counter() - start)

    first = once()
    deadline = time.perf_counter() + 0.1 * seconds
    while time.perf_counter() < deadline:
        once()
    times = [once()]
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times) < 5:
        times.append(once())
    middle, late = np.percentile(times, [50, 95])
    return {
        "contender": model.manifest["name"],
        "batch": batch,
        "tokens": tokens,
        "p50_ms": round(float(middle), 4),
        "p95_ms": round(float(late), 4),
        "tokens_per_s": round(1000 * batch * tokens / float(middle), 1),
        "peak_rss_mb": _peak_rss_mb(),
        "first_ms": round(first, 4),
        "runs": len(times),
        "provider": model.provider,
    }


def _random_feeds(model: Model, batch: int, tokens: int) -> dict[str, np.ndarray]:
    """Seeded values in the declared ranges, masks full; the first named dim is the batch, the others are tokens."""
    random = np.random.default_rng(0)
    feeds = {}
    for tensor in model.inputs:
        named = [dim for dim in tensor.dims if isinstance(dim, _Dim)]
        sizes = {dim.name: batch if dim.name == _batch_name(model) else tokens for dim in named}
        shape = [dim if isinstance(dim, int) else sizes[dim.name] for dim in tensor.dims]
        low, high = (tensor.low or 0, tensor.high if tensor.high is not None else 1)
        if tensor.name.endswith("mask"):
            feeds[tensor.name] = np.ones(shape, tensor.dtype)
        elif tensor.dtype.kind == "f":
            feeds[tensor.name] = random.uniform(low, high, shape).astype(tensor.dtype)
        else:
            feeds[tensor.name] = random.integers(int(low), int(high), shape, endpoint=True).astype(tensor.dtype)
    return feeds


def _peak_rss_mb() -> float | None:
    """The most memory that this process has held; None where the system doesn't tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


# ---- Texts from arguments, files and standard input

_KINDS = ".txt, .tsv, .jsonl or .csv"


def read_texts(source: str | Path, column: str | None = None) -> Iterator[Text]:
    """Texts of a file, by its extension, or of standard input (`-`, one text a line); read as they are asked for.

    An empty line of a .txt is an empty text; so results and lines keep step. Raises TxExportError with the line.
    """
    suffix = ".txt" if str(source) == "-" else Path(source).suffix.lower()
    readers: dict[str, Callable[[str, Iterator[str]], Iterator[Text]]] = {
        ".txt": lambda name, lines: lines,
        ".tsv": _read_tsv,
        ".jsonl": _read_jsonl,
        ".csv": lambda name, lines: _read_csv(name, lines, column),
    }
    if suffix not in readers:
        raise UsageError(f"--input {source}: expected a {_KINDS} file, or - for standard input")
    if (suffix == ".csv") != (column is not None):
        raise UsageError(f"--input {source}: --column NAME goes with .csv files, and they need it")
    if str(source) != "-" and not Path(source).is_file():
        raise UsageError(f"--input {source}: no such file")
    return readers[suffix](str(source), _read_lines(source))


def _read_lines(source: str | Path) -> Iterator[str]:
    """Lines without their ends (LF or CRLF) and without a byte order mark."""
    name = "standard input" if str(source) == "-" else str(source)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if str(source) == "-" else Path(source).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise TxExportError(f"{name}, line {number}: not UTF-8 ({error.reason})") from error
                yield text.removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise TxExportError(f"{name}: can't be read: {error.strerror}") from error


def _read_tsv(name: str, lines: Iterator[str]) -> Iterator[Text]:
    for number, line in enumerate(lines, 1):
        columns = line.split("\t")
        if len(columns) > 2:
            raise TxExportError(f"{name}, line {number}: {len(columns)} columns; expected one text, or two (a pair)")
        yield columns[0] if len(columns) == 1 else (columns[0], columns[1])


def _read_jsonl(name: str, lines: Iterator[str]) -> Iterator[Text]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TxExportError(f"{name}, line {number}: not JSON: {_first_line(error)}") from error
        text, pair = (item.get("text"), item.get("pair")) if isinstance(item, dict) else (item, None)
        if not isinstance(text, str) or not isinstance(pair, (str, type(None))):
            raise TxExportError(f'{name}, line {number}: expected {{"text": "..."}}, with "pair": "..." for a pair')
        yield text if pair is None else (text, pair)


def _read_csv(name: str, lines: Iterator[str], column: str | None) -> Iterator[Text]:
    csv.field_size_limit(2**31 - 1)  # the default refuses texts over 131,072 characters
    table = csv.DictReader(line + "\n" for line in lines)
    try:
        if column not in (table.fieldnames or ()):
            raise TxExportError(f"{name}: no column {column!r}; it has {', '.join(table.fieldnames or ['nothing'])}")
        for row in table:
            if row[column] is None:
                raise TxExportError(f"{name}, line {table.line_num}: too few columns")
            yield row[column]
    except csv.Error as error:
        raise TxExportError(f"{name}, line {table.line_num}: {_first_line(error)}") from error


def pair_up(texts: Sequence[str], pairs: Sequence[str]) -> list[Text]:
    """Pairs of texts: the nth with the nth, or one text with each; without `pairs` the texts alone."""
    if not pairs:
        return list(texts)
    if len(texts) not in (1, len(pairs)):
        raise UsageError(f"--pair: given {len(pairs)} times for {len(texts)} texts; once for each, or one text for all")
    return list(zip(texts if len(texts) > 1 else itertools.repeat(texts[0]), pairs, strict=False))


def _is_piped() -> bool:
    """Whether standard input holds something to read: a pipe, file or socket, not a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except io.UnsupportedOperation:
        return True  # a program that calls us has put something in its place
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


# ---- The program


def run(
    folder: str | Path,
    texts: Sequence[str] = (),
    *,
    pairs: Sequence[str] = (),
    source: str | Path | None = None,
    column: str | None = None,
    provider: str | None = None,
    threads: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    as_json: bool = False,
    out: TextIO | None = None,
) -> None:
    """Print the result of each text, in order, as soon as it is there: what `run` and `run.py` do.

    Texts are the arguments, else `source` (a file, or `-`), else piped standard input; UsageError with none of them.
    `options` are those of Model.generate. The continuation of a single argument is printed as it comes.
    """
    if texts and source is not None:
        raise UsageError("texts come either as arguments or from --input, not both")
    if pairs and not texts:
        raise UsageError("--pair goes with a TEXT argument; files hold pairs as .tsv or .jsonl")
    if not texts and source is None:
        if not _is_piped():
            raise UsageError("no text: give TEXT arguments, --input FILE, or pipe one text a line")
        source = "-"
    items = pair_up(texts, pairs) if source is None else read_texts(source, column)
    model = Model(folder, provider, threads)
    for option in options:
        _require_generation(model, option)
    line = _json_line if as_json else _text_line
    with _printing(out) as out:
        if model.generates and not as_json and source is None and len(texts) == 1 and not pairs:
            _print_pieces(model.stream_text(texts[0], **options), out)
            return
        for text, result in model.stream_with_texts(items, **options):
            print(line(text, result), file=out, flush=True)


def converse(
    folder: str | Path,
    *,
    provider: str | None = None,
    threads: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    as_json: bool = False,
    out: TextIO | None = None,
) -> None:
    """Answer one typed or piped line after another, until an empty one or their end: what --interactive does."""
    model = Model(folder, provider, threads)
    _require_generation(model, "interactive")
    answer = model.converse(**options)
    with _printing(out) as out:
        for text in _typed_lines():
            try:
                if as_json:
                    print(_json_line(text, {"text": "".join(answer(text))}), file=out, flush=True)
                else:
                    _print_pieces(answer(text), out)
            except TxExportError as error:
                print(f"error: {_first_line(error)}", file=sys.stderr, flush=True)  # the next line may do better


def _require_generation(model: Model, option: str) -> None:
    if not model.generates:
        flag = f"--{option.replace('_', '-')}"
        raise UsageError(f"{flag}: {model.folder} continues no text; its task is {model.manifest['task']}")


@contextlib.contextmanager
def _printing(out: TextIO | None) -> Iterator[TextIO]:
    """Where to print: standard output if it is None. Nothing more is, once nobody reads."""
    out = sys.stdout if out is None else out
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # a terminal that can't show a letter shows its escape
    try:
        yield out
    except BrokenPipeError:
        # Whoever reads has enough. Python would complain once more when it flushes at exit.
        if out is sys.stdout:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _print_pieces(pieces: Iterable[str], out: TextIO) -> None:
    for piece in pieces:
        print(piece, end="", file=out, flush=True)
    print(file=out, flush=True)


def _typed_lines() -> Iterator[str]:
    """Lines of a terminal or a pipe, up to an empty one."""
    sign = "> " if sys.stdout.isatty() else ""
    lines = iter(functools.partial(input, sign), "") if sys.stdin.isatty() else _read_lines("-")
    with contextlib.suppress(EOFError):
        yield from itertools.takewhile(str.strip, lines)


def _json_line(text: Text, result: Result) -> str:
    return json.dumps(result)


def _text_line(text: Text, result: Result) -> str:
    if "text" in result:
        return _one_line(result["text"])
    if "label" not in result:
        return _json_line(text, result)
    shown = _one_line(text if isinstance(text, str) else " | ".join(text))
    return f"{result['label']}\t{result['score']:.4f}\t{_whole(shown)}"


def _one_line(text: str) -> str:
    return " ".join(re.split(r"[\t\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+", text))


class _Parser(argparse.ArgumentParser):
    """argparse with our one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


# Of what continues texts; the ranges are those of generate.Options.
_OPTIONS: dict[str, tuple[type, str, str]] = {
    "max_new_tokens": (int, "N", "the most tokens of a continuation (default: 128)"),
    "temperature": (float, "X", "above 0, tokens are drawn (default: 0, the likeliest)"),
    "top_k": (int, "N", "draw from so many of the likeliest"),
    "top_p": (float, "X", "draw from the likeliest that hold so much of the probability"),
    "min_p": (float, "X", "draw from those that have so much of the likeliest one's probability"),
    "repetition_penalty": (float, "X", "above 1, what is there already is less likely"),
    "seed": (int, "N", "of what is drawn (default: 0)"),
    "beams": (int, "N", "continuations that are followed at once"),
    "length_penalty": (float, "X", "of beams; above 0, longer ones are preferred"),
}


def _parser() -> _Parser:
    parser = _Parser(prog="run.py", description="Run this artifact on texts, test it or time it.")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; without any, piped input, one text a line")
    parser.add_argument(
        "--pair", action="append", default=[], metavar="TEXT", help="the second text of each TEXT, or many for one"
    )
    parser.add_argument("--input", metavar="FILE", help=f"{_KINDS}; - is standard input")
    parser.add_argument("--column", metavar="NAME", help="the column of a .csv that holds the text")
    parser.add_argument("--provider", metavar="NAME", help="execution provider (default: the artifact's first)")
    parser.add_argument("--threads", type=_positive, metavar="N", help="default: all CPUs that the process may use")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--interactive", action="store_true", help="answer one line after another")
    for name, (kind, word, meaning) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=word, help=meaning)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="a continuation ends before it; repeat")
    parser.add_argument(
        "--self-test", action="store_true", help="compare with the samples; exit code 0 when they agree"
    )
    parser.add_argument("--bench", action="store_true", help="time it and print the rows as JSON")
    parser.add_argument("--batch", type=_positives, default=(1, 8), metavar="LIST", help="of --bench, default 1,8")
    parser.add_argument(
        "--tokens", type=_positives, default=(16, 128, 512), metavar="LIST", help="of --bench, default 16,128,512"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _positives(text: str) -> tuple[int, ...]:
    return tuple(_positive(part.strip()) for part in text.split(","))


def main(argv: Sequence[str] | None = None, folder: str | Path | None = None) -> int:
    """The program: parse, print, and return the exit code (0 done, 1 failed, 2 usage, 130 interrupted)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _parser().parse_args(argv)
        return _dispatch(options, Path(__file__).resolve().parent if folder is None else Path(folder))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if "--debug" in argv:
            traceback.print_exc()
        known = isinstance(error, TxExportError)
        message = _first_line(error) if known else f"unexpected {type(error).__name__}: {_first_line(error)}"
        print(f"error: {message}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, TxExportError) else 1


def _dispatch(options: argparse.Namespace, folder: Path) -> int:
    if options.self_test and options.bench:
        raise UsageError("--self-test or --bench, not both")
    if (options.self_test or options.bench) and (options.texts or options.input is not None or options.interactive):
        raise UsageError("--self-test and --bench take no text")
    if options.interactive and (options.texts or options.pair or options.input is not None):
        raise UsageError("--interactive reads its lines from standard input; it takes no other text")
    if options.bench:
        report = bench(folder, options.batch, options.tokens, options.provider, options.threads)
        print(json.dumps(report))
        return 0
    if options.self_test:
        _probe_onnxruntime()
        report = self_test(Model(folder, options.provider, options.threads))
        print(json.dumps(report) if options.json else _report_lines(report))
        return 0 if report["agrees"] else 1
    given = {name: getattr(options, name) for name in (*_OPTIONS, "stop") if getattr(options, name) is not None}
    settings = {"provider": options.provider, "threads": options.threads, "options": given, "as_json": options.json}
    if options.interactive:
        converse(folder, **settings)
    else:
        inputs = {"pairs": options.pair, "source": options.input, "column": options.column}
        run(folder, options.texts, **inputs, **settings)
    return 0


def _report_lines(report: Mapping[str, Any]) -> str:
    lines = []
    for name, output in report["outputs"].items():
        verdict = "agrees" if output["agrees"] else f"DIFFERS with onnxruntime {report['onnxruntime']}"
        limit = ", ".join(
            f"{key} {value:g}" for key, value in output["limit"].items() if isinstance(value, (int, float))
        )
        largest = "not finite" if output["max_abs"] is None else f"{output['max_abs']:.3g}"
        ratio = "exact" if output["sqnr_db"] is None else f"{output['sqnr_db']:.1f} dB"
        ratio = f"{output['non_finite']} values not finite" if output["non_finite"] else ratio
        lines.append(f"{name}: largest difference {largest} ({ratio}; limit {limit}): {verdict}")
    return "\n".join(
        [*lines, f"provider: {report['provider']} ({report['onnxruntime_provider']}), {report['cases']} samples"]
    )


def _probe_onnxruntime() -> None:
    """Import onnxruntime in a child first: on some CPUs the import kills the process before it can say anything."""
    code = "import sys; sys.path[:] = sys.argv[1:]; import onnxruntime"
    child = subprocess.run([sys.executable, "-c", code, *sys.path], capture_output=True, text=True, errors="replace")
    if child.returncode >= 0:
        return  # a plain ImportError is told by the import in this process
    try:
        name = signal.Signals(-child.returncode).name
    except ValueError:
        name = f"signal {-child.returncode}"
    try:
        version = importlib.metadata.version("onnxruntime")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    raise TxExportError(f"onnxruntime {version} crashed with {name} when imported on this CPU ({cpu_name()})")


if __name__ == "__main__":
    sys.exit(main())
