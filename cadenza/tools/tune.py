"""`cadenza tune TARGET`: fills the cache of measured kernels ahead of time.

It makes one call with backward on random operands of the sizes asked for, as a training would, and
shows which configuration won for each kernel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from cadenza.backends import has_triton
from cadenza.core.ops import M
from cadenza.core.trace import Operand
from cadenza.tools.fault import Fault
from cadenza.tools.question import Sizes
from cadenza.tools.target import Target, find_target

Tensor = torch.Tensor
Measured = dict[str, Mapping[str, Any]]  # entries by the title of their kernel


def run_tune(text: str, sizes: Sizes, full: bool) -> int:
    """Measures the kernels of a target that have no entry yet; raises Fault where none can be."""
    target = find_target(text, sizes.size or (), sizes.dtype, sizes.frozen or ())
    if not (torch.cuda.is_available() and has_triton()):
        raise Fault("kernels are measured on the GPU that will run them, and none is usable here")
    os.environ["CADENZA_TUNE"] = "full" if full else "first"
    console = Console()
    found = _measured(target, torch.device("cuda"), console)
    _show(found, text, console)
    return 0


def _measured(target: Target, device: torch.device, console: Console) -> Measured:
    """What one call with backward measures, shown as it goes on."""
    from cadenza.backends.triton.tuning.choices import telling  # Triton is slow to import

    found: Measured = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=None)

        def tell(done: int, total: int, title: str, entry: Mapping[str, Any]) -> None:
            progress.update(task, completed=done, total=total, description=title)
            found[title] = entry

        with telling(tell):
            call(target, device)
    return found


def call(target: Target, device: torch.device) -> None:
    """A call of the target on random operands, and its backward."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        operand.name: drawn(operand, target.rows, generator)
        for operand in target.signature.operands
    }
    for name in target.needed:
        tensors[name].requires_grad_()
    made = target.program(**tensors, **dict(target.signature.constants))
    outputs = [o for o in _values(made) if o.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.randn_like(o) for o in outputs])
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def drawn(operand: Operand, rows: int, generator: torch.Generator) -> Tensor:
    """An operand, normal; a weight's products keep the size of what is multiplied."""
    shape = (rows if operand.rows == M else int(operand.rows), int(operand.columns))
    dtype, device = getattr(torch, operand.dtype), generator.device
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    scale = 1.0 if operand.rows == M or shape[0] == 1 else shape[1] ** -0.5
    made = torch.empty(shape, dtype=dtype, device=device)
    return made.normal_(0.0, scale, generator=generator)


def _values(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    return list(made.values() if isinstance(made, dict) else made)


def _show(found: Measured, text: str, console: Console) -> None:
    """A row a kernel: what won, its time, and that of the default."""
    from cadenza.backends.triton.tuning import records

    if not found:
        console.print(f"{text}: everything worth measuring was measured before, or is too small")
        return
    table = Table("kernel", "chosen", "µs", "default µs", title=f"{text}: kept in {records.path()}")
    for title, entry in found.items():
        table.add_row(title, *_cells(entry))
    console.print(table)


def _cells(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """What won, its time and the default's: in turns, and by itself where that was measured."""
    if "fastest" not in entry:
        return "none runs", "", ""
    best, turns, alone = entry["fastest"], entry["microseconds"], entry.get("alone", {})

    def told(name: str) -> str:
        if isinstance(turns[name], str):
            return "does not run"
        by_itself = f", {alone[name]:.1f} by itself" if name in alone else ""
        return f"{turns[name]:.1f}{by_itself}"

    return best, told(best), told(next(iter(turns)))
