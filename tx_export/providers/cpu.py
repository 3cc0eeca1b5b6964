"""CPU: ONNX Runtime's own kernels, on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["Cpu"]


@dataclass(frozen=True)
class Cpu:
    """Fields are what a build may choose; `session()` is what the manifest stores and the runtime reads."""

    disabled_optimizers: tuple[str, ...] = ("SkipLayerNormFusion",)  # 130 us where Add + LayerNormalization take 50
    isa: str = ""  # of the CPUs to run on, one of `isas`; empty: any

    # x86 without VNNI (AVX-512 or not), x86 with AVX-VNNI or AVX512-VNNI, and 64-bit ARM.
    isas: ClassVar[tuple[str, ...]] = ("avx2", "vnni", "arm64")
    onnxruntime_name: ClassVar[str] = "CPUExecutionProvider"
    package: ClassVar[str] = "onnxruntime"

    def session(self) -> dict[str, Any]:
        """Session settings, as the manifest stores them."""
        # Exact 8-bit products on x86 CPUs without VNNI, where the fast ones saturate. Passes for avx2 use weights that
        # don't, and this setting would turn them into the slower form: 1.2 to 1.35 times the time.
        exact = {} if self.isa == "avx2" else {"session.x64quantprecision": "1"}
        return {
            "provider": self.onnxruntime_name,
            "provider_options": {},
            "config": exact,
            "run_config": {},
            "give_back_config": {"memory.enable_memory_arena_shrinkage": "cpu:0"},
            # The tiled attention takes a longer time for one new token: 5.0 ms where this takes 3.1, for 900 tokens of
            # cache and 30 layers. It needs less memory for long prompts, which are read in pieces.
            "environment": {"ORT_GQA_DISABLE_FLASH_ATTENTION": "1"},
            "disabled_optimizers": list(self.disabled_optimizers),
            "graph_optimization": "all",
            "arena": True,  # without it short texts take 1.4 times as long
            "mem_pattern": False,  # it would keep a plan for every shape
            "one_thread_workers": True,
            "batch_tokens": 256,  # time per token is least from 100 to 300
        }
