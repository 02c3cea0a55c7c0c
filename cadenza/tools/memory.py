"""How much memory a stretch of a program took at its peak: the host's, or the GPU's."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


class PeakMemory:
    """Bytes allocated at most since it was made, beyond those allocated then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.before = self._now()

    def _now(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return _kernel_count("VmRSS") or _largest_resident()

    def bytes(self) -> int:
        """The peak so far, less the level at the start."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return (_kernel_count("VmHWM") or _largest_resident()) - self.before


def _kernel_count(name: str) -> int:
    # Linux's getrusage hands a child its parent's peak; the kernel's own count starts afresh.
    if not STATUS.exists():
        return 0
    rows = (line.split() for line in STATUS.read_text().splitlines())
    return next((int(row[1]) * 1024 for row in rows if row[0] == f"{name}:"), 0)


def _largest_resident() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
