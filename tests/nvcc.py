"""CUDA sources compiled for a GPU by nvcc: no GPU is needed, only the compiler."""

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
HOPPER = "sm_90a"


def _disassembler() -> str | None:
    """cuobjdump on the PATH, or the one that Triton brings."""
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if found or triton is None or triton.origin is None:
        return found
    brought = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return str(brought) if brought.is_file() else None


NEEDS_DISASSEMBLER = pytest.mark.skipif(
    shutil.which("nvcc") is None or _disassembler() is None, reason="no nvcc, or no cuobjdump"
)


def compile_cubin(source: Path, macros: Mapping[str, object], arch: str = HOPPER) -> None:
    """Compile a source to machine code.

    Raises:
        AssertionError: the compiler rejects it; the message is what the compiler says.
    """
    _compile("-cubin", source, macros, arch)


def ptxas_report(source: Path, macros: Mapping[str, object], arch: str = HOPPER) -> str:
    """What the assembler says of registers, spills and shared memory of a source's kernels.

    Raises:
        AssertionError: as `compile_cubin`.
    """
    _, report = _compile("-cubin", source, macros, arch, "-Xptxas", "-v")
    return report


def ptx(source: Path, macros: Mapping[str, object], arch: str = HOPPER) -> str:
    """The PTX of a source.

    Raises:
        AssertionError: as `compile_cubin`.
    """
    compiled, _ = _compile("-ptx", source, macros, arch)
    return compiled.decode()


def sass(source: Path, macros: Mapping[str, object], arch: str = HOPPER) -> str:
    """The machine code of a source, disassembled.

    Raises:
        AssertionError: as `compile_cubin`.
    """
    cubin, _ = _compile("-cubin", source, macros, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_disassembler(), "-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _compile(output: str, source: Path, macros: Mapping[str, object], arch: str, *flags: str) -> tuple[bytes, str]:
    """What nvcc writes and what it says."""
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder, "compiled")
        command = ["nvcc", output, f"-arch={arch}", "-std=c++17", *flags, *defines, "-o", str(compiled), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return compiled.read_bytes(), done.stderr
