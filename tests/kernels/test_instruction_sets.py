"""The kernels compiled for several instruction sets, each checked by a C++ program of its own (check.cpp)."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from fedblend._kernels import build

KERNELS = [build.SOURCE.with_name(name) for name in ("kernels.cpp", "winograd.cpp")]
SOURCES = [Path(__file__).with_name("check.cpp"), *KERNELS]

X86 = {"x86-64": "sse2", "x86-64-v3": "avx2", "skylake-avx512": "avx512f"}
"""By instruction set: the processor's feature without which its program is compiled, but not run."""


def compiled(folder: Path, compiler: str, *flags: str) -> Path:
    """The program that checks the kernels."""
    program = folder / "check"
    flags = (*(flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC")), "-Wall", "-Werror", *flags)
    subprocess.run([compiler, *flags, "-o", str(program), *map(str, SOURCES)], check=True)
    return program


def assert_exact(*command: str | Path) -> None:
    """Assert that the program finds no error larger than float32's own."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="no x86 processor, or no g++")
@pytest.mark.parametrize("name", X86)
def test_kernels_for_x86(name: str, tmp_path: Path) -> None:
    program = compiled(tmp_path, "g++", f"-march={name}")
    if X86[name] not in build.CPUINFO.read_text().split():
        pytest.skip(f"compiled, but not run: this processor has no {X86[name]}")
    assert_exact(program)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="no g++-aarch64-linux-gnu")
def test_kernels_for_arm(tmp_path: Path) -> None:
    program = compiled(tmp_path, "aarch64-linux-gnu-g++", "-static")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("compiled, but not run: no qemu-user")
    assert_exact(emulator, program)
