"""Training with fake quantization: its arithmetic is that of the 8-bit graph, and it wins back what rounding costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tx_export import _fake_quantize, cli
from tx_export._fake_quantize import fake_quantized, read_arithmetic, rounded_activation, rounded_rows
from tx_export._recipe import pipeline_of
from tx_export._training_loop import fit
from tx_export._training_steps import LoopOptions, evaluate, gradients
from tx_export._training_text import Rows
from tx_export.artifact import open_graph
from tx_export.errors import LoadError, PassError, PluginError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.models.albert import Albert
from tx_export.models.bert import Bert
from tx_export.models.classifier import Classifier
from tx_export.models.embedder import Embedder
from tx_export.passes import Context
from tx_export.providers.cpu import Cpu
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.spec import EagerModel, ModelSpec
from tx_export.testing import eager_model, graph_from_text, matmul_model
from tx_export.training import TrainOptions, TrainRecord, train

Array = NDArray[Any]
Feeds = dict[str, Array]

_INT8 = read_arithmetic("dynamic_int8")
# Each has tables on both sides of 4,096 elements; the third reads one table by rows and as a product.
_SPECS: dict[str, ModelSpec] = {
    "classifier": Classifier(vocab_size=128, max_length=128, d_model=32, num_layers=2, num_heads=4, d_ff=64),
    "relative": Embedder(
        vocab_size=100, d_model=32, num_layers=2, num_heads=4, d_ff=64, positions="relative", relative_distance=512
    ),
    "tied": Bert(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, head="fill-mask",
    ),
}  # fmt: skip


def _built(spec: ModelSpec) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return spec.build().eval()


def _quantized_graph(model: EagerModel) -> ir.Model:
    graph = export(model, Target.parse(None, "fused"))
    pipeline, asked = pipeline_of("cpu", "fused", "dynamic_int8", None, None)
    context = Context(model.module, (), lambda graph: open_graph(graph, Cpu().session()))
    pipeline.run_graph(graph, context, asked, lambda item, outcome: None)
    return graph


@pytest.fixture(scope="module", params=_SPECS)
def deployed(request: pytest.FixtureRequest) -> tuple[EagerModel, ir.Model]:
    """A model, and the 8-bit graph that a build makes of it."""
    spec = _SPECS[request.param]
    model = eager_model(_built(spec), spec.inputs(), spec.outputs())
    return model, _quantized_graph(model)


def _feeds(model: EagerModel, seed: int) -> Feeds:
    random = np.random.default_rng(seed)
    shape = (3, int(random.integers(2, 16)))
    values = {
        spec.name: random.integers(0, int(spec.high or 0) + 1, shape) for spec in model.inputs if not spec.is_mask
    }
    lengths = random.integers(1, shape[1] + 1, (3, 1))
    return values | {"attention_mask": (np.arange(shape[1]) < lengths).astype(np.int64)}


def _eager(module: nn.Module, model: EagerModel, feeds: Feeds) -> Array:
    with torch.no_grad():
        out: Tensor = module(*(torch.from_numpy(feeds[spec.name]) for spec in model.inputs))
    return out.numpy()


def _run(graph: ir.Model, feeds: Feeds) -> list[Array]:
    return list(open_graph(graph, Cpu().session(), threads=1)(feeds).values())


def _with_roundings(graph: ir.Model) -> ir.Model:
    """The graph with input, values, scale and zero point of each quantized activation as outputs too."""
    copied = ir.from_proto(ir.to_proto(graph))
    for node in [node for node in copied.graph if node.op_type == "DynamicQuantizeLinear"]:
        kinds = (ir.DataType.FLOAT, ir.DataType.UINT8, ir.DataType.FLOAT, ir.DataType.UINT8)
        for value, kind in zip((node.inputs[0], *node.outputs), kinds, strict=True):
            assert value is not None
            value.dtype = kind
            copied.graph.outputs.append(value)
    return copied


class _GraphRoundings:
    """Gives eager the roundings of the graph, each checked to be its own but for float32 sums in another order."""

    def __init__(self, recorded: Sequence[Array]) -> None:
        self.left = iter([recorded[i : i + 4] for i in range(0, len(recorded), 4)])
        self.x, self.given, self.steps_apart = torch.empty(0), torch.empty(0), 0

    def __call__(self, x: Tensor) -> Tensor:
        if x is not self.x:  # query, key and value read one rounding
            self.x, self.given = x, self._checked(x.numpy(), *next(self.left))
        return self.given

    def _checked(self, x: Array, seen: Array, values: Array, scale: Array, zero: Array) -> Tensor:
        bound = fidelity_bound(np.abs(x).max())
        assert x.shape == seen.shape and np.abs(x - seen).max() <= bound
        given = (values.astype(np.float32) - zero) * scale
        own = rounded_activation(torch.from_numpy(x)).numpy()
        # A value moves by its error, and where that crosses half a step by a step; the scales differ by an error / 255.
        crossing = np.abs((x / scale) % 1 - 0.5) * scale <= bound
        assert (np.abs(own - given) <= 2 * bound + scale * crossing).all()
        return torch.from_numpy(given)


def test_each_rounding_and_product_of_the_artifact_is_that_of_training(
    deployed: tuple[EagerModel, ir.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = deployed
    module, opened = fake_quantized(model.module, _INT8), _with_roundings(graph)
    for seed in range(4):
        feeds = _feeds(model, seed)
        out, *recorded = _run(opened, feeds)
        roundings = _GraphRoundings(recorded)
        monkeypatch.setattr(_fake_quantize, "rounded_activation", roundings)
        expected = _eager(module, model, feeds)
        assert next(roundings.left, None) is None, "the graph rounds what training does not"
        # Reference: eager with the same roundings; nothing but float32 is left.
        assert np.abs(out - expected).max() <= fidelity_bound(np.abs(expected).max())


def test_the_artifact_differs_from_training_by_far_less_than_from_float(deployed: tuple[EagerModel, ir.Model]) -> None:
    model, graph = deployed
    module = fake_quantized(model.module, _INT8)
    same, rounding, noise = 0, 0.0, 0.0
    for seed in range(20):
        feeds = _feeds(model, seed)
        out, trained = _run(graph, feeds)[0], _eager(module, model, feeds)
        same += int(np.abs(out - trained).max() <= fidelity_bound(np.abs(trained).max()))
        rounding += float(np.square(out - trained).sum())
        noise += float(np.square(out - _eager(model.module, model, feeds)).sum())
    # Of 1e4 values in a batch, one in 1e5 is within float32 error of a boundary and may be rounded to the other side,
    # which then costs about what rounding costs anyway: in 1 batch of 10. All others differ by float32 sums alone.
    assert same >= 15
    assert 0 < rounding <= noise / 10


def _dynamic_quantize(x: Array) -> Array:
    """ONNX Runtime's own, taken back to float32."""
    graph = graph_from_text(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[n] x) => (uint8[n] q, float s, uint8 z) '
        "{ q, s, z = DynamicQuantizeLinear (x) }"
    )
    q, s, z = _run(graph, {"x": x})
    return (q.astype(np.float32) - z.astype(np.float32)) * s


def _ranges() -> Iterator[Array]:
    """Both signs, one sign, zeros alone, and values that lie between two steps, the even one of which is right."""
    random = np.random.default_rng(0)
    for size in (1e-3, 1.0, 1e4):
        x = (random.normal(size=4096) * size).astype(np.float32)
        yield from (x, np.maximum(x, 0), -np.abs(x) - np.float32(size), x + np.float32(3 * size))
    yield np.zeros(8, np.float32)
    yield np.concatenate([np.arange(0, 255, 0.5), [255.0]]).astype(np.float32)
    yield np.concatenate([np.arange(-101, 101, 0.5), [-101.0, 154.0]]).astype(np.float32)


def test_activations_are_rounded_as_onnxruntime_rounds_them() -> None:
    for x in _ranges():
        assert np.array_equal(rounded_activation(torch.from_numpy(x)).numpy(), _dynamic_quantize(x))


@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_are_rounded_as_the_pass_stores_them(per_channel: bool) -> None:
    weight = np.random.default_rng(1).normal(size=(24, 40)).astype(np.float32)
    weight *= (10.0 ** np.arange(-20, 20)).astype(np.float32)
    weight[:, 7], weight[:2, 20] = 0, (63.5, 127)  # no step, and half of one
    model, arithmetic = matmul_model(weight), DynamicInt8(per_channel=per_channel)
    arithmetic(model)
    stored, scale = (model.graph.initializers[f"weight.{name}"].const_value for name in ("int8", "scale"))
    assert stored is not None and scale is not None
    linear, ones = nn.Linear(24, 40, bias=False), torch.eye(24)
    linear.weight = nn.Parameter(torch.from_numpy(np.ascontiguousarray(weight.T)))
    assert torch.equal(rounded_activation(ones), ones)  # so that the product shows the weight
    rounded = fake_quantized(linear, arithmetic)(ones).detach().numpy()
    assert np.array_equal(rounded, stored.numpy().astype(np.float32) * scale.numpy())


@pytest.mark.parametrize("rounded", [rounded_activation, rounded_rows])
def test_gradients_pass_the_rounding(rounded: Any) -> None:
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    given = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    (rounded(x) * given).sum().backward()
    assert x.grad is not None and torch.equal(
        x.grad, given
    )  # the ends of the range too, which no rounding puts outside


def test_parameters_keep_names_and_values_and_the_module_stays_as_it_is() -> None:
    for spec in _SPECS.values():
        module = _built(spec)
        rounded = fake_quantized(module, _INT8)
        names = [name for name, _ in module.named_parameters()]
        assert [name for name, _ in rounded.named_parameters()] == names  # a tied one is still one
        assert all(torch.equal(weight, rounded.state_dict()[name]) for name, weight in module.state_dict().items())
        ids = torch.ones(1, 3, dtype=torch.int64)
        given = (ids, ids) if not isinstance(spec, Bert) else (ids, ids, ids)
        assert not torch.equal(module(*given), rounded(*given))
        assert torch.equal(module(*given), _built(spec)(*given))


def test_a_layer_that_stands_at_several_places_is_rounded_at_each() -> None:
    spec = Albert(
        vocab_size=64, embedding_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    rounded = fake_quantized(_built(spec), _INT8)
    places = [
        layer for name, layer in rounded.named_modules(remove_duplicate=False) if name.endswith("attention.query")
    ]
    assert len(places) == 3 and len(set(places)) == 1
    assert not [layer for layer in rounded.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize(
    ("text", "changed"),
    [("dynamic_int8", True), ("dynamic_int8{embeddings=false}", False), ("dynamic_int8{min_elements=4097}", False)],
)
def test_a_table_is_rounded_where_the_pass_does_it(text: str, changed: bool) -> None:
    table = nn.Embedding(128, 32)
    ids = torch.arange(128)
    assert (not torch.equal(fake_quantized(table, read_arithmetic(text))(ids), table(ids))) is changed


def test_what_can_not_be_imitated_is_refused() -> None:
    with pytest.raises(
        PassError, match=r"^self_attn is of the class MultiheadAttention, whose products can't be rounded"
    ):
        fake_quantized(nn.TransformerEncoderLayer(8, 2, 16), _INT8)
    with pytest.raises(PluginError, match=r"^qat 'blockwise': only the arithmetic of dynamic_int8 can be trained for$"):
        read_arithmetic("blockwise")
    with pytest.raises(PluginError, match=r"^qat 'dynamic_int8 fuse_gelu': only the arithmetic of dynamic_int8"):
        read_arithmetic("dynamic_int8 fuse_gelu")


_LABELS = tuple("abcdefgh")
_SPEC = Classifier(
    vocab_size=90, max_length=16, d_model=16, num_layers=1, num_heads=2, d_ff=32, dropout=0.0, labels=_LABELS
)


def _planted(count: int, seed: int) -> Rows:
    """Rows in which one id is above 60; it says the label."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 15, (count,), generator=generator).tolist()
    ids = [torch.randint(10, 60, (length,), generator=generator).tolist() for length in lengths]
    telling = torch.randint(60, 90, (count,), generator=generator).tolist()
    for row, told in zip(ids, telling, strict=True):
        row[told % len(row)] = told
    return Rows([[2, *row] for row in ids], torch.tensor([told % 8 for told in telling]), torch.ones(count))


def _fit(module: nn.Module, epochs: int, rate_factor: float, folder: Path) -> None:
    loop = LoopOptions(epochs=epochs, warmup=60, rate_factor=rate_factor, label_smoothing=0.0, patience=epochs)
    rows = _planted(512, 0), _planted(200, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fitted = fit(module, 16, rows, loop, (folder / f"{epochs}.pt", "any"), lambda record: None)
    module.load_state_dict(fitted.weights)


def test_training_wins_back_the_accuracy_that_rounding_afterwards_loses(tmp_path: Path) -> None:
    module = _built(_SPEC)
    _fit(module, 20, 1.0, tmp_path)
    norm, head = module.get_submodule("encoder.layers.0.feed_forward_norm"), module.get_submodule("head")
    with torch.no_grad():  # the same function, but one channel is so loud that few steps are left to the others
        norm.get_parameter("weight")[3] *= 1000
        norm.get_parameter("bias")[3] *= 1000
        head.get_parameter("weight")[:, 3] /= 1000
    unseen, rounded = _planted(1000, 2), fake_quantized(module, _INT8)
    whole, afterwards = (evaluate(each, unseen, 32)["accuracy"] for each in (module, rounded))
    _fit(rounded, 6, 0.3, tmp_path)
    assert afterwards < whole - 0.2
    # Reference: the float model. Judged with 8 bits, training is at least as good, and not by chance:
    # three standard errors of 1,000 rows are 0.03 where the accuracy is 0.9.
    assert evaluate(rounded, unseen, 32)["accuracy"] >= whole - 0.03


def test_recomputed_activations_are_rounded_alike() -> None:
    found = []
    for activations in ("keep", "recompute"):
        module = fake_quantized(_built(_SPEC), _INT8).train()
        options = LoopOptions(batch_size=16, activations=activations)
        gradients(module, _planted(16, 3), range(16), options)
        found.append([weight.grad for weight in module.parameters()])
    assert all(
        one is not None and other is not None and torch.equal(one, other) for one, other in zip(*found, strict=True)
    )


def _options(folder: Path, **changes: Any) -> TrainOptions:
    words = ["good", "bad"]
    lines = [f"{['positive', 'negative'][i % 2]}\tthe film number {i} was {words[i % 2]}\n" for i in range(64)]
    (folder / "train.tsv").write_text("".join(lines), encoding="utf-8")
    spec = Classifier(vocab_size=120, max_length=16, d_model=16, num_layers=1, num_heads=2, d_ff=32)
    loop = LoopOptions(epochs=2, warmup=10, batch_size=8, checkpoint_every=2)
    options = TrainOptions(spec, folder / "train.tsv", folder / "out", loop=loop, qat="dynamic_int8")
    return dataclasses.replace(options, **changes)


def test_a_killed_run_continues_and_its_record_says_what_it_was_trained_for(tmp_path: Path) -> None:
    whole = train(_options(tmp_path), lambda record: None)

    def killing(record: TrainRecord) -> None:
        if record.step == 11:
            raise KeyboardInterrupt

    again = _options(tmp_path, output=tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        train(again, killing)
    with pytest.raises(LoadError, match="from other options or data"):
        train(dataclasses.replace(again, qat=None), lambda record: None)
    train(again, lambda record: None)
    for name in ("model.safetensors", "training.json"):
        assert (tmp_path / "again" / name).read_bytes() == (whole.folder / name).read_bytes()
    record = json.loads((whole.folder / "training.json").read_text(encoding="utf-8"))
    assert record["qat"] == str(DynamicInt8())
    plain = train(_options(tmp_path, qat=None, output=tmp_path / "plain"), lambda record: None)
    assert json.loads((plain.folder / "training.json").read_text(encoding="utf-8"))["qat"] is None
    weights = [safetensors.torch.load_file(result.folder / "model.safetensors") for result in (whole, plain)]
    assert weights[0].keys() == weights[1].keys()
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    model = load("classifier", weights=str(whole.folder / "model.safetensors"))
    assert all(torch.equal(weight, weights[0][name]) for name, weight in model.module.state_dict().items())


def test_what_can_not_be_trained_for_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    options = _options(tmp_path, loop=LoopOptions(precision="bfloat16"))
    with pytest.raises(LoadError, match=r"^qat: bfloat16 would round what has to be rounded to 8 bits; use float32$"):
        train(options, lambda record: None)
    with pytest.raises(PluginError, match=r"^qat 'float16': only the arithmetic of dynamic_int8 can be trained for$"):
        train(_options(tmp_path, qat="float16"), lambda record: None)
    assert not (tmp_path / "out").exists()


def test_the_command_line_trains_for_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, folder = _options(tmp_path).data, tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--qat", "classifier", "--data", str(data), "--steps", "1", "-o", str(folder)])
    assert ended.value.code == 0, capsys.readouterr().err
    assert json.loads((folder / "training.json").read_text(encoding="utf-8"))["qat"] == str(DynamicInt8())
