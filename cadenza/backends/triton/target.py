"""What kernels are compiled for: an architecture, and the limits that a kernel must respect.

Triton checks no limit of shared memory when it compiles; the numbers here are those of the vendors'
tables, in bytes a program may have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Target:
    """An architecture as Triton names it, the threads of a warp, the shared memory of a program.

    `tma` is whether descriptors bring in tiles by hardware; elsewhere Triton makes scalar loads of
    them. `tf32` is whether torch's switch lets float32 be multiplied so. `backend` is Triton's:
    `cuda`, `hip`, or nothing where the interpreter runs kernels.
    """

    name: str
    backend: str
    arch: int | str
    warp: int = 32
    shared: int = 0
    tma: bool = False
    tf32: bool = False

    @staticmethod
    def named(name: str) -> Target:
        """The target of this name, such as `sm_90`; ValueError if it is not known."""
        if name not in TARGETS:
            raise ValueError(f"no target {name!r}; the targets are {', '.join(TARGETS)}")
        return TARGETS[name]

    @staticmethod
    def of(device: torch.device | str) -> Target:
        """The target of a device, with its own limit of shared memory.

        An architecture that is not in the table counts as the last one before it of its vendor.
        """
        device = torch.device(device)
        if device.type != "cuda":
            return INTERPRETER
        found = torch.cuda.get_device_properties(device)
        shared = int(getattr(found, "shared_memory_per_block_optin", 0))
        if torch.version.hip:
            name = str(found.gcnArchName).split(":")[0]
            known = TARGETS.get(name, replace(TARGETS["gfx942"], name=name, arch=name))
        else:
            known = _of_capability(10 * found.major + found.minor)
        return replace(known, shared=shared) if shared else known


def tf32_allowed() -> bool:
    """Whether torch lets float32 be multiplied as tf32, by whichever of its switches.

    Its older `allow_tf32` can't be read once a newer one has been set.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _of_capability(capability: int) -> Target:
    name = f"sm_{capability}"
    if name in TARGETS:
        return TARGETS[name]
    older = [t for t in TARGETS.values() if isinstance(t.arch, int) and t.arch < capability]
    like = older[-1] if older else TARGETS["sm_80"]
    return replace(like, name=name, arch=capability)


INTERPRETER = Target("interpreter", "", "")
TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, shared=166912),
        Target("sm_86", "cuda", 86, shared=101376),
        Target("sm_89", "cuda", 89, shared=101376),
        Target("sm_90", "cuda", 90, shared=232448, tma=True),
        Target("sm_100", "cuda", 100, shared=232448, tma=True),
        Target("sm_120", "cuda", 120, shared=101376, tma=True),
        Target("gfx942", "hip", "gfx942", warp=64, shared=65536),
    )
}
