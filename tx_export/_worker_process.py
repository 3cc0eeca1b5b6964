"""The process of a contender, which answers JSON lines; see `timing` for what they say."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from tx_export.errors import TxExportError

__all__ = ["WorkerProcess"]


class WorkerProcess:
    """The process of a contender; leaving the `with` block kills it, whatever it is doing."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__; a pipe that nobody reads would block
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
                env=os.environ | environment,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C reaches only us, and we kill the worker with all its children
            )
        except OSError as error:
            self.stderr.close()
            raise TxExportError(f"contender {name}: can't start {command[0]}: {error}") from error
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if os.name == "posix":
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.stderr.close()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise self._death() from None
        try:
            line = self.answers.get(timeout=self.timeout)
        except queue.Empty:
            raise TxExportError(f"contender {self.name}: no answer in {self.timeout:g} s") from None
        if not line:
            raise self._death()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise TxExportError(f"contender {self.name} answered {line.strip()!r}, not JSON") from None
        if "error" in answer:
            raise TxExportError(f"contender {self.name}: {answer['error']}")
        return answer

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def _death(self) -> TxExportError:
        code = self.process.wait()
        self.stderr.seek(0)
        said = self.stderr.read().decode("utf-8", "replace").split("\n")
        tail = " | ".join([line.strip() for line in said if line.strip()][-3:]) or "it said nothing"
        return TxExportError(f"contender {self.name} ended with code {code}: {tail}")
