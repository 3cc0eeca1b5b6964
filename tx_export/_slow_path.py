"""Torch's own encoder without its fast path, which is another program: not exportable, and failing on empty rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["slow_path"]


@contextmanager
def slow_path() -> Iterator[None]:
    """Switch it off; the process-wide switch is put back, whatever happens."""
    from torch.backends import mha

    was = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(was)
