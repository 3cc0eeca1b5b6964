"""What several test files share: one small artifact, built once for the whole run."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

# A shell starts what runs in its background with Ctrl-C ignored, and so would be every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two workers on two cores: more threads each would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def small_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small classifier as `tx-export build` makes it; read only. All workers of pytest-xdist share one build."""
    from tx_export.compiler import BuildOptions, build

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "small"
    with (shared / "small.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build(BuildOptions(output=folder), progress=lambda line: None)
    return folder
