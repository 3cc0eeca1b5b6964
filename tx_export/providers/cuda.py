"""CUDA: NVIDIA GPUs, through the onnxruntime-gpu package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["Cuda"]


@dataclass(frozen=True)
class Cuda:
    """Fields are what a build may choose; `session()` is what the manifest stores and the runtime reads."""

    disabled_optimizers: tuple[str, ...] = ()  # a GPU gains from every fusion

    onnxruntime_name: ClassVar[str] = "CUDAExecutionProvider"
    isa: ClassVar[str] = ""
    package: ClassVar[str] = "onnxruntime-gpu"

    def session(self) -> dict[str, Any]:
        """Session settings, as the manifest stores them."""
        return {
            "provider": self.onnxruntime_name,
            "provider_options": {},
            "config": {},
            "run_config": {},
            "give_back_config": {"memory.enable_memory_arena_shrinkage": "cpu:0;gpu:0"},
            "environment": {},
            "disabled_optimizers": list(self.disabled_optimizers),
            "graph_optimization": "all",
            "arena": True,
            "mem_pattern": False,
            "one_thread_workers": False,  # one stream of large batches keeps a GPU busy
            "batch_tokens": 16384,
        }
