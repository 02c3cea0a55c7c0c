"""What tests on a GPU rely on, tried without one: which template they ran by, and whether as asked.

Programs are made for Hopper; a memory keeps launches instead of making them.
"""

from dataclasses import replace
from types import SimpleNamespace

import planned
import pytest
import torch
from calls import ALIGNED, BRAIN, HALF, NAMES, SINGLE, Place, operands
from plans import SMALL, ran_as_asked
from template_choice import PINGPONG, TOGETHER, Template, forget_programs

import cadenza as cz
from cadenza import lang as L
from cadenza.backends.triton.configuration import Configuration
from cadenza.backends.triton.gluon_launch import GluonLaunch
from cadenza.backends.triton.launches import ProductLaunch
from cadenza.backends.triton.memory import Memory
from cadenza.backends.triton.program import Program
from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning.candidates import HOPPER
from cadenza.backends.triton.tuning.contests import Setting
from cadenza.core.pipeline import compile_program
from cadenza.core.trace import Operand, Signature
from cadenza.library.specialize import BY_DIGEST

NOWHERE = Place(torch.device("cpu"), interpreted=False)
SM_90 = Target.named("sm_90")
RING, PLAIN_TILE = HOPPER[0], Configuration(128, 128, 64, warps=8, stages=4, parts=2)


def swiglu(x, w):
    """Stores one matrix and loads none but its operands."""
    return L.swiglu(L.linear(x, w))


class Kept(Memory):
    """Memory that makes no launch."""

    def launch(self, launcher, grid, given):
        """Nothing; the launcher is there."""


def half(rows, columns):
    return torch.randn(rows, columns).to(BRAIN)


def launched(cut, x, target=SM_90):
    """The product of SwiGLU by a configuration, once it has run on x [M, 64]."""
    sizes = {"x": ("M", 64), "w": (256, 64)}
    named = tuple(Operand(name, *size, "bfloat16") for name, size in sizes.items())
    plan = compile_program(swiglu, Signature(named, ()), {}, ()).forward_plan
    steps = Program(plan, lambda kernel: cut, target=target).steps
    (launch,) = (step for step in steps if isinstance(step, ProductLaunch))
    memory = Kept(x.shape[0], x.device)
    memory.values |= dict(zip(launch.operands, (x, half(256, 64)), strict=True))
    launch.run(memory)
    return launch


# --- the choice of a template ---------------------------------------------------------------------


def products(template, name, dtype):
    """The products of both plans of a block by what a template chooses."""
    pair = planned.call_of(name, operands(name, 129, NOWHERE, dtype, ALIGNED)).pair()
    found = []
    for plan in (pair.forward_plan, pair.backward_plan):
        choose = template.choices(plan, None, Setting(SM_90, NOWHERE.device, 256, 129, {}))
        steps = Program(plan, choose, target=SM_90).steps
        found += [step for step in steps if isinstance(step, ProductLaunch)]
    return found


@pytest.mark.parametrize(
    "name", [n if n == "llama" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_all_products_of_16_bits_are_of_the_template(name):
    template = Template(PINGPONG)
    found = products(template, name, BRAIN)
    assert len(found) == template.products > 0
    assert all(isinstance(launch, GluonLaunch) for launch in found)
    both = products(Template(TOGETHER), name, BRAIN)
    assert all(isinstance(launch, GluonLaunch) for launch in both)
    assert any(launch.configuration.together for launch in both)


@pytest.mark.parametrize(("dtype", "some"), [(HALF, True), (SINGLE, False)], ids=str)
def test_products_of_other_dtypes(dtype, some):
    template = Template(PINGPONG)
    found = products(template, "llama", dtype)
    assert bool(template.products) == some
    assert any(isinstance(launch, GluonLaunch) for launch in found) == some


def test_a_template_none_of_whose_kernels_ran_is_caught():
    template = Template(PINGPONG)
    template.check()
    template.products = 2
    with pytest.raises(AssertionError, match="none of 2 products ran by pingpong"):
        template.check()
    template.launched.append(SimpleNamespace(configuration=RING))
    template.check()
    other = Template(TOGETHER)
    other.products, other.launched = 2, template.launched
    with pytest.raises(AssertionError, match="by together"):
        other.check()


def test_a_kernel_that_another_stands_in_for_did_not_run(monkeypatch):
    template = Template(PINGPONG)
    template.install(monkeypatch)
    launched(RING, half(200, 68)[:, :64])  # rows of 136 bytes, which no tensor map has
    assert not template.launched
    launched(RING, half(200, 64))
    assert len(template.launched) == 1


def test_programs_are_made_ready_anew():
    def doubled(x):
        return x * 2.0

    known = set(BY_DIGEST)
    cz.block(doubled)(half(3, 4), backend="auto")
    (made,) = (one for digest, one in BY_DIGEST.items() if digest not in known)
    before = made.forward.triton
    assert made.forward.triton is before
    forget_programs()
    assert made.forward.triton is not before


# --- as asked -------------------------------------------------------------------------------------


def test_what_ran_as_asked():
    assert ran_as_asked(launched(RING, half(200, 64)), RING)
    assert ran_as_asked(launched(PLAIN_TILE, half(200, 64)), PLAIN_TILE)


def test_what_has_not_run_did_not_run_as_asked():
    launch = launched(PLAIN_TILE, half(200, 64))
    launch.launchers.clear()
    assert not ran_as_asked(launch, PLAIN_TILE)


def test_what_stands_in_is_not_as_asked():
    assert not ran_as_asked(launched(SMALL, half(200, 64)), PLAIN_TILE), "a smaller tile"
    assert not ran_as_asked(launched(RING, half(200, 64), Target.named("sm_80")), RING)
    assert not ran_as_asked(launched(RING, half(200, 68)[:, :64]), RING), "the plain kernel"
    other = replace(RING, group=4)
    assert not ran_as_asked(launched(RING, half(200, 64)), other), "another order of tiles"


def test_boxes_count_where_something_moved_in_them(monkeypatch):
    stores, both = (replace(PLAIN_TILE, boxes=b) for b in (("store",), ("load", "store")))
    assert not ran_as_asked(launched(stores, half(200, 64)), stores), "a CPU has none"
    monkeypatch.setattr(Program, "describes", lambda program, device: True)
    assert ran_as_asked(launched(stores, half(200, 64)), stores)
    assert not ran_as_asked(launched(both, half(200, 64)), both), "nothing is loaded"
