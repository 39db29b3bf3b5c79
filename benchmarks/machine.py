"""The machine that is measured: its facts, and the limit to an instruction set, so that it stands in for older ones.

PyTorch, oneDNN, MKL and fedblend's kernels have switches for the limit. All contestants get the same ones: the
processes of a measurement inherit this one's environment.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from contestants import ROOT

CPUINFO = Path("/proc/cpuinfo")


def _switches(pytorch: str, onednn: str, mkl: str, march: str) -> dict[str, str]:
    return {
        "ATEN_CPU_CAPABILITY": pytorch,
        "ONEDNN_MAX_CPU_ISA": onednn,
        # The same under its name before 2021.
        "DNNL_MAX_CPU_ISA": onednn,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
        "FEDBLEND_MARCH": march,
    }


SWITCHES = {
    "default": _switches("default", "SSE41", "SSE4_2", "x86-64"),
    "avx2": _switches("avx2", "AVX2", "AVX2", "haswell"),
    "avx512": _switches("avx512", "AVX512_CORE", "AVX512", "skylake-avx512"),
}
"""Environment variables by instruction set. ``default`` is PyTorch's name for the oldest that its code is built for."""

NEEDS = {"default": "sse4_1", "avx2": "avx2", "avx512": "avx512bw"}
"""The processor's feature, as Linux names it, without which an instruction set cannot be asked for."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--isa`` to a command line."""
    told = "the instruction set that all contestants are limited to (default: all that the processor has)"
    parser.add_argument("--isa", choices=sorted(SWITCHES), help=told)


def limit(isa: str | None) -> None:
    """Start this program again with an instruction set's switches, unless it has them: libraries read them once."""
    if isa is None or limited_to() == isa:
        return
    if not has(isa, CPUINFO.read_text()):
        raise SystemExit(f"--isa {isa}: this processor has no {NEEDS[isa]}")
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **SWITCHES[isa]})


def has(isa: str, cpuinfo: str) -> bool:
    """Whether the processor that ``cpuinfo`` describes has an instruction set.

    >>> has("avx2", "flags : fpu avx avx2"), has("avx512", "flags : fpu avx avx2")
    (True, False)
    """
    return NEEDS[isa] in cpuinfo.split()


def limited_to() -> str:
    """The instruction set whose switches this process has; empty for none."""
    return next((isa for isa, switches in SWITCHES.items() if switches.items() <= os.environ.items()), "")


def when_and_where() -> dict[str, Any]:
    """The date, the code and the machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": {
            "processor": processor(),
            "instructions": capability(),
            "limited_to": limited_to(),
            "real_time": is_real_time(),
            "cores": os.cpu_count(),
            "system": platform.system(),
        },
    }


def is_real_time() -> bool:
    """Whether this process, and those that it starts, have real-time priority (chrt); others get what they leave."""
    return hasattr(os, "SCHED_RR") and os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)


def kind() -> str:
    """The processor's name and PyTorch's instruction set for it, as part of a file's name."""
    return "-".join(re.findall(r"[a-z0-9]+", re.sub(r"\(\w+\)", "", f"{processor()} {capability()}").lower()))


def capability() -> str:
    """The instruction set that PyTorch uses, such as AVX2."""
    return torch.backends.cpu.get_cpu_capability()


def commit() -> str:
    """The code's commit, with a plus where files differ from it; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def processor() -> str:
    """The processor's name."""
    return name_of(CPUINFO.read_text()) if CPUINFO.exists() else platform.machine()


def name_of(cpuinfo: str) -> str:
    """The name of the processor that ``cpuinfo`` describes; a generation is added where a virtual machine hides it.

    >>> name_of("cpu family : 26\\nmodel : 2\\nmodel name : AMD EPYC")
    'AMD EPYC Zen 5'
    """
    of = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    name = of.get("model name", "")
    if name == "AMD EPYC" and (zen := _zen(int(of["cpu family"]), int(of["model"]))):
        name += f" Zen {zen}"
    return name or platform.machine()


def _zen(family: int, model: int) -> int | None:
    """The generation of an EPYC processor by its numbers."""
    if family == 25:
        return 3 if model < 0x10 else 4
    return {23: 1 if model < 0x30 else 2, 26: 5}.get(family)
