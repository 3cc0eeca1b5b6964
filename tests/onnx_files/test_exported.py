"""A Transformer as torch.onnx exports it, by both of its exporters: fused, quantized, compared with eager."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tx_export import _onnx_output, cli, runtime
from tx_export.artifact import write_graph
from tx_export.errors import ArtifactError
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.testing import tiny_tokenizer
from tx_export.verify import default_lines

from .graphs import built, plain

Array = NDArray[Any]
_VOCAB_SIZE, _POSITIONS, _WIDTH, _HEADS = 128, 40, 64, 4


class _Encoder(nn.Module):
    """Two layers of scaled_dot_product_attention, whose mask hides padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(_VOCAB_SIZE, _WIDTH), nn.Embedding(_POSITIONS, _WIDTH)
        self.packed = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(6))
        self.joined = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x: Tensor = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        mask = attention_mask[:, None, None, :].bool()
        for layer in range(2):
            q, k, v = (
                part(x).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for part in self.packed[3 * layer : 3 * layer + 3]
            )
            context = scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
            x = self.norms[layer](x + self.joined[layer](context))
        return x


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _Encoder().eval()


@pytest.fixture(scope="module", params=["script", "program"])
def file(request: pytest.FixtureRequest, encoder: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TorchScript's exporter at opset 14, which leaves names to itself; torch.export's at its own opset."""
    path = tmp_path_factory.mktemp(request.param) / "model.onnx"
    ids = torch.arange(14).reshape(2, 7)
    mask = (ids < 12).long()
    names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["hidden"]}
    if request.param == "script":
        axes = {name: [0, 1] for name in names["input_names"]}
        torch.onnx.export(
            encoder,
            (ids, mask),
            str(path),
            dynamo=False,
            opset_version=14,
            dynamic_axes=axes,
            **names,  # type: ignore[arg-type]
        )
    else:
        rows, columns = torch.export.Dim("rows"), torch.export.Dim("columns", max=_POSITIONS)
        dims = ({0: rows, 1: columns}, {0: rows, 1: columns})
        torch.onnx.export(encoder, (ids, mask), str(path), dynamo=True, dynamic_shapes=dims, **names)  # type: ignore[arg-type]
    (path.parent / "tokenizer.json").write_text(tiny_tokenizer(_VOCAB_SIZE), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def optimized(file: Path) -> tuple[Path, Mapping[str, Any]]:
    return built(file, file.parent / "optimized")


def _feeds(tokens: int = 9) -> dict[str, Array]:
    """Ragged rows, and one whose keys are all hidden."""
    rng = np.random.default_rng(0)
    mask = (np.arange(tokens) < np.array([[tokens], [3], [0]])).astype(np.int64)
    return {"input_ids": rng.integers(0, _VOCAB_SIZE, (3, tokens)), "attention_mask": mask}


def test_every_attention_is_fused_and_the_file_and_eager_are_met(
    file: Path, optimized: tuple[Path, Mapping[str, Any]], encoder: nn.Module
) -> None:
    """The file in every row; eager where keys are visible, as for a row without any the exporters differ."""
    folder, manifest = optimized
    assert (manifest["fused"]["done"], manifest["fused"]["of"]) == (2, 2)
    operators = [node.op_type for node in ir.load(folder / "model.onnx").graph]
    assert operators.count("Attention") == 2 and "Softmax" not in operators
    feeds = _feeds()
    found = runtime.Model(folder).run_arrays(feeds)["hidden"]
    with torch.inference_mode():
        eager = encoder(*map(torch.from_numpy, feeds.values())).numpy()
    bound = fidelity_bound(float(np.abs(eager).max()))
    assert np.abs(found - plain(file, feeds)["hidden"]).max() <= bound
    assert np.abs(found - eager)[:2].max() <= bound


def test_inputs_and_outputs_are_read_from_the_file_and_from_running_it(file: Path) -> None:
    model = load(str(file))
    assert list(map(str, (*model.inputs, *model.outputs))) == [
        f"input_ids:int64[batch,tokens<={_POSITIONS}]{{0..{_VOCAB_SIZE - 1}}}",
        f"attention_mask:int64[batch,tokens<={_POSITIONS}]{{0..1}}",
        f"hidden:float32[batch,tokens<={_POSITIONS},{_WIDTH}]",
    ]
    assert model.text is not None and model.text.max_length == _POSITIONS


def test_text_is_judged_on_and_taken_by_the_artifact(file: Path, tmp_path: Path, capsys: Any) -> None:
    """Drift on text of 8-bit products: the default budget is 10 dB."""
    text = tmp_path / "lines.txt"
    text.write_text("\n".join(default_lines()[:25]), encoding="utf-8")
    options = ["--calibrate", str(text), "--budget", "sqnr_db=12", "-o", str(tmp_path / "new"), "--json"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["quantize", str(file), *options])
    assert ended.value.code == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["quantized"]["done"] == 5  # two packed products, two others and the table of tokens
    record = manifest["verification"]["overall"]
    assert record["kind"] == "drift" and 12 <= record["outputs"]["hidden"]["sqnr_db"] < 60
    (answer,) = runtime.Model(tmp_path / "new")(["a text"])
    assert np.shape(answer["outputs"]["hidden"])[-1] == _WIDTH
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", str(tmp_path / "new"), "--source", str(file)])
    assert ended.value.code == 0
    other = shutil.copytree(file.parent, tmp_path / "other") / "model.onnx"
    other.write_bytes(file.read_bytes() + b"\x32\x00")  # a doc_string: other bytes
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", str(tmp_path / "new"), "--source", str(other)])
    assert ended.value.code == 2
    assert "has other weights than the artifact was made from" in capsys.readouterr().err


def test_a_second_optimization_finds_nothing_to_fuse(optimized: tuple[Path, Mapping[str, Any]], tmp_path: Path) -> None:
    folder, manifest = optimized
    again, told = built(folder / "model.onnx", tmp_path / "again")
    assert told["fused"] == manifest["fused"]
    feeds = _feeds()
    first, second = (runtime.Model(each).run_arrays(feeds)["hidden"] for each in (folder, again))
    assert (first == second).all()


def test_a_new_file_is_whole_and_alone_and_replaces_only_by_force(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made" / "small.onnx"
    path, manifest = built(file, target, "dynamic_int8")
    assert path == target and [each.name for each in target.parent.iterdir()] == ["small.onnx"]
    assert manifest["files"] == {"small.onnx": {"bytes": target.stat().st_size}}
    whole = sum(each.stat().st_size for each in file.parent.glob("model.onnx*"))
    assert 2 * target.stat().st_size < whole
    expected, found = (plain(each, _feeds())["hidden"] for each in (file, target))
    assert np.square(found - expected).sum() * 10 <= np.square(expected).sum()  # the budget of 10 dB
    before = target.read_bytes()
    with pytest.raises(ArtifactError, match=r"small.onnx exists already; --force replaces it"):
        built(file, target, "dynamic_int8")
    assert target.read_bytes() == before
    monkeypatch.setattr(_onnx_output, "write_graph", lambda graph, path: write_graph(graph, path, inline_bytes=0))
    built(file, target, force=True)
    assert sorted(each.name for each in target.parent.iterdir()) == ["small.onnx", "small.onnx.data"]
    assert np.abs(plain(target, _feeds())["hidden"] - expected).max() <= fidelity_bound(float(np.abs(expected).max()))


def test_nothing_is_left_of_a_new_file_that_fails(file: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["quantize", str(file), "--budget", "sqnr_db=80", "-o", str(tmp_path / "new.onnx")])
    assert ended.value.code == 3
    assert "sqnr_db" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
