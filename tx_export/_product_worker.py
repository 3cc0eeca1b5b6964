"""The worker's side of `timing` for graphs of one product: `python -m tx_export._product_worker`.

It is told to load {"graph": file, "settings": of a session, "threads": n, "feeds": folder}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tx_export import runtime
from tx_export._bench_worker import Ready, read_feeds, serve


def _load(what: Mapping[str, Any]) -> Ready:
    settings = what["settings"]
    session = runtime.open_session(Path(what["graph"]), "0", settings["provider"], settings, what["threads"])

    def prepare(batch: int, tokens: int) -> Callable[[], object]:
        feeds = read_feeds(what["feeds"], batch, tokens)
        return lambda: session.run(None, feeds)

    return Ready(settings["provider"], prepare)


if __name__ == "__main__":
    serve(_load)
