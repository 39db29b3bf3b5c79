"""Compiling and loading kernels: the cache folder, and the reasons why there are no kernels."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cli_helpers import call, here, succeeded, write

from fedblend._kernels import build

pytestmark = pytest.mark.filterwarnings("ignore:training is slower than possible")
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")

SUM = """
#include <cstdint>
extern "C" int sum(int64_t n, float factor, const float* x, double* y) {
    for (int64_t i = 0; i < n; i++) *y += factor * x[i];
    return x == nullptr;
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source file that compiles fast."""
    path = tmp_path / "source" / "sum.cpp"
    path.parent.mkdir()
    path.write_text(SUM)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder; nothing is loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.MARCH, raising=False)
    monkeypatch.setattr(build, "_reasons", [])
    build._load.cache_clear()
    build._announce.cache_clear()
    build.function.cache_clear()
    yield tmp_path / "cache" / "fedblend"
    build._load.cache_clear()
    build.function.cache_clear()


@needs_compiler
def test_a_library_is_compiled_once_into_a_folder_of_its_owner(source: Path, cache: Path) -> None:
    assert isinstance(build.library(source), ctypes.CDLL)
    (compiled,) = cache.iterdir()
    before = compiled.stat().st_mtime_ns
    build._load.cache_clear()
    assert build.missing(source) == build.all_missing() == ""
    assert compiled.stat().st_mtime_ns == before
    assert cache.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_compiling_is_announced_once(source: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = source.with_name("other.cpp")
    other.write_text(SUM + "// of another kind")

    assert build.library(source) is not None
    assert build.library(other) is not None
    line = capsys.readouterr().err
    assert "compiles the C++ kernels into" in line
    assert line.count("\n") == 1

    build._load.cache_clear()
    build._announce.cache_clear()
    assert build.library(source) is not None
    assert capsys.readouterr().err == ""


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an instruction set of x86")
def test_each_instruction_set_has_a_library_of_its_own(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.library(source) is not None
    monkeypatch.setenv(build.MARCH, "x86-64")
    build._load.cache_clear()
    assert build.library(source) is not None
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_a_function_takes_numbers_tensors_and_null_pointers(source: Path) -> None:
    total = torch.ones((), dtype=torch.float64)
    function = build.function(source, "sum", "qfPP")
    assert function(3, 0.5, torch.tensor([1.0, 2.0, 4.0]), total) == 0
    assert float(total) == 4.5
    assert function(0, 0.5, None, total) == 1


@needs_compiler
def test_ctrl_c_while_arguments_are_converted_is_ctrl_c(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes makes an error of the argument of it, with which a run counted as failed."""

    def interrupted(tensor: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build.Pointer, "from_param", interrupted)
    function = build.function(source, "sum", "qfPP")

    with pytest.raises(KeyboardInterrupt):
        function(3, 1.0, torch.ones(3), None)
    with pytest.raises(ctypes.ArgumentError):
        function("three", 1.0, None, None)


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files")
def test_a_library_of_another_user_is_not_loaded(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library(source) is not None
    build._load.cache_clear()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)

    assert build.library(source) is None
    (compiled,) = cache.iterdir()
    assert build.missing(source).startswith(f"{compiled} is owned by another user, {owner} ")


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files")
def test_the_library_that_is_loaded_is_the_one_that_was_checked(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(b"the library of an attacker")
    fstat = os.fstat

    def swapped_after_check(number: int) -> os.stat_result:
        found = fstat(number)
        for compiled in cache.glob("*.so"):
            if other.exists() and compiled.stat().st_ino == found.st_ino:
                os.replace(other, compiled)
        return found

    monkeypatch.setattr(os, "fstat", swapped_after_check)
    assert build.library(source) is not None
    assert not other.exists()


def test_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="kernels are not used: no C.. compiler was found") as warned:
        found = [build.library(source), build.library(source.with_name("other.cpp"))]
    assert found == [None, None]
    assert len(warned) == 1
    assert build.missing(source).startswith("no C++ compiler was found")
    assert build.all_missing() == build.missing(source)


@pytest.mark.slow
def test_a_command_says_once_why_it_uses_no_kernels_and_each_run_keeps_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two runs at once, and each of them on two ranks: four processes ask for kernels.
    convolutions = {"name": "cnn", "channels": [2, 2]}
    changes = {"seeds": [0, 1], "rounds": 1, "ranks": 2, "engine": "stacked", "model": convolutions}
    file = write(tmp_path / "file.toml", changes)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    outcome = succeeded(call("run", file, "--jobs", 2, "--out", tmp_path / "out"))

    assert outcome.err.count("kernels are not used: no C++ compiler was found") == 1, outcome.err
    for seed in (0, 1):
        facts = json.loads((tmp_path / "out" / f"fedavg-seed{seed}" / "facts.json").read_text(encoding="utf-8"))
        assert facts["kernels"].startswith("not used: no C++ compiler was found")
    assert "not used: no C++ compiler was found" in succeeded(here("inspect", tmp_path / "out")).out


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def read_only(*_: object, **__: object) -> None:
    """A folder that cannot be made: not by its mode, since root may write to every folder."""
    raise OSError(30, "Read-only file system")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (lambda patch, at: patch.setenv("CXX", f"{at}/absent"), "the C++ compiler '{at}/absent' cannot be run"),
        (
            lambda patch, at: patch.setattr(build, "CPUINFO", at / "cpuinfo"),
            "{at}/cpuinfo, which identifies the processor, cannot be read",
        ),
        (
            lambda patch, at: (patch.delenv("XDG_CACHE_HOME"), patch.setattr(Path, "home", no_home)),
            "the home directory is unknown",
        ),
        (
            lambda patch, at: (at / "cache").write_text("a file"),
            "kernels cannot be stored in or loaded from {at}/cache/fedblend (",
        ),
        (lambda patch, at: patch.setattr(Path, "mkdir", read_only), "kernels cannot be stored in or loaded from {at}/"),
    ],
    ids=["compiler", "processor", "home", "a file as the cache", "a cache that cannot be written to"],
)
def test_each_reason_for_no_kernels_names_what_is_missing(
    changes: Callable[[pytest.MonkeyPatch, Path], object],
    reason: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "g++")
    changes(monkeypatch, tmp_path)
    assert build.library(source) is None
    assert build.missing(source).startswith(reason.format(at=tmp_path))


@needs_compiler
def test_a_source_that_does_not_compile(source: Path) -> None:
    source.write_text("no C++")
    assert build.library(source) is None
    assert "failed with exit code 1" in build.missing(source)
