"""`cadenza doctor`: what is installed, which back ends run here and why not, and what to install.

Facts about the machine are collected once, in a `Machine`; findings follow from them alone.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from cadenza.backends import has_triton
from cadenza.backends.triton import modules
from cadenza.backends.triton.launch import KNOWN
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning import records
from cadenza.tools.bench.machine import versions

OLDEST = 8  # compute capability from which on Triton compiles products for NVIDIA's GPUs
PINGPONG = "sm_90"
DRIVERS = ("/proc/driver/nvidia/gpus", "/sys/class/kfd/kfd/topology/nodes")
PLACES = "CADENZA_CACHE=FOLDER, a folder of yours that can be written"


class Device(NamedTuple):
    """A GPU that torch sees: its model, architecture as Triton names it, and bytes of memory."""

    name: str
    target: str
    memory: int
    old: bool = False


@dataclass(frozen=True)
class Machine:
    """What is there. `unseen` counts GPUs that a driver knows and torch does not."""

    devices: tuple[Device, ...] = ()
    unseen: int = 0
    cuda: str | None = None
    triton: str | None = None
    compiler: str | None = None
    interpreting: bool = False
    probe: str = ""  # why a small program fails on the first GPU; empty where it runs


class Finding(NamedTuple):
    """Whether a part is usable, why, and what to do where it is not."""

    name: str
    usable: bool
    reason: str
    cure: str = ""


@dataclass(frozen=True)
class Cache:
    """The folder of kernels and of what was measured: what is in it, and why it can't be used."""

    folder: str
    kernels: int = 0
    bytes: int = 0
    tuned: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that doctor says."""

    versions: dict[str, str]
    machine: Machine
    backends: list[Finding]
    cache: Cache
    install: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether something besides the reference back end runs, or there is no GPU to run on."""
        machine = self.machine
        fast = any(one.usable for one in self.backends if one.name == "triton")
        return fast or not (machine.devices or machine.unseen)


# --- what is there --------------------------------------------------------------------------------


def this_machine() -> Machine:
    """The facts of the machine that this runs on; a small program is run where there is a GPU."""
    devices = tuple(_device(index) for index in range(_count()))
    triton = versions()["triton"]
    facts = Machine(
        devices,
        max(0, _known_to_drivers() - len(devices)),
        str(torch.version.cuda or torch.version.hip or "") or None,
        None if triton == "none" else triton,
        os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"),
        os.environ.get("TRITON_INTERPRET") == "1",
    )
    possible = facts.devices and has_triton() and facts.compiler and not facts.devices[0].old
    return Machine(**{**vars(facts), "probe": probe()}) if possible else facts


def _count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _device(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    old = torch.version.hip is None and found.major < OLDEST
    return Device(found.name, Target.of(f"cuda:{index}").name, found.total_memory, old)


def _known_to_drivers() -> int:
    """How many GPUs the kernel's drivers list; of AMD's nodes some are processors."""
    nvidia, amd = (Path(folder) for folder in DRIVERS)
    found = len(list(nvidia.glob("*"))) if nvidia.is_dir() else 0
    for node in amd.glob("*/gpu_id") if amd.is_dir() else ():
        found += node.read_text(encoding="ascii").strip() not in ("", "0")
    return found


def probe() -> str:
    """Why a product with an epilogue does not run by Triton on the first GPU; empty if it does."""
    from cadenza.library import ops

    tuning = os.environ.get("CADENZA_TUNE")
    os.environ["CADENZA_TUNE"] = "off"
    try:
        x, w = (torch.randn(256, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        found = ops.linear(x, w, activation="relu", backend="triton")
        exact = torch.relu(x.double() @ w.double().T)
        error = (found.double() - exact).norm() / exact.norm()
        return "" if float(error) < 0.01 else f"a product is wrong by {float(error):.1%}"
    except Exception as error:  # noqa: BLE001  # whatever Triton, the driver or a compiler says
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[-1]}"
    finally:
        os.environ.pop("CADENZA_TUNE")
        if tuning is not None:
            os.environ["CADENZA_TUNE"] = tuning


def cache() -> Cache:
    """The cache as it is, without making it."""
    try:
        folder = modules.folder().parent
    except RuntimeError as error:
        return Cache("", problem=str(error))
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    kernels = sum(path.suffix == ".py" for path in files)
    size = sum(path.stat().st_size for path in files)
    above = next(path for path in (folder, *folder.parents) if path.exists())
    writable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    problem = "" if writable else f"{above} can't be written"
    return Cache(str(folder), kernels, size, len(records.read()), problem)


# --- what follows ---------------------------------------------------------------------------------


def diagnose(machine: Machine, kept: Cache) -> Diagnosis:
    """What the facts mean."""
    findings = list(backends(machine))
    cures = [one.cure for one in findings if not one.usable and one.cure]
    cures += [PLACES] if kept.problem else []
    return Diagnosis(versions(), machine, findings, kept, list(dict.fromkeys(cures)))


def backends(machine: Machine) -> Iterator[Finding]:
    """Each back end, and the parts of the fast one."""
    yield Finding("reference", True, "runs wherever PyTorch does, slowly")
    fast = _triton(machine)
    yield fast
    yield _pingpong(machine, fast)
    yield _direct(machine)
    yield _compiler(machine)


def _triton(machine: Machine) -> Finding:
    """The fast back end."""
    if machine.triton is None:
        system = platform.system()
        cure = "pip install triton" if system == "Linux" else "Linux: Triton has no other system"
        return Finding("triton", False, "no package triton", cure if machine.devices else "")
    if not machine.devices:
        return _without_device(machine)
    first = machine.devices[0]
    if first.old:
        return Finding("triton", False, f"{first.name} is {first.target}, older than sm_{OLDEST}0")
    if machine.compiler is None:
        return Finding("triton", False, "no C compiler, which Triton builds its launcher with",
                       "a C compiler: apt-get install gcc")  # fmt: skip
    if machine.probe:
        return Finding("triton", False, f"a small program fails: {machine.probe}",
                       "what the reason names, then run cadenza doctor again")  # fmt: skip
    return Finding("triton", True, f"a small program runs on {first.name}, {first.target}")


def _without_device(machine: Machine) -> Finding:
    if machine.unseen:
        seen = f"a driver lists {machine.unseen} GPUs that this PyTorch does not see"
        build = "a build of PyTorch for the GPU" if machine.cuda is None else "a driver for it"
        return Finding("triton", False, seen, f"{build}, as new as CUDA {machine.cuda or 'allows'}")
    if machine.interpreting:
        return Finding("triton", True, "no GPU: TRITON_INTERPRET=1 interprets kernels, to test")
    return Finding("triton", False, "no GPU; TRITON_INTERPRET=1 would interpret kernels, to test")


def _pingpong(machine: Machine, fast: Finding) -> Finding:
    """The template whose epilogue runs under the next tile's products."""
    name, targets = "pingpong template", {device.target for device in machine.devices}
    if not fast.usable or not machine.devices:
        return Finding(name, False, "the back end triton does not run here")
    if PINGPONG not in targets:
        return Finding(name, False, f"for {PINGPONG} (H100, H200) alone: {', '.join(targets)} has "
                       "the plain template")  # fmt: skip
    return Finding(name, True, f"on {PINGPONG}")


def _direct(machine: Machine) -> Finding:
    """Launching without Triton's own, slow, way."""
    name, known = "direct launcher", ", ".join(f"{version}x" for version in KNOWN)
    if machine.triton is None:
        return Finding(name, False, "no package triton")
    if machine.triton.startswith(KNOWN):
        return Finding(name, True, f"Triton {machine.triton}")
    return Finding(name, False, f"known of Triton {known} alone: {machine.triton} launches by its "
                   "public way, tens of µs slower a kernel")  # fmt: skip


def _compiler(machine: Machine) -> Finding:
    name = "C compiler"
    if machine.compiler is None:
        needed = "apt-get install gcc" if machine.devices else ""
        return Finding(name, False, "none in PATH, and CC is not set", needed and f"gcc: {needed}")
    return Finding(name, True, machine.compiler)


# --- saying it ------------------------------------------------------------------------------------


def run_doctor(machine: bool) -> int:
    """Prints the diagnosis; 1 where there is a GPU that only the reference back end would use."""
    found = diagnose(this_machine(), cache())
    if machine:
        json.dump(as_json(found), sys.stdout, indent=2)
        print()
    else:
        console = Console(highlight=False)
        for line in render(found):
            console.print(line, soft_wrap=True)
    return 0 if found.healthy else 1


def as_json(found: Diagnosis) -> dict[str, Any]:
    """The diagnosis as data."""
    return {
        "healthy": found.healthy,
        "versions": found.versions,
        "devices": [device._asdict() for device in found.machine.devices],
        "backends": [one._asdict() for one in found.backends],
        "cache": asdict(found.cache),
        "install": found.install,
    }


def render(found: Diagnosis) -> Iterator[Text]:
    """The diagnosis line by line."""
    yield Text("versions", "bold green")
    for name, version in found.versions.items():
        yield Text(f"    {name:<10}{version or '-'}")
    yield Text("devices", "bold green")
    yield Text(
        f"    cpu       {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )
    for index, device in enumerate(found.machine.devices):
        memory = f"{device.memory / 2**30:.0f} GiB"
        yield Text(f"    cuda:{index:<5}{device.name}, {device.target}, {memory}")
    yield Text("back ends", "bold green")
    for one in found.backends:
        mark, colour = ("usable", "green") if one.usable else ("not usable", "yellow")
        yield Text.assemble(f"    {one.name:<19}", (f"{mark:<12}", colour), one.reason)
    yield Text("cache", "bold green")
    kept = found.cache
    yield Text(f"    folder    {kept.folder or '-'}{f' ({kept.problem})' if kept.problem else ''}")
    yield Text(
        f"    holds     {kept.kernels} kernels, {kept.bytes / 1e6:.1f} MB, {kept.tuned} tuned"
    )
    yield Text("install", "bold green")
    for line in found.install or ["nothing"]:
        yield Text(f"    {line}")
