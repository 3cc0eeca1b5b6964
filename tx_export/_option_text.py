"""The text form of the values that options of passes have."""

from __future__ import annotations

from typing import Any

from tx_export.errors import PluginError

__all__ = ["format_value", "parse_value"]


def format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_value(what: str, annotation: Any, text: str) -> Any:
    kind = str(annotation)
    if "None" in kind and text == "None":
        return None
    if "bool" in kind:
        if text.lower() not in ("true", "false"):
            raise PluginError(f"{what} is true or false, not {text!r}")
        return text.lower() == "true"
    if "str" in kind:
        return text
    try:
        value = float(text) if "float" in kind else int(text)
    except ValueError as error:
        raise PluginError(f"{what} is a {kind}, not {text!r}") from error
    if abs(value) < float("inf"):
        return value
    raise PluginError(f"{what} is {text!r}, which is not finite")
