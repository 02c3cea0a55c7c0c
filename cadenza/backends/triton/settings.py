"""What of Triton's settings decides under which key, and where, a compiled kernel is kept.

torch.compile changes them for the whole process when it first compiles a kernel: another cache, and
PyTorch's assembler instead of Triton's. Then neither another process nor an earlier run would have
put a kernel where it is looked for, and what was measured would not be what runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cadenza.backends import TRITON_LOADED

TOOLS = ("ptxas", "ptxas_blackwell", "libdevice_path")  # of Triton's settings for NVIDIA's devices


@contextmanager
def as_loaded() -> Iterator[None]:
    """Inside, Triton compiles as it would have when the package was loaded, and keeps it there."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = TRITON_LOADED["TRITON_CACHE_DIR"] or knobs.cache.get_triton_dir("cache")
        with _tools():
            yield


@contextmanager
def _tools() -> Iterator[None]:
    from triton import knobs
    from triton.backends.nvidia import compiler

    given = {n: v for n, v in TRITON_LOADED.items() if n != "TRITON_CACHE_DIR"}
    if given == {n: os.environ.get(n) for n in given} and not {*TOOLS} & vars(knobs.nvidia).keys():
        yield
        return
    remembered = [f for f in vars(compiler).values() if hasattr(f, "cache_clear")]
    try:
        with knobs.nvidia.scope():
            for name in TOOLS:
                delattr(knobs.nvidia, name)
            for name, value in given.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            for function in remembered:  # the version of another assembler
                function.cache_clear()
            yield
    finally:
        for function in remembered:
            function.cache_clear()


def loaded(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that compiles as `as_loaded` does."""
    found = {k: v for k, v in environment.items() if k not in TRITON_LOADED}
    return found | {k: v for k, v in TRITON_LOADED.items() if v is not None}
