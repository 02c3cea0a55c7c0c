"""A derivative of a derivative raises where it is not zero, also where autograd is asked for some.

Asked for chosen inputs, autograd goes only where it finds a way to them: what forward makes for
backward alone must be one.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hf_models import batch, pair
from torch.utils._python_dispatch import TorchDispatchMode

import cadenza as cz
from cadenza import lang as L
from cadenza.core.errors import CadenzaError

ROWS, WIDTH = 6, 8
TARGET = torch.arange(ROWS) % WIDTH


@cz.block(shapes={"x": "M D", "w": "2*F D", "v": "D F"})
def gated(x, w, v):
    return L.linear(L.swiglu(L.linear(x, w)), v)


@cz.block(shapes={"x": "M D", "w": "2*F D", "v": "D F"})
def normed(x, w, v):
    r = L.rsqrt(L.row_mean(x * x) + 1e-5)
    return {"y": L.linear(L.silu(L.linear(x * r, v)), w), "r": r}


def first(found):
    return found["y"] if isinstance(found, dict) else found


CALLS = {
    "gated": (lambda x, w, v: gated(x, w, v), lambda x, w, v: gated.plain(x, w, v)),
    "normed": (lambda x, w, v: normed(x, w, v), lambda x, w, v: normed.plain(x, w, v)),
    "gelu": (
        lambda x, w, v: cz.ops.linear(x, v, activation="gelu"), lambda x, w, v: F.gelu(x @ v.T)
    ),
    **{
        reduction: (
            lambda x, w, v, r=reduction: cz.ops.linear_cross_entropy(x, v, TARGET, reduction=r),
            lambda x, w, v, r=reduction: F.cross_entropy(x @ v.T, TARGET, reduction=r),
        )
        for reduction in ("mean", "none")
    },
    "lean": (
        lambda x, w, v: cz.ops.linear_cross_entropy(x, v, TARGET, lean=True),
        lambda x, w, v: F.cross_entropy(x @ v.T, TARGET),
    ),
}  # fmt: skip


class Looking(TorchDispatchMode):
    """Has calls go by torch's dispatcher."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def leaves_of(trained=range(3)):
    """The operands, of which these need gradients: to the others no way back is kept."""
    torch.manual_seed(0)
    shapes = ((ROWS, WIDTH), (2 * WIDTH, WIDTH), (WIDTH, WIDTH))
    return [torch.randn(shape).requires_grad_(p in trained) for p, shape in enumerate(shapes)]


def second(call, leaves, of, by):
    """The derivative by one leaf of a sum of the gradient of another; None where there is none."""
    loss = first(call(*leaves)).sum()  # whose own derivative leads nowhere
    if not loss.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(loss, [leaves[of]], create_graph=True, allow_unused=True)
    if gradient is None or not gradient.requires_grad:
        return None
    return torch.autograd.grad(gradient.sin().sum(), [leaves[by]], allow_unused=True)[0]


@pytest.mark.parametrize("way", [contextlib.nullcontext, Looking], ids=["direct", "dispatched"])
@pytest.mark.parametrize("name", CALLS)
def test_a_second_derivative_raises_unless_it_is_zero(name, way):
    ours, plain = CALLS[name]
    pairs = [(of, by) for of in range(3) for by in range(3) if of_plain(plain, of, by)]
    assert len(pairs) > 2
    for of, by in pairs:
        with way(), pytest.raises(CadenzaError, match="can be differentiated once"):
            second(ours, leaves_of((of, by)), of, by)


def of_plain(plain, of, by):
    """Whether such a derivative is not zero."""
    expected = second(plain, leaves_of((of, by)), of, by)
    return expected is not None and bool(expected.any())


def test_a_hessian_raises():
    x, _, v = leaves_of()
    with pytest.raises(CadenzaError, match="can be differentiated once"):
        torch.autograd.functional.hessian(
            lambda w: cz.ops.linear(x.detach(), w, activation="gelu").sum(), v.detach()
        )


def test_a_penalty_of_a_models_gradient_raises():
    model, _ = pair("llama")
    cz.accelerate(model)
    weight = model.lm_head.weight
    loss = model(**batch()).loss
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(CadenzaError, match="can be differentiated once"):
        (loss + gradient.square().sum()).backward(inputs=[weight])


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_that_may_be_used_further_is_the_same(name):
    ours = CALLS[name][0]
    found = []
    for options in ({"create_graph": True}, {}):
        leaves = leaves_of()
        loss = first(ours(*leaves)).square().sum()
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True, **options))
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_returned_may_be_changed_in_place(name):
    """As trainers do with a loss."""
    expected, found = (leaves_of() for _ in range(2))
    first(CALLS[name][0](*expected)).sum().backward()
    returned = first(CALLS[name][0](*found))
    returned /= 2
    returned.sum().backward()
    for a, b in zip(found, expected, strict=True):
        assert (a.grad is None and b.grad is None) or torch.allclose(2 * a.grad, b.grad)
