"""Multi-head attention: softmax(q k^T / sqrt(head_dim)) v for each head (Vaswani et al. 2017, section 3.2).

In eager the einops form runs; while exporting, one fused operator a layer is emitted instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

__all__ = ["KeyMask", "MultiHeadAttention", "Ops", "emitting"]

Ops = Literal["fused", "attention", "plain"]
_ops: ContextVar[Ops] = ContextVar("ops", default="plain")
