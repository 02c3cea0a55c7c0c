"""The patterns of the suite `kernels` as programs: one product and its epilogue each.

Row factors (r, c) are given: in a block they come out of the kernel before.
"""

from __future__ import annotations

from cadenza.core import lang as L
from cadenza.library.function import block

EPS = 1e-5


@block(shapes={"y": "M K", "w": "N K", "x": "M N", "g": "1 N"})
def residual_rms(y, w, x, g):
    """Residual and RMSNorm, whose row factor r is left to the next product."""
    x1 = L.name(x + L.linear(y, w), "x1")
    return {"x1": x1, "h": x1 * g, "r": L.rsqrt(L.row_mean(x1**2) + EPS)}


@block(shapes={"x": "M K", "w": "2*F K", "r": "M 1"})
def swiglu(x, w, r):
    """SwiGLU, its product z stored for backward."""
    z = L.linear(x, w) * r
    return {"z": z, "u": L.swiglu(z)}


@block(shapes={"x": "M K", "w": "N K", "r": "M 1", "cos": "M R", "sin": "M R"})
def rope(x, w, r, cos, sin, *, head_dim, heads):
    """Queries, keys and values, of which `heads` heads are rotated."""
    return {"qkv": L.rope(L.linear(x, w) * r, cos, sin, head_dim, heads=heads)}


@block(shapes={"dz": "M K", "w": "K N", "x": "M N", "dres": "M N", "g": "1 N", "c": "M 1"})
def rms_backward(dz, w, x, dres, g, c, *, dtype):
    """The gradients of a residual stream x and of the norm's weight g, which is of `dtype`."""
    acc = L.matmul(dz, w)
    return {"dx": dres + acc * g + x * c, "dg": L.cast(L.column_sum(acc * x), dtype)}


@block(shapes={"dx": "M K", "w": "K N", "z": "M 2*N", "r": "M 1"})
def swiglu_backward(dx, w, z, r):
    """The gradient of SwiGLU's product z, its activation u again, and the row sums s of dz · z."""
    acc = L.matmul(dx, w)
    gate, up = L.split(z)
    s = L.sigmoid(gate)
    u = gate * s
    dz = L.join(acc * up * (s + u * (1 - s)), acc * u) * r
    # Of u alone, which no product here makes, a pointwise kernel would be planned; in a whole
    # backward it is the operand of a later product and stored here.
    return {"dz": dz, "u": u * up + 0.0 * acc, "s": L.row_sum(dz * z)}


@block(shapes={"dz": "M P", "x": "M N", "g": "1 N"})
def dw(dz, x, g):
    """The gradient of a weight behind a norm: the norm's weight g scales its columns."""
    return {"dw": L.matmul(dz, x, transpose_a=True) * g}


@block(shapes={"dz": "M K", "w": "K N"})
def dx(dz, w):
    """The gradient of a product's left operand."""
    return {"dx": L.matmul(dz, w)}


@block(shapes={"x": "M K", "w": "N K", "target": "M 1"})
def cross_entropy(x, w, target):
    """Each row's loss, and the logits as they are stored."""
    logits = L.stored(L.linear(x, w))
    return {"loss": L.logsumexp(logits) - L.pick(logits, target), "logits": logits}


@block(shapes={"x": "M K", "w": "N K", "bias": "1 N"})
def bias_gelu(x, w, bias):
    """The first half of GPT-2's MLP."""
    return (L.gelu(L.linear(x, w, bias), approximate="tanh"),)


@block
def product(a, b, *, transpose_a=False, transpose_b=False):
    """A product alone."""
    return L.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
