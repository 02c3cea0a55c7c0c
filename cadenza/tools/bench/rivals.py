"""Liger-Kernel and FlashInfer on the patterns that they have, where they are installed.

Each is torch's own product and their fused operation after it. `prepared` gives a call on torch's
operands; a backward is autograd's of their forward, run beforehand. They save the normalised
activation or u in forward, so their backward doesn't make it again as torch's does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cadenza.tools.bench.case import Unavailable
from cadenza.tools.bench.measurement import Call
from cadenza.tools.bench.stock import EPS

Tensor = torch.Tensor
Operands = dict[str, Any]
Preparation = Callable[[Operands], Call]


def need(package: str) -> None:
    """Raises Unavailable where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")


def prepared(package: str, pattern: str, operands: Operands) -> Call:
    """A pattern by a package; raises Unavailable where it hasn't that, or isn't installed."""
    need(package)
    table = LIGER if package == "liger_kernel" else FLASHINFER
    if pattern not in table:
        raise Unavailable(f"{package} has no such operation")
    return table[pattern](operands)


# --- Liger-Kernel ---------------------------------------------------------------------------------


def liger_gated(z: Tensor) -> Tensor:
    """SwiGLU of [gate; up], by the operation that takes both at once where there is one."""
    from liger_kernel import ops

    fused = getattr(ops, "LigerFusedGateUpSiLUMulFunction", None)
    return ops.LigerSiLUMulFunction.apply(*z.chunk(2, dim=-1)) if fused is None else fused.apply(z)


def liger_norm(x: Tensor, residual: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and that sum."""
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, g, EPS)


def liger_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries and keys [1, heads, M, head_dim], rotated, and values [M, ...].

    It takes queries and keys apart: here half of the first `heads` heads each.
    """
    from liger_kernel.ops import LigerRopeFunction

    head_dim = cos.shape[-1]
    *qk, v = qkv.tensor_split((heads // 2 * head_dim, heads * head_dim), dim=-1)
    q, k = (part.unflatten(-1, (-1, head_dim))[None].transpose(1, 2) for part in qk)
    return *LigerRopeFunction.apply(q, k, cos[None], sin[None]), v


def _liger_residual_rms(o: Operands) -> Call:
    return lambda: liger_norm(F.linear(o["y"], o["w"]), o["x"], o["g"])


def _liger_swiglu(o: Operands) -> Call:
    return lambda: liger_gated(F.linear(o["x"], o["w"]))


def _liger_rope(o: Operands) -> Call:
    return lambda: liger_rope(F.linear(o["x"], o["w"]), o["cos"], o["sin"], o["heads"])


def _liger_rms_backward(o: Operands) -> Call:
    with torch.enable_grad():
        leaves = o["x"], torch.zeros_like(o["x"]), o["g"]
        x, residual, g = (leaf.detach().requires_grad_() for leaf in leaves)
        outputs = liger_norm(x, residual, g)

    def run() -> Any:
        upstream = (o["dz"] @ o["w"], o["dres"])
        return torch.autograd.grad(outputs, (x, g), upstream, retain_graph=True)

    return run


def _liger_swiglu_backward(o: Operands) -> Call:
    with torch.enable_grad():
        z = o["z"].detach().requires_grad_()
        u = liger_gated(z)
    return lambda: torch.autograd.grad(u, z, o["dx"] @ o["w"], retain_graph=True)


def _liger_cross_entropy(o: Operands) -> Call:
    from liger_kernel.transformers.functional import liger_cross_entropy

    loss = partial(liger_cross_entropy, reduction="none")
    return lambda: loss(F.linear(o["x"], o["w"]), o["target"])


LIGER: dict[str, Preparation] = {
    "residual_rms": _liger_residual_rms,
    "swiglu": _liger_swiglu,
    "rope": _liger_rope,
    "rms_backward": _liger_rms_backward,
    "swiglu_backward": _liger_swiglu_backward,
    "cross_entropy": _liger_cross_entropy,
}


def liger_model(model: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Puts Liger-Kernel's operations into a Llama of transformers; what its steps run inside.

    Some of them it puts into the module that all models of the kind take their code from: there
    they are while a step runs, and gone behind it.
    """
    need("liger_kernel")
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    try:
        apply_liger_kernel_to_llama(model=model)
        changed = {name: one for name, one in names.items() if one is not before.get(name)}
    finally:
        names.update(before)
    return partial(_replaced, names, changed)


@contextmanager
def _replaced(names: dict[str, Any], changed: Mapping[str, Any]) -> Iterator[None]:
    before = {name: names[name] for name in changed}
    names.update(changed)
    try:
        yield
    finally:
        names.update(before)


# --- FlashInfer: forward --------------------------------------------------------------------------


def _flashinfer_residual_rms(o: Operands) -> Call:
    from flashinfer.norm import fused_add_rmsnorm

    residual = o["x"].clone()  # added to in place, call after call, while its norm stays finite

    def run() -> None:
        fused_add_rmsnorm(F.linear(o["y"], o["w"]), residual, o["g"], EPS)

    return run


def _flashinfer_swiglu(o: Operands) -> Call:
    from flashinfer.activation import silu_and_mul

    return lambda: silu_and_mul(F.linear(o["x"], o["w"]))


def _flashinfer_rope(o: Operands) -> Call:
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    half, head_dim = o["head_dim"] // 2, o["head_dim"]
    table = torch.cat((o["cos"][:, :half], o["sin"][:, :half]), dim=-1).float()
    positions = torch.arange(table.shape[0], device=table.device)
    width, most = o["heads"] * head_dim, o["heads"] // 2 * head_dim

    def run() -> Tensor:
        qkv = F.linear(o["x"], o["w"])
        q, k, _ = qkv.tensor_split((most, width), dim=-1)
        apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_dim, table)
        return qkv

    return run


FLASHINFER: dict[str, Preparation] = {
    "residual_rms": _flashinfer_residual_rms,
    "swiglu": _flashinfer_swiglu,
    "rope": _flashinfer_rope,
}
