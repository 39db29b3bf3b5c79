"""Tensors of a GPU never meet tensors of the CPU: on a GPU, and on a second device that the processor emulates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="links against PyTorch as on Linux")
def test_all_methods_train_on_another_device_as_on_the_cpu(tmp_path: Path) -> None:
    from torch.utils import cpp_extension  # it imports setuptools

    library = tmp_path / "second_device.so"
    headers = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = ("-O0", "-std=c++17", "-fPIC", "-shared", abi, *headers)
    names = (str(HERE / "second_device.cpp"), "-o", str(library))
    subprocess.run([str(COMPILER), *flags, *names, *libraries, "-ltorch_cpu", "-lc10"], check=True)

    assert_as_on_the_cpu(str(library), "second")


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="trains on a GPU")
def test_all_methods_train_on_a_gpu_as_on_the_cpu() -> None:
    assert_as_on_the_cpu("cuda", "cuda")


def assert_as_on_the_cpu(library: str, device: str) -> None:
    """Run ``second_device.py`` and assert that it found no difference."""
    command = [sys.executable, str(HERE / "second_device.py"), library]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)

    found = json.loads(done.stdout.splitlines()[-1])
    assert found["checks"], "an operation on tensors of two devices is no error, so that nothing was tested"
    assert found["faults"] == {}
    assert "1 stacked" in found["plan"], "the engine is chosen by timing on the device"
    assert set(found["sums"].values()) == {device}, "uploads are on the device as a whole, also what is not trained"
    assert found["points"] == [device], "AggEnhance moves its points on the device"
