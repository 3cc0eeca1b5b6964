"""Memory over many generations, in a process of its own that knows numpy and onnxruntime only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tx_export import runtime_generate

from .generators import tiny

_PROGRAM = """
import importlib.util, json, sys
import numpy, onnxruntime, psutil

spec = importlib.util.spec_from_file_location("generate", sys.argv[1])
generate = sys.modules["generate"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[2], options)
generator = generate.Generator({"model": session}, json.loads(sys.argv[3]))
random = numpy.random.default_rng(0)
resident = []
for count in range(1100):
    if count == 100:
        resident.append(psutil.Process().memory_info().rss)
    rows = [random.integers(3, 300, size).tolist() for size in random.integers(1, 30, 1 + count % 3)]
    beams, temperature = ((1, 0.0), (1, 1.0), (2, 0.0))[count % 5 % 3]
    generator.generate(rows, generate.Options(max_new_tokens=4, beams=beams, temperature=temperature, seed=count))
resident.append(psutil.Process().memory_info().rss)
print(json.dumps(resident))
"""


def test_a_thousand_generations_grow_the_process_by_less_than_2_percent(tmp_path: Path) -> None:
    model = tiny("llama")
    (tmp_path / "model.onnx").write_bytes(model.graphs["model"])
    given = [runtime_generate.__file__, str(tmp_path / "model.onnx"), json.dumps(dict(model.generation))]
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *given], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert after < 1.02 * before
