"""The library's programs in stock torch, and small operands for each of their variants.

Nothing here comes from the language: functions of torch.nn.functional, complex numbers for rotary
embedding, and Philox in integers for dropout.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from cases import rotated, rotated_pairs
from philox import uniform
from torch import Tensor

from cadenza.library import programs
from cadenza.library.accumulate import added_weight_gradient
from cadenza.library.blocks import square_sum
from cadenza.library.operands import size_of
from cadenza.library.variants import VARIANTS

Operands = dict[str, Any]
SIZES = {"D": 12, "F": 15, "H": 4, "KV": 2, "HD": 6, "V": 21}
WIDE_HEADS = {"H": 2, "KV": 1, "HD": 64}  # for 32 columns that rotate
ACTIVATIONS = {
    None: lambda z: z,
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
GATES = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "reglu": F.relu,
}


def activated(z: Tensor, name: str | None) -> Tensor:
    """An activation of torch, gated or not."""
    if name in GATES:
        gate, up = z.chunk(2, -1)
        return GATES[name](gate) * up
    return ACTIVATIONS[name](z)


def at_least_single(x: Tensor) -> Tensor:
    """In float32, or as it is in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """Torch's RMSNorm."""
    return F.rms_norm(x, x.shape[-1:], weight + offset, eps)


def norm(x, weight=None, bias=None, *, squares=None, kind="rms", offset=0.0, eps=1e-5):
    """`cz.ops.norm`."""
    if kind is None:
        return x
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if squares is None:
        return rms(x, weight, offset, eps)
    return (x / torch.sqrt(squares / x.shape[-1] + eps) * (weight + offset)).to(x.dtype)


_normed = norm


def dropped(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Dropout where the numbers of Philox are below p."""
    if not p:
        return x
    rows = x.reshape(-1, x.shape[-1])
    kept = uniform(int(seed), *rows.shape) >= p
    return (kept * rows / (1 - p)).to(x.dtype).reshape(x.shape)


def linear(x, w, bias=None, *, residual=None, norm_weight=None, norm_bias=None, output_norm=None,
           seed=None, activation=None, norm=None, norm_offset=0.0, eps=1e-5, scale=1.0,
           softcap=None, dropout=0.0):  # fmt: skip
    """`cz.ops.linear`."""
    h = _normed(x, norm_weight, norm_bias, kind=norm, offset=norm_offset, eps=eps)
    y = scale * activated(F.linear(h, w, bias), activation)
    y = y if softcap is None else softcap * torch.tanh(y / softcap)
    y = y if output_norm is None else rms(y, output_norm, norm_offset, eps)
    y = dropped(y, dropout, seed)
    return y if residual is None else residual + y


def qkv_projection(x, w, bias=None, *, norm_weight=None, norm_bias=None, squares=None, q_norm=None,
                   k_norm=None, cos=None, sin=None, head_dim, heads, key_value_heads, norm=None,
                   norm_offset=0.0, eps=1e-5, interleaved=False):  # fmt: skip
    """`cz.ops.qkv_projection` of a matrix x."""
    numbers = {"offset": norm_offset, "eps": eps}
    h = _normed(x, norm_weight, norm_bias, squares=squares, kind=norm, **numbers)
    sizes = [n * head_dim for n in (heads, key_value_heads, key_value_heads)]
    q, k, v = F.linear(h, w, bias).split(sizes, -1)
    if q_norm is not None:
        q = _heads_normed(q, q_norm, head_dim, numbers)
    if k_norm is not None:
        k = _heads_normed(k, k_norm, head_dim, numbers)
    if cos is not None:
        turn = rotated_pairs if interleaved else rotated
        wide = torch.promote_types(x.dtype, torch.float32)  # torch has no narrower complex numbers
        tables = cos.to(wide), sin.to(wide)
        q, k = (turn(z.to(wide), *tables, head_dim, z.shape[-1] // head_dim) for z in (q, k))
        q, k = q.to(x.dtype), k.to(x.dtype)
    return torch.cat((q, k, v), -1)


def _heads_normed(z: Tensor, weight: Tensor, head_dim: int, numbers: Operands) -> Tensor:
    columns = weight.shape[-1]
    assert columns in (head_dim, z.shape[-1])
    return rms(z.unflatten(-1, (-1, columns)), weight, **numbers).flatten(-2)


def feed_forward(x, w_up, w_down, b_up=None, b_down=None, *, norm_weight=None, norm_bias=None,
                 output_norm=None, seed=None, activation="swiglu", norm=None, norm_offset=0.0,
                 eps=1e-5, dropout=0.0, skip=False):  # fmt: skip
    """`cz.ops.feed_forward`."""
    h = _normed(x, norm_weight, norm_bias, kind=norm, offset=norm_offset, eps=eps)
    y = F.linear(activated(F.linear(h, w_up, b_up), activation), w_down, b_down)
    y = y if output_norm is None else rms(y, output_norm, norm_offset, eps)
    y = dropped(y, dropout, seed)
    return x + y if skip else y


def decoder_block(x, y, w_output, w_up, w_down, *, b_output=None, b_up=None, b_down=None,
                  norm_weight=None, norm_bias=None, squares=None, attention_norm=None,
                  feed_forward_norm=None, seed=None, feed_forward_seed=None, activation="swiglu",
                  norm=None, norm_offset=0.0, eps=1e-5, scale=1.0, dropout=0.0,
                  parallel=False):  # fmt: skip
    """`cz.ops.decoder_block`."""
    a = F.linear(y, w_output, b_output)
    a = a if attention_norm is None else rms(a, attention_norm, norm_offset, eps)
    middle = x + scale * dropped(a, dropout, seed)
    h = _normed(x if parallel else middle, norm_weight, norm_bias, squares=squares, kind=norm,
                offset=norm_offset, eps=eps)  # fmt: skip
    f = F.linear(activated(F.linear(h, w_up, b_up), activation), w_down, b_down)
    f = f if feed_forward_norm is None else rms(f, feed_forward_norm, norm_offset, eps)
    stream = middle + scale * dropped(f, dropout, feed_forward_seed)
    return stream, stream.square().sum(-1, keepdim=True)


def sum_and_product_of_columns(gradient, dy, x, *, dtype):
    """The program of `cz.ops.accumulate_weight_gradient`."""
    return (gradient + torch.einsum("mn,mk->nk", dy, x)).to(getattr(torch, dtype))


STOCK = {
    square_sum: lambda x: at_least_single(x).square().sum(-1, keepdim=True),
    programs.norm: norm,
    programs.linear: linear,
    programs.qkv_projection: qkv_projection,
    programs.feed_forward: feed_forward,
    programs.decoder_block: decoder_block,
    added_weight_gradient: sum_and_product_of_columns,
}


def operands(name: str, rows: int, sizes: Mapping[str, int] = SIZES) -> Operands:
    """The arguments of one call of a variant over `rows` rows, in float32."""
    program, shapes, constants, *_ = VARIANTS[name]
    sizes = {**sizes, **(WIDE_HEADS if name == "qkv-partial" else {})}
    sizes = {**sizes, "R": sizes["HD"] // 2, "head_dim": sizes["HD"], "A": sizes["H"] * sizes["HD"],
             "N": (sizes["H"] + 2 * sizes["KV"]) * sizes["HD"]}  # fmt: skip
    made = dict(constants)
    for operand, text in shapes.items():
        shape = [rows if token == "M" else size_of(token, sizes) for token in text.split()]
        value = _tensor(operand, shape)
        made[operand] = value[0] if text.startswith("1 ") and value.dim() else value
    if "squares" in made:
        made["squares"] = made["x"].square().sum(-1, keepdim=True) + torch.rand(rows, 1)
    if program is programs.qkv_projection:
        heads = {"heads": sizes["H"], "key_value_heads": sizes["KV"]}
        made |= {"head_dim": sizes["HD"]} | heads
    return made


def _tensor(name: str, shape: list[int]) -> Tensor:
    """A random operand: weights that keep the size of what they multiply, norms near one."""
    if name.endswith("seed"):
        return torch.randint(2**31, ())
    if name in ("cos", "sin"):
        return getattr(torch, name)(torch.randn(shape))
    if "norm" in name and "bias" not in name:
        return 1.0 + 0.3 * torch.randn(shape)
    if name.startswith("w"):
        return torch.randn(shape) * shape[1] ** -0.5
    return torch.randn(shape)
