"""How far apart two arrays are, and how far they may be."""

from __future__ import annotations

from dataclasses import dataclass
