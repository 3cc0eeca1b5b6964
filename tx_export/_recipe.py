"""Which passes a build runs: the defaults of its provider, or what was asked for in their place."""

from __future__ import annotations

from typing import Any, Literal

from tx_export import plugins
from tx_export.errors import PluginError, ProviderError
from tx_export.passes import Pipeline

__all__ = ["pipeline_of", "provider_of"]

# The optimization passes for a provider, in order. Others that exist were slower where they were measured.
_ALWAYS = "fold_constants fuse_gelu fuse_fast_gelu unguard_softmax fuse_attention merge_views pack_qkv"
_FUSED = {"cpu": _ALWAYS, "cuda": f"{_ALWAYS} fuse_bias_gelu fuse_residual_norm"}
_STANDARD = "fold_constants merge_views"
_QUANTIZE = {"cpu": "dynamic_int8", "cuda": "none"}


def pipeline_of(
    provider: str,
    ops: Literal["fused", "standard"],
    quantize: str | None,
    prune_heads: str | None,
    passes: str | None,
) -> tuple[Pipeline, frozenset[str]]:
    """The passes to run, and the names of those that were asked for, which must change something."""
    if passes is not None and (quantize is not None or prune_heads is not None):
        flag = "--quantize" if quantize is not None else "--prune-heads"
        raise PluginError(f"--passes replaces the whole pipeline; it can't stand beside {flag}")
    if passes is not None:
        pipeline = _parsed(passes)
        return pipeline, frozenset(item.name() for item in pipeline.passes)
    quantize = quantize or _QUANTIZE[provider]
    lossless = _FUSED[provider] if ops == "fused" else _STANDARD
    lossy = "" if quantize == "none" else quantize
    lowered = "lower_contrib" if ops == "standard" and lossy else ""
    pruning = "" if prune_heads is None else _pruning(prune_heads)
    asked = frozenset(item.name() for item in _parsed(f"{pruning} {lossy}").passes)
    return _parsed(f"{pruning} {lossless} {lossy} {lowered}"), asked


def provider_of(name: str, isa: str | None) -> Any:
    """The provider of that name, for CPUs with that instruction set."""
    provider = plugins.find("provider", name)
    if isa is None:
        return provider()
    if name != "cpu":
        raise ProviderError(f"--isa {isa}: an instruction set is for --provider cpu, not {name}")
    if isa not in provider.isas:
        raise ProviderError(f"--isa {isa}: known are {', '.join(provider.isas)}")
    return provider(isa=isa)


def _parsed(text: str) -> Pipeline:
    return Pipeline.parse(text, lambda name: plugins.find("pass", name))


def _pruning(spec: str) -> str:
    """A ratio, LAYER:HEAD,...;LAYER:..., or the pass with its options."""
    if spec.startswith("prune_heads"):
        return spec
    return f"prune_heads{{{'heads' if ':' in spec else 'ratio'}={spec}}}"
