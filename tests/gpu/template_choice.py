"""The template by which products of 16-bit operands run in a test.

Tests run by defaults, which are all of the plain template; what is measured may be Hopper's, whose
epilogues run under the next tile's product. Here it makes every product that it takes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from calls import NAMES

from cadenza.backends.triton.columns import Unsupported
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.gluon_launch import GluonLaunch
from cadenza.backends.triton.memory import Step
from cadenza.backends.triton.program import Choose, Program
from cadenza.backends.triton.tuning import choices
from cadenza.backends.triton.tuning.candidates import HOPPER
from cadenza.backends.triton.tuning.contests import Setting
from cadenza.core.plan import Kernel, Plan
from cadenza.core.plan_text import PairText
from cadenza.library.specialize import BY_DIGEST

PLAIN, PINGPONG, TOGETHER = "plain", "pingpong", "together"
# Of each product the first that takes it; `together` takes even numbers of tiles of columns.
CUTS: dict[str, Sequence[Configuration]] = {
    PLAIN: (),
    PINGPONG: HOPPER[:1],
    TOGETHER: (next(cut for cut in HOPPER if cut.together), HOPPER[0]),
}
HALVES = (torch.bfloat16, torch.float16)
NOT_HOPPER = "Hopper's template needs a GPU of compute capability 9.0"
FEW = ["llama", "gpt2", "qwen3", "gemma2", "lm-head"]  # blocks with all kinds of epilogues

# Every block by the plain template, a few by Hopper's.
each_block_by_a_template = pytest.mark.parametrize(
    ("name", "template"),
    [*((name, PLAIN) for name in NAMES), *((name, PINGPONG) for name in FEW)],
    indirect=["template"],
)


class Template:
    """What a test runs by, what there was for it to make, and which of its kernels ran."""

    def __init__(self, name: str) -> None:
        self.name, self.cuts = name, CUTS[name]
        self.products = 0  # of 16-bit operands, in the plans that were made ready
        self.launched: list[GluonLaunch] = []  # each launch of a kernel of the template's own

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Has programs that are made ready from now on run by it."""
        launcher = GluonLaunch.launcher

        def noted(launch: GluonLaunch, **variant: Any) -> Any:
            self.launched.append(launch)
            return launcher(launch, **variant)

        patch.setattr(GluonLaunch, "launcher", noted)
        patch.setattr(choices, "choices", self.choices)

    def choices(self, plan: Plan, text: PairText | None, setting: Setting) -> Choose:
        """What selection is replaced by: nothing is measured."""
        found: dict[Kernel, Configuration] = {}

        def note(kernel: Kernel, steps: Sequence[Step], make: Callable[..., Any]) -> None:
            if kernel.product is not None:
                cut = next((cut for cut in self.cuts if takes(make, cut)), None)
                found.update({kernel: cut} if cut else {})

        program = Program(plan, None, text, setting.target, note)
        products = [kernel.product for kernel in plan.kernels if kernel.product is not None]
        self.products += sum(program.dtypes[p.inputs[0]] in HALVES for p in products)
        return found.get

    def check(self) -> None:
        """Raises AssertionError if there were products for it and none of its kernels ran."""
        ran = [x for x in self.launched if x.configuration.together or self.name != TOGETHER]
        assert ran or not self.products, f"none of {self.products} products ran by {self.name}"


def takes(make: Callable[..., Any], cut: Configuration) -> bool:
    """Whether a kernel can be made by this configuration, of the template that it names."""
    try:
        make(cut)
    except Unsupported:
        return False
    return True


def forget_programs() -> None:
    """Has every program of this process made ready anew: what it runs by is chosen once."""
    for known in BY_DIGEST.values():
        for direction in ("forward", "backward"):
            executable = vars(known).get(direction)
            if executable is not None:
                vars(executable).pop("triton", None)
