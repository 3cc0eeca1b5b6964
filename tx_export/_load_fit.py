"""Weights into a module: names matched, shapes, dtypes and values checked, nothing left random without a word."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tx_export._load_weights import Weights
from tx_export.errors import LoadError

__all__ = ["build_seeded", "check_finite", "fill", "matched"]

_log = logging.getLogger("tx_export")
# What modules that hold another one put into the names of its weights: data-parallel, compiled, sharded, recomputing.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_CHECKED_AT_ONCE = 1 << 24  # values: tables have hundreds of millions, and a check needs room for several copies


def build_seeded(build: Callable[[], Any], seed: int) -> Any:
    """What `build` returns with torch's random numbers from `seed`; the global state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def matched(
    module: nn.Module,
    weights: Weights,
    renamed: Callable[[str], str],
    unused: Iterable[str],
    names: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """The weights under the module's names; the module may be one without memory (device meta).

    `names` holds the checkpoint's names of modules and ours, as far as they differ; what is missing goes by the former.

    LoadError names what is missing, unexpected (unless a pattern of `unused` matches), of another shape, or not finite.
    """
    wanted: dict[str, Tensor] = module.state_dict(keep_vars=True)
    tensors = _strip_prefixes(weights.tensors, wanted, renamed)
    found, unexpected = _by_our_name(tensors, wanted, renamed, tuple(unused), weights.place)
    missing = [_original(name, names) for name in sorted(set(_first_names(wanted).values()) - found.keys())]
    if missing or unexpected:
        hint = _hint(unexpected, lambda name: renamed(name) in wanted)
        raise LoadError(f"{weights.place}: {_listed('missing', missing)}; {_listed('unexpected', unexpected)}{hint}")
    _check_shapes(found, wanted, weights.place)
    _check_dtypes(found, wanted, weights.place)
    check_finite(found.values(), weights.place)
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
) -> tuple[dict[str, tuple[str, Tensor]], list[str]]:
    """Our name -> the checkpoint's name and the tensor; each of several names that share a tensor is enough.

    Then the names that are in the checkpoint only.
    """
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
    return found, sorted(unexpected)


def _original(name: str, names: Mapping[str, str]) -> str:
    """The name, or names, that a tensor of ours has in a checkpoint."""
    number = re.search(r"\.(\d+)\.", name)
    module, _, kind = name.rpartition(".")
    spelt = (module, re.sub(r"\.\d+\.", ".N.", module, count=1))
    known = [theirs for theirs, ours in names.items() if ours in spelt]
    return (
        " or ".join(f"{theirs.replace('.N.', f'.{number[1]}.') if number else theirs}.{kind}" for theirs in known)
        or name
    )


def _first_names(wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name -> the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in wanted.items()}


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"nothing {what}"
    return f"{len(names)} {what}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"


def _hint(unexpected: Sequence[str], fits: Callable[[str], bool]) -> str:
    """Whether all of them would fit without what they have in common."""
    parts = unexpected[0].split(".") if unexpected else []
    for prefix in (".".join(parts[:count]) + "." for count in range(1, len(parts))):
        if all(name.startswith(prefix) and fits(name.removeprefix(prefix)) for name in unexpected):
            return f"; they would fit without {prefix} in front: save the weights of that part alone"
    return ""


def _strip_prefixes(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], renamed: Callable[[str], str]
) -> dict[str, Tensor]:
    """Without what wrappers put into the names, but for names that the module has as they are."""
    stripped: dict[str, Tensor] = {}
    taken: set[str] = set()
    for name, tensor in tensors.items():
        parts, off = name.split("."), []
        while renamed(".".join(parts)) not in wanted and (inner := [part for part in parts if part in _WRAPPERS]):
            parts.remove(inner[0])
            off.append(f"{inner[0]}.")
        bare = ".".join(parts)
        taken |= {"".join(off)} - {""}
        if bare in stripped:
            raise LoadError(f"weights: two tensors are both {bare} without the prefix {', '.join(sorted(taken))}")
        stripped[bare] = tensor
    if taken:
        _log.warning("weights: the prefix %s was taken off their names", ", ".join(sorted(taken)))
    return stripped


def _check_shapes(found: Mapping[str, tuple[str, Tensor]], wanted: Mapping[str, Tensor], place: str) -> None:
    for ours, (name, tensor) in found.items():
        if tensor.shape != wanted[ours].shape:
            raise LoadError(
                f"{place}: {name} has shape {list(tensor.shape)}, but its config asks for {list(wanted[ours].shape)}"
            )


def check_finite(tensors: Iterable[tuple[str, Tensor]], place: str) -> None:
    """LoadError with the name of a tensor that holds NaN or infinity, and how many."""
    for name, tensor in tensors:
        count = _count_non_finite(tensor) if tensor.is_floating_point() else 0
        if count:
            raise LoadError(f"{place}: {name} holds {count} of {tensor.numel()} values that are NaN or infinite")


def _count_non_finite(tensor: Tensor) -> int:
    parts = torch.split(tensor.reshape(-1), _CHECKED_AT_ONCE)
    # float64 goes into float32, where more is infinite.
    return sum(int((~torch.isfinite(part.float())).sum()) for part in parts)


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
