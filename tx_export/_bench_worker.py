"""The worker's side of `timing`: `python -m tx_export._bench_worker artifact|eager|compile` loads one and times it.

It is told to load {"artifact": folder, "source": as for --source, "provider": name, "threads": n, "feeds": folder};
the feeds are files `<batch>x<tokens>.npz`, the same for every contender.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tx_export._bench_prompt import read_prompt, reading_module, with_empty_cache

if TYPE_CHECKING:
    from tx_export.spec import EagerModel

__all__ = ["Ready", "load_artifact", "peak_rss_mb", "read_feeds", "serve"]


class Ready(NamedTuple):
    """A loaded contender: where it runs, and what prepares the call that is timed at a shape."""

    provider: str
    prepare: Callable[[int, int], Callable[[], object]]  # batch, tokens


def serve(load: Callable[[Any], Ready]) -> None:
    """Answer questions until standard input ends; whatever the contender prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    ready: Ready | None = None
    prepared: tuple[tuple[int, int], Callable[[], object]] | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if "load" in question:
                started = time.perf_counter()
                ready = load(question["load"])
                answer = {"load_ms": _since(started), "provider": ready.provider}
            else:
                assert ready is not None
                shape = (question["time"]["batch"], question["time"]["tokens"])
                if prepared is None or prepared[0] != shape:
                    prepared = (shape, ready.prepare(*shape))
                answer = {"ms": _time(prepared[1], question["calls"]), "peak_rss_mb": peak_rss_mb()}
        except Exception as error:  # a contender is foreign code
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


def _time(call: Callable[[], object], calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(_since(started))
    return times


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def peak_rss_mb() -> float:
    """The most memory that this process had so far, in MB of 2**20 bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # Linux, where getrusage counts what the parent had before exec
        fields = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) / 2**10
    if sys.platform == "win32":
        import psutil

        return float(psutil.Process().memory_info().peak_wset) / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def read_feeds(folder: str, batch: int, tokens: int) -> dict[str, np.ndarray]:
    """The inputs of a shape by name."""
    with np.load(Path(folder) / f"{batch}x{tokens}.npz") as feeds:
        return dict(feeds)


def load_artifact(what: Mapping[str, Any]) -> Ready:
    """By its own run.py, as a user without tx_export does; torch stays out of the process."""
    spec = spec_from_file_location("run", Path(what["artifact"]) / "run.py")
    assert spec is not None and spec.loader is not None
    run = module_from_spec(spec)
    sys.modules["run"] = run
    spec.loader.exec_module(run)
    manifest = run.read_manifest(Path(what["artifact"]))
    if manifest.get("generation") is not None:
        return _reader(run, manifest, what)
    model = run.Model(what["artifact"], provider=what["provider"], threads=what["threads"])

    def prepare(batch: int, tokens: int) -> Callable[[], object]:
        feeds = read_feeds(what["feeds"], batch, tokens)
        return lambda: model.run_arrays(feeds)

    return Ready(what["provider"], prepare)


def _reader(run: Any, manifest: Mapping[str, Any], what: Mapping[str, Any]) -> Ready:
    """Of an artifact that generates: it reads a prompt."""
    names = ("encoder", "decoder") if manifest["generation"]["cache"].get("cross") else ("model",)
    settings = manifest["session"][what["provider"]]
    sessions = [
        run.open_session(
            Path(what["artifact"]) / f"{name}.onnx",
            manifest["min_onnxruntime"],
            what["provider"],
            settings,
            what["threads"],
        )
        for name in names
    ]

    def prepare(batch: int, tokens: int) -> Callable[[], object]:
        given = with_empty_cache(sessions, read_feeds(what["feeds"], batch, tokens))
        return lambda: read_prompt(sessions, given)

    return Ready(what["provider"], prepare)


def _load_eager(what: Mapping[str, Any]) -> Ready:
    import torch

    model = _eager_model(what)

    def prepare(batch: int, tokens: int) -> Callable[[], object]:
        module, inputs = reading_module(model, read_feeds(what["feeds"], batch, tokens))
        return torch.inference_mode()(lambda: module(*inputs))

    return Ready("torch", prepare)


def _load_compile(what: Mapping[str, Any]) -> Ready:
    import torch

    model = _eager_model(what)

    def prepare(batch: int, tokens: int) -> Callable[[], object]:
        module, inputs = reading_module(model, read_feeds(what["feeds"], batch, tokens))
        torch.compiler.reset()  # else the ninth shape is over dynamo's limit and runs in eager, without a word
        compiled: Callable[..., object] = torch.compile(module, dynamic=False)
        return torch.inference_mode()(lambda: compiled(*inputs))

    return Ready("torch.compile", prepare)


def _eager_model(what: Mapping[str, Any]) -> EagerModel:
    import torch

    from tx_export.compiler import source_of
    from tx_export.runtime import read_manifest

    torch.set_num_threads(what["threads"])
    torch.set_num_interop_threads(1)
    return source_of(read_manifest(Path(what["artifact"])), what["source"])


if __name__ == "__main__":
    serve({"artifact": load_artifact, "eager": _load_eager, "compile": _load_compile}[sys.argv[1]])
