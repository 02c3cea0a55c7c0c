"""On what was measured: device, versions, date; and how fast and hot the device ran meanwhile."""

from __future__ import annotations

import platform
import statistics
import subprocess
import threading
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

import cadenza
from cadenza.core.cost import GPUS, Gpu

PERIOD = 0.03  # seconds between two looks at clock and power


def device_name(device: torch.device) -> str:
    """The model of a GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def known_gpu(name: str) -> Gpu | None:
    """The rates of a GPU by the name that it gives itself."""
    plain = name.lower().replace(" ", "")
    return next((gpu for key, gpu in GPUS.items() if key in plain), None)


def new_run(device: torch.device, shard: str) -> tuple[str, dict[str, Any]]:
    """A name for this run that no other has, and what it runs on."""
    now = datetime.now(UTC)
    name = f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
    return name, {
        "date": f"{now:%Y-%m-%d %H:%M:%S} UTC",
        "device": device_name(device),
        "shard": shard,
        **versions(),
    }


def versions() -> dict[str, str]:
    """Of everything that the figures depend on."""
    found = {"cadenza": cadenza.__version__, "commit": commit(), "torch": torch.__version__}
    found |= {
        "triton": _triton(),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }
    return found


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def commit() -> str:
    """The commit of a checkout, "+" where files differ from it; empty outside of one."""
    folder = Path(cadenza.__file__).parent
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class Meter:
    """Mean clock (MHz) and power (W) of a GPU while it is entered, where NVML is there to ask."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clocks: list[float] = []
        self.watts: list[float] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        try:
            while not self._done.wait(PERIOD):
                self.clocks.append(float(torch.cuda.clock_rate(self.device)))
                self.watts.append(torch.cuda.power_draw(self.device) / 1e3)
        except Exception:  # noqa: BLE001  # no NVML, or none that answers; its errors are its own
            self._done.set()

    def means(self) -> dict[str, float]:
        """By name; empty where nothing was seen."""
        if not self.clocks or not self.watts:
            return {}
        return {
            "sm_mhz": round(statistics.fmean(self.clocks)),
            "watts": round(statistics.fmean(self.watts)),
        }
