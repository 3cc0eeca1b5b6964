"""The folder of a sweep: sweep.json, which is always whole, and beside it the artifact of each point."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tx_export.artifact import check_target
from tx_export.errors import ArtifactError
from tx_export.runtime import UsageError, read_manifest

__all__ = ["Record", "Row", "check_folder", "digest"]

Row = dict[str, Any]

_FORMAT = 1
_OURS = {"format_version", "asked", "complete", "points"}
_SHOWN = 60  # characters of a value in a message


def check_folder(folder: Path) -> None:
    """ArtifactError unless artifacts can be written there; quick, so that it can come before imports that aren't."""
    check_target(folder / ".point", force=False)


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Record:
    """What was asked, and a row for each point that is done; written to sweep.json after each change."""

    def __init__(self, folder: Path, asked: Mapping[str, Any], names: Sequence[str]) -> None:
        self.folder, self.asked, self.names = folder, dict(asked), tuple(names)
        self.rows: dict[str, Row] = {}
        self.is_complete = False
        self._path = folder / "sweep.json"

    def resume(self, force: bool) -> None:
        """Take over what is there; `force` clears it away instead, and leaves what others put beside it.

        UsageError names what was asked otherwise, ArtifactError a file or folder that isn't ours.
        """
        there = self._read()
        for name in self.names:
            check_target(self.folder / name, force or there is not None)
        if there is None or force:
            if there is not None:
                self._clear(there)
            self.write()  # from here on an artifact under the name of a point is ours
            return
        if changed := _differences(there["asked"], self.asked):
            raise UsageError(
                f"{self.folder} holds a sweep that was asked otherwise ({'; '.join(changed)}); "
                "--force starts anew, another -o leaves it"
            )
        self.rows = {row["name"]: row for row in there["points"]}
        self.is_complete = there["complete"] and not self._lacking(complete=True)

    def lacking(self) -> list[str]:
        """The points without a row, or whose artifact is not the one that the row tells of."""
        return self._lacking(self.is_complete)

    def built(self) -> list[Row]:
        """The rows of the points that were built, in the order of the points."""
        return [row for row in self._in_order() if row["status"] == "built"]

    def put(self, row: Row) -> None:
        """Add or replace a row."""
        self.rows[row["name"]] = row
        self.write()

    def to_json(self) -> dict[str, Any]:
        rows = self._in_order()
        return {"format_version": _FORMAT, "complete": self.is_complete, "asked": self.asked, "points": rows}

    def _in_order(self) -> list[Row]:
        return [self.rows[name] for name in self.names if name in self.rows]

    def write(self) -> None:
        """Under another name first: a sweep that is killed leaves the old file or the new one."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        unfinished = self._path.with_name(f".{self._path.name}.new")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self._path)
        except OSError as error:
            raise ArtifactError(f"{self._path}: can't be written: {error.strerror or error}") from error

    def discard(self, name: str) -> None:
        """Remove the files of an artifact, its manifest last; what others put beside them stays."""
        folder = self.folder / name
        try:
            files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        for file in (*files, "REPORT.md", "manifest.json"):
            if Path(file).name == file:
                (folder / file).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            folder.rmdir()

    def _read(self) -> dict[str, Any] | None:
        try:
            there = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{self._path} can't be read: {error}; it is left as it is") from error
        if not isinstance(there, dict) or not there.keys() >= _OURS or there["format_version"] != _FORMAT:
            raise ArtifactError(f"{self._path} is not a sweep of this version of tx-export; it is left as it is")
        return there

    def _clear(self, there: Mapping[str, Any]) -> None:
        for row in there["points"]:
            if Path(row["name"]).name == row["name"]:
                self.discard(row["name"])
        for name in ("sweep.png", "sweep.json"):
            (self.folder / name).unlink(missing_ok=True)

    def _lacking(self, complete: bool) -> list[str]:
        return [name for name in self.names if name not in self.rows or not self._is_there(self.rows[name], complete)]

    def _is_there(self, row: Row, complete: bool) -> bool:
        if row["status"] != "built":
            return True
        if row["manifest_sha256"] is None:
            return complete  # thrown away, as was asked
        folder = self.folder / row["name"]
        try:
            read_manifest(folder)  # which checks each file
        except ArtifactError:
            return False
        expected: str = row["manifest_sha256"]
        return digest(folder / "manifest.json") == expected


def _differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    keys = [key for key in dict.fromkeys((*asked, *there)) if there.get(key) != asked.get(key)]
    return [f"{key}: {_shown(there.get(key))} there, {_shown(asked.get(key))} here" for key in keys]


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
