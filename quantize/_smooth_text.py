"""The text form of scales: `NAME:CHANNEL+CHANNEL*STEPS/CHANNEL*STEPS NAME:...`, a step a quarter of an octave."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

__all__ = ["MOST_STEPS", "format_scales", "parse_scales"]

MOST_STEPS = 99  # of quarter octaves: a scale of 3e7

Listed = Mapping[int, int]  # of the channels that are shrunk: the steps

_GROUP = re.compile(r"(?P<channels>\d+(\+\d+)*)\*(?P<steps>[1-9]\d?)")


def format_scales(steps: Mapping[str, np.ndarray]) -> str:
    """By the name of a product; a channel with 0 steps isn't listed."""
    return " ".join(f"{name}:{_groups(each)}" for name, each in steps.items())


def _groups(steps: np.ndarray) -> str:
    channels = {int(level): np.flatnonzero(steps == level) for level in np.unique(steps[steps > 0])}
    return "/".join(f"{'+'.join(map(str, found))}*{level}" for level, found in channels.items())


def parse_scales(text: str) -> dict[str, Listed]:
    """By the name of a product; ValueError says what can't be read."""
    found: dict[str, Listed] = {}
    for item in text.split():
        name, _, groups = item.rpartition(":")
        matches = [_GROUP.fullmatch(group) for group in groups.split("/")]
        listed = {int(c): int(match["steps"]) for match in matches if match for c in match["channels"].split("+")}
        if not name or name in found or None in matches:
            raise ValueError(f"scales has {item[:60]!r}; expected NAME:CHANNEL+CHANNEL*STEPS/..., each name once")
        found[name] = listed
    return found
