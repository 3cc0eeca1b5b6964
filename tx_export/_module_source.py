"""A user's reference -> a module of our own: found, built, unwrapped, copied, in eval mode, on the CPU."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tx_export import plugins
from tx_export._torch_state import isolated
from tx_export.errors import LoadError, PluginError

__all__ = ["UserModule", "find_module"]

_log = logging.getLogger("tx_export")
_WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class UserModule:
    """The module, and how its person writes it."""

    reference: str
    module: nn.Module  # ours alone
    make: Callable[[], nn.Module] | None  # builds another, where it came from a class or a function
    inputs: Callable[[], Any] | None  # a tx_inputs() of the module, of what made it, or of its file
    widened: bool  # it was of half precision

    def copy(self, module: nn.Module) -> nn.Module:
        """Another with the same state; LoadError names the attribute that can't be copied."""
        try:
            return _deep_copy(module)
        except Exception as error:  # whatever hangs on the module
            another = module if self.make is None else _unwrapped(self.reference, self.make())
            if another is module:
                raise LoadError(
                    f"{self.reference}: it can't be copied: {_culprit(module)} ({type(error).__name__}: {error}); "
                    "give its class, or a function that builds it anew"
                ) from error
        made = _prepared(self.reference, another)[0]
        made.load_state_dict(module.state_dict())
        return made


def find_module(reference: str) -> UserModule:
    """Import and build it; the user's own object is only read."""
    source = plugins.import_source(reference)
    found = plugins.member(source, reference)
    own: Callable[[], nn.Module] | None = None
    if isinstance(found, nn.Module):
        original = found
    elif callable(found):

        def make() -> nn.Module:
            return _built(reference, found)

        original, own = make(), make
    else:
        raise PluginError(
            f"{reference} is {type(found).__name__}; expected an nn.Module, a class of one, or a function"
        )
    bare = _unwrapped(reference, original)
    # What a class has just built is nobody else's; a function may return what somebody keeps.
    mine = bare if isinstance(found, type) else UserModule(reference, bare, own, None, False).copy(bare)
    module, widened = _prepared(reference, mine)
    return UserModule(reference, module, own, _own_inputs(source, found, bare), widened)


def _built(reference: str, found: Callable[[], Any]) -> nn.Module:
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise PluginError(f"{reference}: {error}; name a function without arguments that builds it") from error
    except ValueError:  # it has no signature
        pass
    with plugins.foreign(f"{reference}: building it", LoadError), isolated(0):
        module = found()
    if not isinstance(module, nn.Module):
        raise PluginError(f"{reference} returned {type(module).__name__}; expected an nn.Module")
    return module


def _own_inputs(source: ModuleType, found: object, module: nn.Module) -> Callable[[], Any] | None:
    owners = (getattr(owner, "tx_inputs", None) for owner in (module, found, source))
    return next((own for own in owners if own is not None), None)


def _unwrapped(reference: str, module: nn.Module) -> nn.Module:
    """Without the wrappers that torch.compile and data parallelism put around it."""
    while (inner := _WRAPPERS.get(_torch_name(module))) is not None:
        _log.warning("%s: it is compiled without %s around it", reference, type(module).__name__)
        module = getattr(module, inner)
    return module


def _torch_name(module: nn.Module) -> str:
    return type(module).__name__ if type(module).__module__.startswith("torch.") else ""


def _prepared(reference: str, module: nn.Module) -> tuple[nn.Module, bool]:
    """In eval mode, on the CPU, in float32 where it was of half precision (and whether it was); refuse the rest."""
    for path, part in module.named_modules():
        for name, child in list(part.named_children()):
            bare = _unwrapped(f"{reference}: {path}.{name}".replace(": .", ": "), child)
            if bare is not child:
                setattr(part, name, bare)
    for path, part in module.named_modules():
        _refuse(f"{reference}: {path or 'it'}", part)
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    if meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise LoadError(f"{reference}: {meta[0]} is on the device meta: it has no values; load its weights first")
    if away := {str(tensor.device) for tensor in tensors.values()} - {"cpu"}:
        _log.warning("%s: its copy was moved from %s to the CPU", reference, ", ".join(sorted(away)))
        module.to("cpu")
    module.eval()  # what it returns is not used: an overridden train() may return nothing
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    half = bool(dtypes) and dtypes <= {*_HALF}
    if half:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        _log.warning("%s: its %s weights are widened to float32, in which it is computed", reference, names)
        module.float()
    return module, half


def _refuse(place: str, part: nn.Module) -> None:
    if isinstance(part, torch.jit.ScriptModule):
        raise LoadError(f"{place} is a TorchScript module; give the nn.Module that it was made from")
    if ".quantized" in type(part).__module__ and _torch_name(part):
        raise LoadError(f"{place} is quantized by torch; give the float module, and choose --quantize here")


def _deep_copy(module: nn.Module) -> nn.Module:
    """Attributes that were computed (weight_norm's weight) are copied without their history, which torch can't copy."""
    computed = (value for value in _attributes(module).values() if isinstance(value, Tensor) and not value.is_leaf)
    known = {id(value): value.detach().clone() for value in computed}
    return copy.deepcopy(module, known)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {f"{path}.{key}".lstrip("."): value for path, key, value in _each_attribute(module)}


def _each_attribute(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    torchs_own = vars(nn.Module()).keys()
    for path, part in module.named_modules():
        yield from ((path, key, value) for key, value in vars(part).items() if key not in torchs_own)


def _culprit(module: nn.Module) -> str:
    """The attribute that can't be copied, by its dotted path and type."""
    for name, value in _attributes(module).items():
        try:
            copy.deepcopy(value)
        except Exception:  # the one that is looked for
            return f"{name} is {type(value).__name__}"
    return "something inside it"
