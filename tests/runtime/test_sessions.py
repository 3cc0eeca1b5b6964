"""Providers, versions, threads, memory: what the session is asked for and what it costs to keep it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from tx_export import runtime
from tx_export.providers.cuda import Cuda
from tx_export.runtime import ArtifactError, Model, ProviderError, TxExportError, UsageError, available_threads

from .artifact import edit_manifest, make_artifact, seal


def test_the_first_provider_of_the_manifest_is_the_default(tmp_path: Path) -> None:
    model = Model(make_artifact(tmp_path / "a"))
    assert model.provider == "cpu" and model.threads == available_threads()


def test_a_provider_that_the_artifact_lacks_is_an_error_that_lists_both_sides(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=r"provider cuda: .* settings for cpu only; .*CPUExecutionProvider"):
        Model(make_artifact(tmp_path / "a"), provider="cuda")


def test_b175_a_provider_that_onnxruntime_lacks_is_an_error_that_lists_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_artifact(tmp_path / "a", session={"cuda": Cuda().session()})
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ProviderError, match=r"provider cuda: CUDAExecutionProvider isn't available; .*CPUExecutionPr"):
        Model(folder)


def test_b175_a_session_that_fell_back_to_another_provider_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stand-ins: a runtime that lists CUDA, can't load its library, and goes on with the CPU.
    class FallenBack(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, path: str, options: Any, providers: Any, **others: Any) -> None:
            super().__init__(path, options, providers=["CPUExecutionProvider"])

    folder = make_artifact(tmp_path / "a", session={"cuda": Cuda().session()})
    monkeypatch.setattr(onnxruntime, "InferenceSession", FallenBack)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    with pytest.raises(ProviderError, match="asked for CUDAExecutionProvider, but the session runs on CPUExecutionPr"):
        Model(folder)


def test_b184_an_onnxruntime_that_is_too_old_is_told_apart_before_a_session_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_artifact(tmp_path / "a", min_onnxruntime="99.0")
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    found = onnxruntime.__version__
    with pytest.raises(TxExportError, match=rf"onnxruntime is too old: needs >= 99\.0, found {found}"):
        Model(folder)


@pytest.mark.parametrize(("least", "found", "fine"), [("1.9", "1.14.0", True), ("1.14.1", "1.14", False)])
def test_versions_are_compared_as_numbers(
    least: str, found: str, fine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", found)
    assert (runtime._version(least) <= runtime._version(found)) is fine


def test_a_missing_package_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_artifact(tmp_path / "a")
    for package in ("tokenizers", "onnxruntime"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            with pytest.raises(TxExportError, match=rf"{package} can't be imported .*pip install -r requirements\.txt"):
                Model(folder)


def test_a_graph_that_onnxruntime_can_not_load_is_named(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    info = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("NoSuchOperator", [], ["y"])], "g", [], [info])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), folder / "model.onnx")
    with pytest.raises(ArtifactError, match=r"model\.onnx: onnxruntime [0-9.]+ can't load it .* cpu: .*NoSuchOp"):
        Model(seal(folder))


def test_a_run_that_fails_in_onnxruntime_is_an_error_with_the_shapes(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    edit_manifest(folder, lambda m: m | {"inputs": [item | {"range": None} for item in m["inputs"]]})
    with pytest.raises(TxExportError, match=r"onnxruntime failed on input_ids \[1, 1\], .*Gather"):
        Model(folder, threads=1).run_arrays({"input_ids": [[99]]})


def test_the_settings_of_the_manifest_reach_the_session(tmp_path: Path) -> None:
    session = Model(make_artifact(tmp_path / "a"), threads=3)._sessions.by_name(3)["model"]
    options = session.get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == "1"
    assert options.intra_op_num_threads == 3 and not options.enable_mem_pattern and options.enable_cpu_mem_arena


def test_threads_are_at_least_one() -> None:
    with pytest.raises(UsageError, match="threads: 0 is not at least 1"):
        Model("nowhere", threads=0)


@pytest.mark.parametrize("count", [1, 2])
def test_b190_threads_follow_the_affinity_and_stderr_stays_empty(tmp_path: Path, count: int) -> None:
    folder, cpus = make_artifact(tmp_path / "a"), sorted(os.sched_getaffinity(0))[:count]
    code = f"""
import os, sys
sys.path.insert(0, {str(folder)!r})
sys.dont_write_bytecode = True
os.sched_setaffinity(0, {cpus})
import run
model = run.Model(sys.path[0])
model(["good"] * 3)
print(model.threads)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (str(len(cpus)), "")


@pytest.mark.parametrize(
    ("files", "quotas"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, [1.5]),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, []),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, [0.5]),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "400000 100000"}, [4.0]),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, [2.0]),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, []),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n1:name=systemd:/y\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
            },
            [3.0],
        ),
        ({"proc/self/cgroup": "nonsense"}, []),
        ({}, []),
    ],
)
def test_b190_cgroup_quotas_of_both_versions_are_read(
    tmp_path: Path, files: dict[str, str], quotas: list[float]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(runtime._cgroup_quotas(tmp_path)) == quotas


def test_b190_threads_are_the_quota_rounded_up_but_no_more_than_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for quotas, expected in (([1.5], 2), ([0.2], 1), ([], 8), ([16.0], 8), ([6.0, 3.0], 3)):
        monkeypatch.setattr(runtime, "_cgroup_quotas", lambda root, found=quotas: iter(found))
        assert available_threads() == expected


@pytest.mark.parametrize(
    ("flags", "done", "said"),
    [
        ("sse2 avx2", 3, True),
        ("avx2 avx_vnni", 3, False),
        ("avx512f avx512_vnni", 3, False),
        ("sse2 avx2", 0, False),
        ("", 3, False),  # no x86, or unknown
    ],
)
def test_b112_int8_on_an_x86_cpu_without_vnni_is_announced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    done: int,
    said: bool,
) -> None:
    monkeypatch.setattr(runtime, "_cpu_fields", lambda: {"flags": flags})
    Model(make_artifact(tmp_path / "a", quantized={"done": done, "of": 3}), threads=1)
    error = capsys.readouterr().err
    assert error == "" if not said else error.startswith("notice: this CPU has no VNNI: int8 products run in an exact")
    assert not said or "verified on avx2" in error


def test_the_cpu_is_named() -> None:
    assert runtime.cpu_name()


# A graph whose scores [batch, tokens, tokens] and features need memory that the tiny artifact doesn't.
_WATCHED = """
import os, sys, time
import numpy as np
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import run
model = run.Model(sys.argv[1], threads=2)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def feed(batch, tokens):
    model.run_arrays({"input_ids": np.ones((batch, tokens), int)})
"""


def watch(tmp_path: Path, code: str) -> list[float]:
    """The numbers that a process of its own prints."""
    dims = {"dims": ["batch", "tokens<=512"]}
    given = [{"name": "input_ids", "dtype": "int64"} | dims]
    made = [{"name": "y", "dtype": "float32", "dims": ["batch", 256]}]
    folder = make_artifact(tmp_path / "a", text=None, inputs=given, outputs=made)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"]),
        helper.make_node("Transpose", ["x"], ["k"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "k"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"]),
        helper.make_node("MatMul", ["weights", "x"], ["mixed"]),
        helper.make_node("ReduceMean", ["mixed", "axis"], ["y"], keepdims=0),
    ]
    table = np.random.default_rng(0).normal(size=(10, 256)).astype(np.float32)
    weights = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array([1]), "axis")]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 256])]
    graph = helper.make_graph(nodes, "watched", inputs, outputs, weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), folder / "model.onnx")
    command = [sys.executable, "-c", _WATCHED + code, str(seal(folder))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


def test_memory_comes_back_after_a_batch_of_the_largest_size(tmp_path: Path) -> None:
    code = """
for _ in range(20): feed(1, 16)
print(resident())
feed(16, 512)
print(resident())
for _ in range(20): feed(1, 16)
print(resident())
for _ in range(3): feed(16, 512)
feed(1, 16)
print(resident())
"""
    short, after, later, behind_many = watch(tmp_path, code)
    assert max(after, later, behind_many) <= 1.3 * short


def test_memory_is_given_back_once_and_not_between_large_runs(tmp_path: Path) -> None:
    sessions = Model(make_artifact(tmp_path / "a"), threads=1)._sessions
    sizes = [False, True, False, True, True, True, False, False]
    given = [sessions._gives_back(1, is_large) for is_large in sizes]
    assert given == [False, True, False, True, False, False, True, False]


def test_the_session_of_the_workers_is_opened_when_it_pays_and_closed_when_it_does_not(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    edit_manifest(folder, lambda m: m | {"session": {"cpu": m["session"]["cpu"] | {"batch_tokens": 3}}})
    model = Model(folder, threads=2)
    opened = model._sessions._by_threads
    for texts, threads in ((31, {2}), (32, {1, 2}), (4, {1, 2}), (3, {2}), (31, {2}), (33, {1, 2})):
        model(["good"] * texts)  # three tokens each, so a batch each
        assert set(opened) == threads
    model.run_arrays({"input_ids": [[2]]})
    assert set(opened) == {2}
    single = Model(folder, threads=1)
    single(["good"] * 50)
    assert set(single._sessions._by_threads) == {1}


def test_b192_memory_does_not_grow_with_the_variety_of_shapes(tmp_path: Path) -> None:
    code = """
random = np.random.default_rng(0)
for count in range(1, 501):
    feed(int(random.integers(1, 9)), int(random.integers(1, 129)))
    if count in (100, 500): print(resident())
"""
    hundred, all_of_them = watch(tmp_path, code)
    assert all_of_them <= 1.3 * hundred


def test_b191_an_idle_model_leaves_the_cpu_alone(tmp_path: Path) -> None:
    code = """
feed(2, 256)
before = time.process_time()
time.sleep(2)
print(time.process_time() - before)
"""
    [spent] = watch(tmp_path, code)
    assert spent <= 0.2  # seconds of CPU in 2 s; threads that spin would spend 2


def test_b194_one_session_gives_the_same_bits_each_time(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    one, other = Model(folder, threads=2), Model(folder, threads=2)
    feeds = {"input_ids": np.random.default_rng(0).integers(0, 15, (4, 16))}
    found = [model.run_arrays(feeds)["logits"] for model in (one, other) for _ in range(10)]
    assert all(np.array_equal(array, found[0]) for array in found)
