"""The process-wide state that foreign code may change: torch's switches and all random numbers, put back afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.backends import mha

__all__ = ["isolated"]

_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    (torch.get_default_device, torch.set_default_device),
)
_RANDOM: tuple[tuple[Callable[[], Any], Callable[[Any], object], Callable[[int], object]], ...] = (
    (torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
    (random.getstate, random.setstate, random.seed),
    (np.random.get_state, np.random.set_state, np.random.seed),
)


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside; afterwards everything is as it was, whatever happens."""
    switches = [(put, get, get()) for get, put in _SWITCHES]
    states = [(put, get()) for get, put, _ in _RANDOM]
    for _, _, start in _RANDOM:
        start(seed)
    try:
        yield
    finally:
        for put, get, was in switches:
            if get() != was:
                put(was)
        for restore, state in states:
            restore(state)
