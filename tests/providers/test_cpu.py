"""The CPU provider."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from tx_export import plugins, runtime
from tx_export._recipe import provider_of
from tx_export.errors import ProviderError
from tx_export.providers.cpu import Cpu


def test_it_is_found_by_the_name_of_its_file() -> None:
    assert plugins.find("provider", "cpu") is Cpu
    assert (Cpu.onnxruntime_name, Cpu.package) == ("CPUExecutionProvider", "onnxruntime")


def test_its_settings_survive_the_manifest() -> None:
    settings = Cpu(disabled_optimizers=()).session()
    assert json.loads(json.dumps(settings)) == settings and settings["disabled_optimizers"] == []


def open_graph(path: Path, graph: Any, settings: dict[str, Any]) -> Any:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return runtime.open_session(path, "0", "cpu", settings, 1)


def test_int8_products_are_exact_where_the_fast_ones_saturate(tmp_path: Path) -> None:
    # The largest activations and weights: u8 x s8 pairs add up to 64,770, beyond the 16 bits of plain AVX2 products.
    weight = np.full((768, 8), 127, np.int8)
    weight[:, 1::2] = -128
    a = helper.make_tensor_value_info("a", TensorProto.UINT8, ["rows", 768])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, ["rows", 8])
    node = helper.make_node("MatMulInteger", ["a", "w"], ["y"])
    graph = helper.make_graph([node], "products", [a], [y], [numpy_helper.from_array(weight, "w")])
    session = open_graph(tmp_path / "model.onnx", graph, Cpu().session())
    x = np.full((5, 768), 255, np.uint8)
    # Integers, so the reference is exact.
    assert np.array_equal(session.run(None, {"a": x})[0], x.astype(np.int32) @ weight.astype(np.int32))


@pytest.mark.parametrize(("disabled", "left_out"), [(("SkipLayerNormFusion",), True), ((), False)])
def test_the_slow_fusion_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disabled: tuple[str, ...], left_out: bool
) -> None:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "t", 8]) for name in ("x", "r", "y")]
    scale = [numpy_helper.from_array(np.ones(8, np.float32), name) for name in ("scale", "bias")]
    nodes = [
        helper.make_node("Add", ["x", "r"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "scale", "bias"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(nodes, "residual", infos[:2], infos[2:], scale)
    options = runtime._session_options

    def and_save(*arguments: Any) -> Any:
        made = options(*arguments)
        made.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        return made

    monkeypatch.setattr(runtime, "_session_options", and_save)
    open_graph(tmp_path / "model.onnx", graph, Cpu(disabled_optimizers=disabled).session())
    assert (b"SkipLayerNormalization" not in (tmp_path / "optimized.onnx").read_bytes()) is left_out


def test_for_cpus_without_vnni_weights_that_fit_stay_in_the_quick_form() -> None:
    assert Cpu(isa="avx2").session()["config"] == {}
    exact = {"session.x64quantprecision": "1"}
    assert [Cpu(isa=isa).session()["config"] for isa in ("", "vnni", "arm64")] == [exact] * 3


def test_an_unknown_instruction_set_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ProviderError, match=r"^--isa sse2: known are avx2, vnni, arm64$"):
        provider_of("cpu", "sse2")
    with pytest.raises(ProviderError, match="--isa avx2: an instruction set is for --provider cpu, not cuda"):
        provider_of("cuda", "avx2")


@pytest.mark.parametrize("already", [None, "0"])
def test_the_environment_of_a_session_is_there_while_it_is_made_and_the_user_s_own_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, already: str | None
) -> None:
    name, seen = "ORT_GQA_DISABLE_FLASH_ATTENTION", []
    monkeypatch.delenv(name, raising=False)
    if already is not None:
        monkeypatch.setenv(name, already)
    options = runtime._session_options

    def watched(*arguments: Any) -> Any:
        seen.append(os.environ.get(name))
        return options(*arguments)

    monkeypatch.setattr(runtime, "_session_options", watched)
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [info], [out])
    open_graph(tmp_path / "model.onnx", graph, Cpu().session())
    assert seen == [already or "1"] and os.environ.get(name) == already
