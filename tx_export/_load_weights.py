"""Weights of a checkpoint: read from safetensors (or pickles of nothing but tensors), checked, put into a module."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from tx_export.errors import LoadError

__all__ = ["Weights", "build_seeded", "fill", "find_files", "matched", "read_json", "read_metadata", "read_weights"]

_log = logging.getLogger("tx_export")
_PREFIX = re.compile(r"(?:module\.|_orig_mod\.)+")
_WHOLE = ("model.safetensors", "pytorch_model.bin")


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
    raise LoadError(f"{folder}: no weights; expected {' or '.join(_WHOLE)}, or the .index.json of one")


def read_weights(files: Sequence[Path]) -> Weights:
    """All tensors of the files. A name in two files is an error."""
    tensors: dict[str, Tensor] = {}
    digest = hashlib.sha256()
    for file in sorted(files):
        if not file.is_file():
            raise LoadError(
                f"{file}: {'a symlink to a file that is not there' if file.is_symlink() else 'no such file'}"
            )
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


def build_seeded(build: Callable[[], Any], seed: int) -> Any:
    """What `build` returns with torch's random numbers from `seed`; the global state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def matched(
    module: nn.Module, weights: Weights, renamed: Callable[[str], str], unused: Iterable[str]
) -> dict[str, Tensor]:
    """The weights under the module's names; the module may be one without memory (device meta).

    LoadError names what is missing, unexpected (unless a pattern of `unused` matches), of another shape, or not finite.
    """
    wanted: dict[str, Tensor] = module.state_dict(keep_vars=True)
    found = _by_our_name(_strip_prefixes(weights.tensors), wanted, renamed, tuple(unused), weights.place)
    _check_shapes(found, wanted, weights.place)
    _check_finite(found, weights.place)
    _check_dtypes(found, wanted, weights.place)
    return {ours: tensor for ours, (_, tensor) in found.items()}


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy what `matched` found into the module."""
    wanted: dict[str, Tensor] = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in tensors.items():
            wanted[name].copy_(tensor)


def _by_our_name(
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    renamed: Callable[[str], str],
    unused: Sequence[str],
    place: str,
) -> dict[str, tuple[str, Tensor]]:
    """Our name -> the checkpoint's name and the tensor; each of several names that share a tensor is enough."""
    found: dict[str, tuple[str, Tensor]] = {}
    unexpected: list[str] = []
    first_of = _first_names(wanted)
    for name, tensor in tensors.items():
        ours = first_of.get(renamed(name))
        if ours is None:
            unexpected += [] if any(re.fullmatch(pattern, name) for pattern in unused) else [name]
        elif ours in found and not torch.equal(found[ours][1], tensor):
            raise LoadError(f"{place}: {found[ours][0]} and {name} are one tensor in this model, but differ")
        else:
            found[ours] = (name, tensor)
    missing = sorted(set(first_of.values()) - found.keys())
    if missing or unexpected:
        raise LoadError(f"{place}: {_listed('missing', missing)}; {_listed('unexpected', sorted(unexpected))}")
    return found


def _first_names(wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name -> the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in wanted.items()}


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"nothing {what}"
    return f"{len(names)} {what}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"


def _strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefixes = sorted({match[0] for name in tensors if (match := _PREFIX.match(name)) is not None})
    if not prefixes:
        return dict(tensors)
    _log.warning("weights: the prefix %s was taken off their names", ", ".join(prefixes))
    stripped: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        bare = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
        if bare in stripped:
            raise LoadError(
                f"weights: {name} and another tensor are both {bare} without the prefix {', '.join(prefixes)}"
            )
        stripped[bare] = tensor
    return stripped


def _check_shapes(found: Mapping[str, tuple[str, Tensor]], wanted: Mapping[str, Tensor], place: str) -> None:
    for ours, (name, tensor) in found.items():
        if tensor.shape != wanted[ours].shape:
            raise LoadError(
                f"{place}: {name} has shape {list(tensor.shape)}, but its config asks for {list(wanted[ours].shape)}"
            )


def _check_finite(found: Mapping[str, tuple[str, Tensor]], place: str) -> None:
    for name, tensor in found.values():
        count = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if count:
            raise LoadError(f"{place}: {name} holds {count} of {tensor.numel()} values that are NaN or infinite")


def _check_dtypes(found: Mapping[str, tuple[str, Tensor]], wanted: Mapping[str, Tensor], place: str) -> None:
    allowed = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    converted = set()
    for ours, (name, tensor) in found.items():
        if tensor.dtype == wanted[ours].dtype:
            continue
        if tensor.dtype not in allowed or wanted[ours].dtype not in allowed:
            raise LoadError(f"{place}: {name} is {_short(tensor.dtype)}; supported: {', '.join(map(_short, allowed))}")
        how = "widened" if tensor.dtype.itemsize < wanted[ours].dtype.itemsize else "rounded"
        converted.add(f"{_short(tensor.dtype)} is {how} to {_short(wanted[ours].dtype)}")
    if converted:
        _log.warning("weights: %s", ", ".join(sorted(converted)))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
