"""Compiles a launch's kernel for a target, without a GPU, and reads what the binary takes.

NVIDIA's figures come from the binary itself, by the `cuobjdump` that Triton brings; AMD's from the
metadata of the assembly. A kernel counts as spilling when a thread has memory of its own: emitted
kernels have no other use for it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from cadenza.backends.triton.target import Target


class CompilationError(Exception):
    """A kernel can't be compiled for a target, or its binary can't be read; the text says why."""


class Compilable(Protocol):
    """What is compiled: a function of Triton's and what its parameters are."""

    @property
    def function(self) -> Any:
        """The function."""

    def signature(self) -> Mapping[str, str]:
        """Triton's types of the parameters that are no constants."""

    def constants(self) -> Mapping[str, Any]:
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
    compiled = compile_for(kernel, target)
    read = _of_amd if target.backend == "hip" else _of_nvidia
    return read(compiled.asm, int(compiled.metadata.shared))


def compile_for(kernel: Compilable, target: Target) -> Any:
    """Triton's compiled kernel; CompilationError, with the compiler's words, if there is none.

    Pointers and strides count as divisible by 16 bytes, as those of large tensors are.
    """
    if not target.backend:
        raise CompilationError("the interpreter compiles nothing: name a target such as sm_90")
    function = kernel.function
    if not hasattr(function, "cache_key"):
        raise CompilationError(
            "Triton is set to interpret kernels: unset TRITON_INTERPRET to compile them"
        )
    import triton  # noqa: PLC0415  loaded where a kernel is compiled, not where a plan is made
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415  the same

    source = _source(function, kernel)
    place = GPUTarget(target.backend, target.arch, target.warp)
    try:
        return triton.compile(source, target=place, options=dict(kernel.options()))
    except Exception as error:  # noqa: BLE001  Triton raises whatever a pass of its raises
        words = str(error).strip().splitlines() or [type(error).__name__]
        text = f"Triton {triton.__version__} compiles no kernel for {target.name}: {words[-1]}"
        raise CompilationError(text) from error


def _source(function: Any, kernel: Compilable) -> Any:
    from triton.compiler import ASTSource  # noqa: PLC0415  see compile_for

    names, types, constants = function.arg_names, kernel.signature(), kernel.constants()
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
    return ASTSource(function, signature, constexprs=values, attrs=attributes)


# --- reading --------------------------------------------------------------------------------------


def _of_nvidia(assembly: Mapping[str, Any], shared: int) -> Report:
    text = _resources(assembly["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        raise CompilationError(f"cuobjdump says nothing of registers: {text.strip()!r}")
    registers, stack, fixed, local = map(int, found.groups())
    return Report(registers, stack + local, max(shared, fixed))


def _resources(binary: bytes) -> str:
    from triton import knobs  # noqa: PLC0415  see compile_for

    handle, path = tempfile.mkstemp(suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except (OSError, RuntimeError) as error:
        raise CompilationError(f"Triton's cuobjdump can't be run: {error}") from error
    finally:
        os.unlink(path)
    if done.returncode:
        raise CompilationError(f"cuobjdump fails: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _of_amd(assembly: Mapping[str, Any], shared: int) -> Report:
    text = assembly["amdgcn"]
    spilled = 4 * (_number(text, "vgpr_spill_count") + _number(text, "sgpr_spill_count"))
    private = _number(text, "private_segment_fixed_size")
    fixed = _number(text, "group_segment_fixed_size")
    return Report(_number(text, "vgpr_count"), max(spilled, private), max(shared, fixed))


def _number(assembly: str, key: str) -> int:
    """A number of the metadata of AMD's assembly."""
    found = re.search(rf"^\s*\.{key}:\s+(\d+)", assembly, re.MULTILINE)
    if found is None:
        raise CompilationError(f"the assembly says nothing of {key}")
    return int(found[1])
