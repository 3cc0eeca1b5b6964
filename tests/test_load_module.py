"""Users' own modules: found, built, copied and filled; the user's object stays as it is."""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.backends import mha

from tx_export.errors import LoadError, PluginError
from tx_export.load import load
from tx_export.spec import EagerModel

pytestmark = pytest.mark.filterwarnings("ignore:.*are deprecated and will be removed:UserWarning")

_USER = """
import threading
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(8))
        self.notes = ["first"]

    def forward(self, ids, mask):
        x = self.dropout(self.embedding(ids)) * mask[:, :, None] * self.scale
        return {"hidden": x, "logits": self.head(x.sum(1)), "nothing": None}

class Fixed(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def tx_inputs(self):
        return ["x:float32[rows,4]"]

class Sizes:
    class small(Fixed):
        pass

class Locked(Fixed):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

class Silent(Fixed):
    def train(self, mode=True):
        super().train(mode)

class Needs(nn.Linear):
    pass

class Half(Fixed):
    def __init__(self):
        super().__init__()
        self.bfloat16()

class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LazyLinear(3), None

    def forward(self, x):
        if self.second is None:
            self.second = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        return self.second(self.first(x))

torch.manual_seed(1)
instance = Net().train()
instance.head.weight.requires_grad_(False)
locked = Locked()
fixed = Fixed()
compiled = torch.compile(nn.Sequential(torch.compile(Fixed())))
parallel = nn.DataParallel(Fixed())
script = torch.jit.script(nn.Sequential(nn.Linear(4, 2)))
meta = nn.Sequential(nn.Linear(4, 2, device="meta"))
normed = nn.utils.weight_norm(nn.Linear(4, 2))
parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
quantized = nn.Sequential(torch.ao.nn.quantized.dynamic.Linear(4, 2))
number = 3

def pair():
    return nn.ModuleList([nn.Linear(4, 2)])[0]

def shared():
    return instance

def wrong():
    return 3

def fails():
    raise ValueError("no weights")

def exits():
    raise SystemExit(3)
"""
_INPUTS = ("ids:int64[batch,tokens<=9]", "mask:float32[batch,tokens<=9]")
_ROWS = ("input:float32[rows,4]",)


def _state(model: EagerModel) -> dict[str, Tensor]:
    return dict(model.module.state_dict())


def _assert_same_weights(first: EagerModel, second: EagerModel) -> None:
    ours, theirs = _state(first), _state(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert first.weights == second.weights


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(_USER)
    return tmp_path / "mine.py"


@pytest.fixture
def package(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file as a package of the current folder, which stays imported between two loads."""
    monkeypatch.chdir(file.parent)
    file.rename(file.parent / "users_own_package.py")
    monkeypatch.syspath_prepend(file.parent)
    import users_own_package  # type: ignore[import-not-found]

    yield users_own_package
    del sys.modules["users_own_package"]


def test_outputs_are_found_by_name_and_dimension(file: Path) -> None:
    model = load(f"{file}:Net", inputs=_INPUTS)
    assert (model.name, model.source, model.family) == ("Net", "mine.py:Net", "module")
    assert [str(spec) for spec in model.inputs] == [
        "ids:int64[batch,tokens<=9]{0..49}",
        "mask:float32[batch,tokens<=9]{0..1}",
    ]
    assert [str(spec) for spec in model.outputs] == ["hidden:float32[batch,tokens<=9,8]", "logits:float32[batch,3]"]
    out = model.module(torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2))
    assert [tuple(tensor.shape) for tensor in out] == [(1, 2, 8), (1, 3)]


def test_inputs_come_from_tx_inputs(file: Path) -> None:
    model = load(f"{file}:Fixed")
    assert [str(spec) for spec in model.inputs] == ["x:float32[rows,4]"]
    assert [str(spec) for spec in model.outputs] == ["output_0:float32[rows,2]"]


def test_inputs_come_from_the_files_tx_inputs(file: Path) -> None:
    file.write_text(_USER + '\ndef tx_inputs():\n    return ["x:float32[rows,4]"]\n')
    assert [str(spec) for spec in load(f"{file}:pair").inputs] == ["x:float32[rows,4]"]


@pytest.mark.parametrize("name", ["instance", "shared"])
def test_a_users_object_stays_as_it_is_b080(name: str, package: Any) -> None:
    theirs = package.instance
    hook = theirs.register_forward_hook(lambda *_: None)
    before = copy.deepcopy(theirs.state_dict())
    attributes = {key: id(value) for key, value in vars(theirs).items()}
    model = load(f"users_own_package:{name}", inputs=_INPUTS)
    with pytest.raises(LoadError):
        load(f"users_own_package:{name}", inputs=("ids:float32[batch]", "mask:float32[batch]"))
    assert theirs.training and theirs.dropout.training and not any(part.training for part in model.module.modules())
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[key]) for key, tensor in theirs.state_dict().items())
    assert attributes == {key: id(value) for key, value in vars(theirs).items()}
    assert [part.requires_grad for part in theirs.head.parameters()] == [False, True]
    assert hook.id in theirs._forward_hooks and theirs.notes == ["first"]


def test_a_class_with_random_weights_is_the_same_each_time(file: Path) -> None:
    file.write_text(
        "import random\nimport numpy as np\nimport torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        w = torch.randn(4) + torch.tensor(np.random.randn(4)).float() + random.random()\n"
        "        self.w = nn.Parameter(w)\n"
        "    def forward(self, x):\n"
        "        return x * self.w\n"
    )
    _assert_same_weights(load(f"{file}:Net", inputs=["x:float32[b,4]"]), load(f"{file}:Net", inputs=["x:float32[b,4]"]))


@pytest.mark.parametrize("wrapper", [lambda module: module, nn.DataParallel])
def test_a_weight_file_fills_the_module_b256(wrapper: Any, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled = nn.Linear(4, 2)
    nn.init.constant_(filled.weight, 0.5)
    nn.init.zeros_(filled.bias)
    save_file(wrapper(filled).state_dict(), file.parent / "w.safetensors")
    model = load(f"{file}:Fixed", weights=str(file.parent / "w.safetensors"))
    [found] = model.module(torch.ones(1, 4))
    assert torch.equal(found, torch.full((1, 2), 2.0))
    assert model.weights.startswith("checkpoint ")
    assert ("the prefix module. was taken off" in caplog.text) == (wrapper is nn.DataParallel)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Net", "its inputs are not known; give each with --input"),
        ("number", "is int; expected an nn.Module"),
        ("wrong", "returned int; expected an nn.Module"),
        ("Sizes", "returned Sizes; expected an nn.Module"),
        ("Needs", "missing a required argument: 'in_features'; name a function without arguments"),
        ("fails", r"^\S*mine.py:\d+: \S*mine.py:fails: building it raised ValueError: no weights"),
        ("exits", r"^\S*mine.py:\d+: \S*mine.py:exits: building it raised SystemExit: 3"),
        ("Nett", r"mine.py has no 'Nett'; it has Net, Fixed, .*pair.*; did you mean Net\?"),
        ("Sizes.tiny", "Sizes has no 'tiny'; it has small"),
        ("script", "is a TorchScript module; give the nn.Module that it was made from"),
        ("quantized", "0 is quantized by torch; give the float module"),
        ("meta", "0.weight is on the device meta: it has no values"),
        ("locked", r"it can't be copied: lock is lock \(TypeError: .*; give its class, or a function that builds it"),
    ],
)
def test_what_can_not_be_taken_says_what_it_is(name: str, message: str, file: Path) -> None:
    with pytest.raises((LoadError, PluginError), match=message):
        load(f"{file}:{name}")


def test_a_module_that_fails_on_its_inputs_says_so(file: Path) -> None:
    with pytest.raises(LoadError, match=r"running it on inputs of shape \[2, 5\] raised RuntimeError: mat1"):
        load(f"{file}:Fixed", inputs=["input:float32[rows,5]"])
    line = 1 + _USER[: _USER.index("x = self.dropout(")].count("\n")
    with pytest.raises(LoadError, match=rf"mine.py:{line}: .*running it on inputs of shape .* raised IndexError"):
        load(f"{file}:Net", inputs=("ids:int64[batch,tokens]", "mask:float32[batch]"))


def test_text_tasks_are_refused(file: Path) -> None:
    with pytest.raises(PluginError, match="task 'text-classification': a user's module takes and gives arrays"):
        load(f"{file}:Fixed", task="text-classification")
    assert load(f"{file}:Fixed", task="feature-extraction").task == "feature-extraction"


@pytest.mark.parametrize("name", ["Sizes.small", "Locked", "Silent", "fixed", "normed", "parametrized"])
def test_unusual_modules_compute_what_they_do_by_themselves(name: str, package: Any) -> None:
    model = load(f"users_own_package:{name}", inputs=_ROWS)
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    # Reference: a plain layer with the weights that were loaded.
    theirs, layer = model.module.get_submodule("module"), nn.Linear(4, 2)
    layer.load_state_dict({"weight": theirs.weight, "bias": theirs.bias})
    [found] = model.module(x)
    assert torch.equal(found, layer(x))


@pytest.mark.parametrize(("name", "wrapper"), [("compiled", "OptimizedModule"), ("parallel", "DataParallel")])
def test_wrappers_are_taken_off_with_a_notice(
    name: str, wrapper: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(f"{file}:{name}", inputs=_ROWS)
    assert f"it is compiled without {wrapper} around it" in caplog.text
    assert not [part for part in model.module.modules() if type(part).__name__ == wrapper]


def test_half_precision_is_widened_with_a_notice(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(f"{file}:Half", inputs=["x:float16[rows,4]"])
    assert "its bfloat16 weights are widened to float32" in caplog.text
    [found] = model.module(torch.ones(1, 4, dtype=torch.float16))
    weight = model.module.get_parameter("module.weight")
    assert weight.dtype == found.dtype == torch.float32
    assert torch.equal(weight, weight.bfloat16().float())


def test_parameters_that_the_first_run_makes_are_made_from_seed_0(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = load(f"{file}:Lazy", inputs=["x:float32[rows,4]"]), load(f"{file}:Lazy", inputs=["x:float32[b,4]"])
    assert "first run made first.bias, first.weight, second.0.bias, second.0.weight: random numbers" in caplog.text
    _assert_same_weights(first, second)
    assert not any(part.training for part in first.module.modules())


_PROCESS_WIDE = """
import random
import numpy as np
import torch
from torch import nn

def disturb():
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.backends.mha.set_fastpath_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.rand(3), random.random(), np.random.rand()

disturb()

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        disturb()
    def forward(self, x):
        disturb()
        if x.shape[-1] == 4:
            return super().forward(x)
        raise KeyboardInterrupt
def tx_inputs():
    disturb()
    return ["x:float64[rows,4]"]
"""


def _process_wide() -> list[object]:
    switches = [torch.is_grad_enabled(), torch.get_default_dtype(), mha.get_fastpath_enabled()]
    switches += [torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()]
    return [*switches, torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]


def test_what_a_module_switches_in_the_whole_process_is_put_back(file: Path) -> None:
    file.write_text(_PROCESS_WIDE)
    before = _process_wide()
    load(f"{file}:Net")
    assert _process_wide() == before
    with pytest.raises(KeyboardInterrupt):  # the person at the keyboard; not an error of the module
        load(f"{file}:Net", inputs=["x:float32[rows,3]"])
    assert _process_wide() == before


def test_the_folder_is_on_the_path_while_the_users_functions_run(file: Path) -> None:
    path = list(sys.path)
    (file.parent / "models").mkdir()
    (file.parent / "models" / "__init__.py").write_text("")
    (file.parent / "models" / "parts.py").write_text("from torch import nn\nLinear = nn.Linear\n")
    (file.parent / "shapes_of_mine.py").write_text("rows = 'x:float32[rows,4]'\n")
    (file.parent / "sums_of_mine.py").write_text("def total(x):\n    return x.sum(-1)\n")
    file.write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        from models.parts import Linear\n"
        "        self.linear = Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        from sums_of_mine import total\n"
        "        return total(self.linear(x))\n"
        "def tx_inputs():\n"
        "    import shapes_of_mine\n"
        "    return [shapes_of_mine.rows]\n"
    )
    model = load(f"{file}:Net")
    assert sys.path == path
    [found] = model.module(torch.ones(3, 4))
    assert found.shape == (3,)


def test_no_notice_for_a_plain_module(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tx_export"):
        load(f"{file}:Fixed")
    assert not caplog.records
