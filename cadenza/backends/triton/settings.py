"""What of Triton's settings decides under which key, and where, a compiled kernel is kept.

torch.compile may change them for the whole process when it first compiles a kernel: it names
another cache, and PyTorch's assembler instead of Triton's in builds that carry one. Then neither
another process nor an earlier run would have put a kernel where it is looked for, and what was
measured would not be what runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

import torch

from cadenza.backends import TRITON_LOADED

CACHE, ASSEMBLER = "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"
_one_thread = RLock()  # the settings are the process's


@contextmanager
def as_loaded() -> Iterator[None]:
    """Inside, Triton compiles as it would have without torch.compile, and keeps kernels there."""
    from triton import knobs

    with _one_thread, knobs.cache.scope():
        knobs.cache.dir = TRITON_LOADED[CACHE] or knobs.cache.get_triton_dir("cache")
        with _own_assembler():
            yield


@contextmanager
def _own_assembler() -> Iterator[None]:
    if not _is_torchs(os.environ.get(ASSEMBLER)):
        yield
        return
    from triton import knobs
    from triton.backends.nvidia import compiler

    remembered = [f for f in vars(compiler).values() if hasattr(f, "cache_clear")]
    try:
        with knobs.nvidia.scope():
            _put(os.environ, ASSEMBLER)
            for function in remembered:  # the version of another assembler
                function.cache_clear()
            yield
    finally:
        for function in remembered:
            function.cache_clear()


def _is_torchs(assembler: str | None) -> bool:
    """Whether torch.compile has named this assembler, and nobody before."""
    if assembler is None or assembler == TRITON_LOADED[ASSEMBLER]:
        return False
    return Path(torch.__file__).parent in Path(assembler).parents


def _put(environment: dict[str, str] | os._Environ[str], name: str) -> None:
    value = TRITON_LOADED[name]
    environment.pop(name, None)
    if value is not None:
        environment[name] = value


def loaded(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that compiles as `as_loaded` does."""
    found = dict(environment)
    _put(found, CACHE)
    if _is_torchs(found.get(ASSEMBLER)):
        _put(found, ASSEMBLER)
    return found
