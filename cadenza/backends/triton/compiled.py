"""Compiles a launch's kernel for a target, without a GPU, and reads what the binary takes.

NVIDIA's registers come from the binary itself, by the `cuobjdump` that Triton brings. Where it says
that a thread has memory of its own, `ptxas` says how much of that is spilled: some targets have a
few bytes for other ends. AMD's figures are the metadata of the assembly.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cadenza.backends.triton.target import Target

# What the metadata of AMD's assembly says of a kernel.
AMD = (
    "vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size",
    "group_segment_fixed_size",
)  # fmt: skip


class CompilationError(Exception):
    """A kernel can't be compiled for a target, or its binary can't be read; the text says why."""


class Compilable(Protocol):
    """What is compiled: a function of Triton's and what its parameters are."""

    @property
    def function(self) -> Any:
        """The function."""

    def signature(self, descriptors: bool = False) -> Mapping[str, str]:
        """Triton's types of the parameters that are no constants."""

    def constants(self, descriptors: bool = False) -> Mapping[str, Any]:
        """The values of those that are."""

    def options(self) -> Mapping[str, Any]:
        """Warps, stages and what else the compiler is told."""


class Report(NamedTuple):
    """What a compiled kernel takes: registers and spilled bytes a thread, shared bytes a program.

    AMD's `registers` are vector registers, those of accumulators among them.
    """

    registers: int
    spilled: int
    shared: int

    def faults(self, target: Target) -> list[str]:
        """What is wrong with it on a target: a line each."""
        found = []
        if self.spilled:
            found.append(f"{self.spilled} bytes a thread spilled at {self.registers} registers")
        if self.shared > target.shared:
            found.append(f"{self.shared} bytes of shared memory, at most {target.shared}")
        return found


def report(kernel: Compilable, target: Target) -> Report:
    """What the kernel takes when compiled for a target; CompilationError if it can't be."""
    return report_of(compile_for(kernel, target), target)


def report_of(compiled: Any, target: Target) -> Report:
    """What Triton's compiled kernel takes; CompilationError if its binary can't be read."""
    if target.backend == "hip":
        return _of_amd(compiled.asm["amdgcn"], int(compiled.metadata.shared))
    return _of_nvidia(compiled, target)


def compile_for(kernel: Compilable, target: Target) -> Any:
    """Triton's compiled kernel; CompilationError, with the compiler's words, if there is none.

    Pointers and strides count as divisible by 16 bytes, as those of large tensors are; where the
    target has descriptors, they are used.
    """
    if not target.backend:
        raise CompilationError("the interpreter compiles nothing: name a target such as sm_90")
    function = kernel.function
    if not hasattr(function, "cache_key"):
        raise CompilationError(
            "Triton is set to interpret kernels: unset TRITON_INTERPRET to compile them"
        )
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(function, kernel.signature(target.tma), kernel.constants(target.tma))
    place = GPUTarget(target.backend, target.arch, target.warp)
    try:
        return triton.compile(source, target=place, options=dict(kernel.options()))
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        text = f"Triton {triton.__version__} compiles no kernel for {target.name}: {words[-1]}"
        raise CompilationError(text) from error


def _source(function: Any, types: Mapping[str, str], constants: Mapping[str, Any]) -> Any:
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = function.arg_names
    missing = [n for n in names if n not in types and n not in constants]
    if missing:
        raise CompilationError(f"no type and no value of parameters {', '.join(missing)}")
    signature = {n: types.get(n, "constexpr") for n in names}
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (names.index(n),): divisible
        for n, text in types.items()
        if text.startswith("*") or n.endswith("_stride")
    }
    values = {(names.index(n),): value for n, value in constants.items()}
    kind = GluonASTSource if function.is_gluon() else ASTSource
    return kind(function, signature, constexprs=values, attrs=attributes)


# --- reading --------------------------------------------------------------------------------------


def _of_nvidia(compiled: Any, target: Target) -> Report:
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    dump = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage"]
    text = _said(dump, compiled.asm["cubin"], ".cubin")
    registers, stack, fixed = _numbers(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    shared = max(int(compiled.metadata.shared), fixed)
    if stack == 0:
        return Report(registers, 0, shared)
    fused = [] if compiled.metadata.enable_fp_fusion else ["--fmad=false"]
    name = f"--gpu-name={target.name}{'a' if int(target.arch) >= 90 else ''}"
    assembler = [get_ptxas(int(target.arch)).path, "-v", name, *fused, "-o", os.devnull]
    text = _said(assembler, compiled.asm["ptx"].encode(), ".ptx")
    stored, loaded = _numbers(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    return Report(registers, max(stored, loaded), shared)


def _said(command: Sequence[str], content: bytes, suffix: str) -> str:
    """What one of the tools that Triton brings says of a file."""
    handle, path = tempfile.mkstemp(suffix=suffix)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompilationError(f"{command[0]} can't be run: {error}") from error
    finally:
        os.unlink(path)
    if done.returncode:
        raise CompilationError(f"{command[0]} fails: {(done.stderr or done.stdout).strip()}")
    return done.stdout + done.stderr


def _numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    if found is None:
        raise CompilationError(f"nothing like {pattern!r} in {text.strip()!r}")
    return [int(digits) for digits in found.groups()]


def _of_amd(text: str, shared: int) -> Report:
    numbers = {key: _numbers(rf"\.{key}:\s+(\d+)", text)[0] for key in AMD}
    spilled = 4 * (numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"])
    spilled = max(spilled, numbers["private_segment_fixed_size"])
    fixed = numbers["group_segment_fixed_size"]
    return Report(numbers["vgpr_count"], spilled, max(shared, fixed))
