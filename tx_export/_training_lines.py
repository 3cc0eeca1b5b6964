"""Files of examples, one a line in columns."""

from __future__ import annotations

from pathlib import Path

from tx_export.errors import LoadError

__all__ = ["read_fields"]


def read_fields(path: Path, expected: str) -> list[tuple[str, list[str]]]:
    """The columns of each line that isn't blank, and its place in words."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    places = ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
    found = [(place, _decoded(place, line).rstrip("\r").split("\t")) for place, line in places]
    if not found:
        raise LoadError(f"{path}: no examples; expected lines of {expected}")
    return found


def _decoded(place: str, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"{place}: not UTF-8: {error.reason} at byte {error.start}") from error
