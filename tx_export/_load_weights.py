"""The weight files of a checkpoint: found, read from safetensors or from pickles of nothing but tensors, and hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tx_export.errors import LoadError

__all__ = ["Weights", "find_files", "read_json", "read_metadata", "read_weights"]

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_LFS = b"version https://git-lfs."  # how the small file begins that Git leaves in the place of a large one


@dataclass(frozen=True)
class Weights:
    """Tensors by name, and a hash of the files that they came from."""

    tensors: Mapping[str, Tensor]
    sha256: str
    place: str  # for messages


def find_files(folder: Path) -> tuple[Path, ...]:
    """The weight files of a checkpoint, safetensors before pickles; the shards where an index names them."""
    for name in _WHOLE:
        index = folder / f"{name}.index.json"
        if (folder / name).is_symlink() or (folder / name).is_file():
            return (folder / name,)
        if index.is_file():
            return _shards(index)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHERS)
    found = f"; {others[0]} is not one of them" if others else ""
    raise LoadError(f"{folder}: no weights; expected {' or '.join(_WHOLE)}, or the .index.json of one{found}")


def read_weights(files: Sequence[Path]) -> Weights:
    """All tensors of the files. A name in two files is an error."""
    tensors: dict[str, Tensor] = {}
    digest = hashlib.sha256()
    for file in sorted(files):
        _require(file)
        found = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            raise LoadError(f"{file}: {twice[0]} is in another file too")
        tensors |= found
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return Weights(tensors, digest.hexdigest(), str(files[0] if len(files) == 1 else files[0].parent))


def read_metadata(file: Path) -> dict[str, str]:
    """The notes in the header of a safetensors file."""
    _require(file)
    with _damaged(file), safetensors.safe_open(file, framework="pt") as opened:
        return dict(opened.metadata() or {})


def read_json(file: Path) -> dict[str, Any]:
    """An object from a JSON file; LoadError names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise LoadError(f"{file}: expected a JSON object, not {type(value).__name__}")
    return value


def _shards(index: Path) -> tuple[Path, ...]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise LoadError(f"{index}: no weight_map, which says the file of each tensor")
    files = sorted({str(file) for file in names.values()})
    for file in files:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or "\\" in file or path.suffix not in (".safetensors", ".bin"):
            raise LoadError(f"{index}: the shard {file!r} is not a .safetensors or .bin file inside the folder")
    return tuple(index.parent / file for file in files)


def _require(file: Path) -> None:
    if not file.is_file():
        raise LoadError(f"{file}: {'a symlink to a file that is not there' if file.is_symlink() else 'no such file'}")
    try:
        with file.open("rb") as stream:
            pointer = stream.read(len(_LFS)) == _LFS
    except OSError as error:
        raise LoadError(f"{file}: can't be read: {error.strerror}") from error
    if pointer:
        raise LoadError(f"{file}: a pointer of Git LFS, not the weights; git lfs pull brings them")


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    with _damaged(file):
        return safetensors.torch.load_file(file)


@contextmanager
def _damaged(file: Path) -> Iterator[None]:
    try:
        yield
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise LoadError(f"{file}: a damaged or truncated safetensors file ({error})") from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive raises anything
        raise LoadError(
            f"{file}: refused: not a pickle of plain tensors, or damaged ({type(error).__name__}); "
            "code in it was not run; save the weights as model.safetensors instead"
        ) from error
    if not isinstance(value, dict) or not all(_is_plain(tensor) for tensor in value.values()):
        raise LoadError(f"{file}: expected a dict of tensors; save the weights as model.safetensors instead")
    return {str(name): tensor for name, tensor in value.items()}


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
