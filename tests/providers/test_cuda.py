"""The CUDA provider; its settings, which need no GPU."""

from __future__ import annotations

import json

from tx_export import plugins
from tx_export.providers.cpu import Cpu
from tx_export.providers.cuda import Cuda


def test_it_is_found_by_the_name_of_its_file() -> None:
    assert plugins.find("provider", "cuda") is Cuda
    assert (Cuda.onnxruntime_name, Cuda.package) == ("CUDAExecutionProvider", "onnxruntime-gpu")


def test_its_settings_have_the_keys_of_every_provider_and_survive_the_manifest() -> None:
    settings = Cuda().session()
    assert json.loads(json.dumps(settings)) == settings and set(settings) == set(Cpu().session())
