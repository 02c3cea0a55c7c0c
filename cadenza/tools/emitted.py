"""What the Triton back end makes of a target's plans, as text; nothing of it needs a GPU or Triton.

A plan's steps are launches of emitted kernels, fixed kernels, and what torch does instead. A step
of a kernel is called as the kernel is, one that makes a vector as the vector is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.syntax import Syntax

from cadenza.backends.triton import modules
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.fallbacks import LibraryProduct, ReferenceKernel, ReferenceVector
from cadenza.backends.triton.launches import PointwiseLaunch, ProductLaunch, VectorLaunch
from cadenza.backends.triton.memory import Step
from cadenza.backends.triton.program import Choose, Program
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning.candidates import HOPPER
from cadenza.backends.triton.vector_product import VectorProduct
from cadenza.core.ir import Node
from cadenza.core.plan import Kernel
from cadenza.core.plan_text import KernelText, PairText, PlanText
from cadenza.core.storage import compute_dtype
from cadenza.tools.fault import Fault

ALL = "all"
TARGETS = {
    "h100": "sm_90", "h200": "sm_90", "a100": "sm_80", "b200": "sm_100", "l40s": "sm_89",
    "rtx4090": "sm_89", "mi300x": "gfx942",
}  # fmt: skip


class Emitted(NamedTuple):
    """A step: its name, its module's text if it has one, what runs instead, and why.

    `falls` is whether torch does what a template would.
    """

    name: str
    text: str | None
    reason: str = ""
    falls: bool = False

    @property
    def path(self) -> str | None:
        """The file that holds the text once the kernel has run."""
        if self.text is None:
            return None
        return str(modules.folder() / modules.file_name(self.text))


def emitted(text: PairText, gpu: str, template: str = "plain") -> list[Emitted]:
    """The steps of forward and backward, in order, for a GPU that `explain` knows.

    Each by the template of this name where that takes it, and else by the plain one.
    """
    plans = [plan for plan in (text.forward, text.backward) if plan is not None]
    return [step for plan in plans for step in _steps(plan, text, gpu, TEMPLATES[template])]


def _hopper(kernel: Kernel) -> Configuration | None:
    """The first candidate of Hopper's template for a product, the default for the rest."""
    return None if kernel.product is None else HOPPER[0]


TEMPLATES: dict[str, Choose | None] = {"plain": None, "pingpong": _hopper}


def _steps(plan: PlanText, text: PairText, gpu: str, choose: Choose | None) -> Iterator[Emitted]:
    if compute_dtype(plan.plan.graph) == "float64":
        for kernel in plan.kernels:
            yield Emitted(kernel.name, None, "by torch, as all programs in float64", falls=True)
        return
    for name, step in named_steps(plan, text, gpu, choose):
        yield Emitted(name, step.source.text if step.source else None, *_instead(step))


def named_steps(
    plan: PlanText, text: PairText, gpu: str, choose: Choose | None = None
) -> Iterator[tuple[str, Step]]:
    """The back end's steps of one pass, in order, each with the name of its kernel or vector.

    `choose` gives the configuration of a kernel, None for its default.
    """
    program = Program(plan.plan, choose, text, Target.named(TARGETS[gpu]))
    names = program.names | text.names | {k.node: k.name for k in plan.beside}
    for step in program.steps:
        kernel = _kernel_of(step, plan)
        yield kernel.name if kernel else names.get(_vector_of(step), "a vector"), step


def _kernel_of(step: Step, plan: PlanText) -> KernelText | None:
    """The kernel that a step is, or a part of; None for one that makes a vector."""
    if isinstance(step, ReferenceKernel):
        return plan.kernels[step.position]
    if isinstance(step, LibraryProduct):
        return next(k for k in plan.kernels if k.kernel and k.kernel.product is step.product)
    if not isinstance(step, ProductLaunch | PointwiseLaunch):
        return None
    made = {a.node for a in step.source.arguments if a.role in ("store", "reduction")}
    kernels = [(k, k.kernel) for k in plan.kernels if k.kernel]
    return next(text for text, k in kernels if made & {*k.stores, *k.reductions})


def _vector_of(step: Step) -> Node | None:
    if isinstance(step, VectorLaunch):
        return next(a.node for a in step.source.arguments if a.role == "store")
    return getattr(step, "node", None)


def _instead(step: Step) -> tuple[str, bool]:
    """What runs where a step is not all a template's, and why; whether torch does it."""
    reason = "; ".join(dict.fromkeys(step.reason.split("; ")))  # templates may fail alike
    match step:
        case LibraryProduct():
            return f"the product by torch.mm: {reason}", True
        case PointwiseLaunch() if step.reason:
            return f"what follows the product, which is torch's: {reason}", True
        case ReferenceKernel() | ReferenceVector():
            return f"by torch, step by step: {reason}", True
        case VectorProduct():
            return (
                "by the fixed kernel in cadenza/backends/triton/templates/vector_kernel.py",
                False,
            )
    return "", False


def fallen(steps: Iterable[Emitted]) -> dict[str, str]:
    """What torch does of kernels and vectors by their names, and why."""
    found: dict[str, str] = {}
    for step in steps:
        if step.falls:
            found.setdefault(step.name, step.reason)
    return found


# --- printing -------------------------------------------------------------------------------------


def asked(steps: Sequence[Emitted], name: str) -> list[Emitted]:
    """The steps of this name, or all. Raises Fault if there are none."""
    found = [step for step in steps if name in (ALL, step.name)]
    if not found:
        known = ", ".join(dict.fromkeys(step.name for step in steps))
        raise Fault(f"--source {name!r}: no kernel is called so; there are {known}")
    return found


def sources_json(steps: Iterable[Emitted]) -> list[dict[str, str | None]]:
    """Steps as data."""
    return [
        {"name": s.name, "text": s.text, "path": s.path, "reason": s.reason or None} for s in steps
    ]


def show_sources(steps: Sequence[Emitted], console: Console) -> None:
    """Prints modules as Python, in colour on a terminal; what is no module's as a comment."""
    texts = []
    for step in steps:
        lines = [f"# {step.name}: {part}" for part in (step.path, step.reason) if part]
        texts.append("\n".join([*lines, *([step.text] if step.text else [])]))
    text = "\n\n".join(texts)
    if console.is_terminal:
        console.print(Syntax("", "python", theme="ansi_dark").highlight(text), soft_wrap=True)
    else:
        console.file.write(text.rstrip() + "\n")
