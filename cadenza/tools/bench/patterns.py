"""The patterns of the suite `kernels`: a program, what torch runs instead, and operands of both.

Factors that either side takes in earlier than the other are powers of two, so that both start
from the same numbers and differ by their own rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cadenza.library.function import Program
from cadenza.tools.bench import programs, stock
from cadenza.tools.bench.draw import Draw

Tensor = torch.Tensor
Operands = dict[str, Any]
Sizes = Mapping[str, int]
HEAD = 128
LLAMA = "llama-3-8b"


class Product(NamedTuple):
    """A bare product of two operands by name, either transposed."""

    left: str
    right: str
    transpose_left: bool = False
    transpose_right: bool = False

    def matrices(self, operands: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What torch.mm takes: the operands or views of them."""
        a, b = operands[self.left], operands[self.right]
        return (a.T if self.transpose_left else a), (b.T if self.transpose_right else b)

    def flops(self, operands: Mapping[str, Tensor]) -> int:
        """2 · M · N · K."""
        a, b = self.matrices(operands)
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]


class Drawn(NamedTuple):
    """The operands of one case: the program's, and torch's."""

    ours: Operands
    stock: Operands


@dataclass(frozen=True)
class Pattern:
    """One kernel: `sizes` are those of Llama-3-8B, `returned` names what torch's function gives.

    `aligned` makes of the program's operands and outputs what torch's function gives.
    """

    name: str
    program: Program
    function: Callable[..., Any]
    returned: tuple[str, ...]
    product: Product
    sizes: Sizes
    draw: Callable[[Draw, Sizes], Drawn]
    aligned: Callable[[Operands, Mapping[str, Tensor]], dict[str, Tensor]]

    def named(self, found: Any) -> dict[str, Tensor]:
        """What torch's function gave, by name."""
        return dict(
            zip(self.returned, found if isinstance(found, tuple) else (found,), strict=True)
        )

    def stock(self, operands: Operands) -> dict[str, Tensor]:
        """What torch's function gives, by name."""
        return self.named(self.function(**operands))


def _residual_rms(draw: Draw, sizes: Sizes) -> Drawn:
    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    both = {"y": draw.normal(m, k), "w": draw.weight(n, k), "x": draw.normal(m, n)}
    both["g"] = draw.row(n)
    return Drawn(both, both)


def _scaled(draw: Draw, sizes: Sizes) -> tuple[Operands, Operands]:
    """x with a row factor r, and x · r."""
    x, r = draw.normal(sizes["M"], sizes["K"]), draw.powers(sizes["M"])[:, None]
    w = draw.weight(sizes["N"], sizes["K"])
    return {"x": x, "w": w, "r": stock.wide(r)}, {"x": x * r, "w": w}


def _swiglu(draw: Draw, sizes: Sizes) -> Drawn:
    return Drawn(*_scaled(draw, sizes))


def _rope(draw: Draw, sizes: Sizes) -> Drawn:
    ours, theirs = _scaled(draw, sizes)
    head = sizes.get("HD", HEAD)
    constants = {"head_dim": head, "heads": sizes.get("heads", sizes["N"] // head)}
    cos, sin = draw.angles(sizes["M"], head // 2)
    twice = {"cos": torch.cat((cos, cos), dim=-1), "sin": torch.cat((sin, sin), dim=-1)}
    return Drawn(ours | {"cos": cos, "sin": sin} | constants, theirs | twice | constants)


def _rms_backward(draw: Draw, sizes: Sizes) -> Drawn:
    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    r = draw.powers(m)[:, None]
    x, dz = draw.normal(m, n) / r, draw.normal(m, k)
    w, g, dres = draw.weight(k, n, inner=k), draw.row(n), draw.normal(m, n)
    scaled = dz * r
    # In a block this is the row sum of dz · z, left by the kernel that made dz.
    dot = (scaled.double() * ((x.double() * g) @ w.double().T)).sum(-1, keepdim=True)
    c = stock.wide((dot * r.double() ** 2 / -n).to(torch.promote_types(x.dtype, torch.float32)))
    ours = {"dz": scaled, "w": w, "x": x, "dres": dres, "g": g, "c": c, "dtype": str(g.dtype)}
    return Drawn(ours, {"dz": dz, "w": w, "x": x, "r": stock.wide(r), "g": g, "dres": dres})


def _swiglu_backward(draw: Draw, sizes: Sizes) -> Drawn:
    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    both = {"dx": draw.normal(m, k), "w": draw.weight(k, n, inner=k), "z": draw.normal(m, 2 * n)}
    return Drawn(both | {"r": stock.wide(draw.powers(m)[:, None])}, both)


def _dw(draw: Draw, sizes: Sizes) -> Drawn:
    m, n, k = sizes["M"], sizes["N"], sizes["K"]
    dz, x, g = draw.normal(k, m), draw.normal(k, n), draw.powers(n)
    return Drawn({"dz": dz, "x": x, "g": g}, {"dz": dz, "n": x * g})


def _dx(draw: Draw, sizes: Sizes) -> Drawn:
    k = sizes["K"]
    both = {"dz": draw.normal(sizes["M"], k), "w": draw.weight(k, sizes["N"], inner=k)}
    return Drawn(both, both)


def _cross_entropy(draw: Draw, sizes: Sizes) -> Drawn:
    both = {"x": draw.normal(sizes["M"], sizes["K"]), "w": draw.weight(sizes["N"], sizes["K"])}
    target = draw.whole(sizes["M"], sizes["N"])
    return Drawn(both | {"target": target}, both | {"target": target})


def _same(_: Operands, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(outputs)


def _normed(_: Operands, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"x1": outputs["x1"], "h": outputs["h"] * outputs["r"]}


def _parted(operands: Operands, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    qk, v = outputs["qkv"].tensor_split((operands["heads"] * operands["head_dim"],), dim=-1)
    return {"qk": qk, "v": v}


def _unscaled(operands: Operands, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"dz": outputs["dz"] / operands["r"], "u": outputs["u"]}


def _summed(_: Operands, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"dx": outputs["dx"], "dg": outputs["dg"][0]}


def _loss(_: Operands, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"loss": outputs["loss"].flatten()}


TOKENS = 16384
PATTERNS = (
    Pattern("residual_rms", programs.residual_rms, stock.residual_rms, ("x1", "h"),
            Product("y", "w", transpose_right=True), {"M": TOKENS, "N": 4096, "K": 4096},
            _residual_rms, _normed),
    Pattern("swiglu", programs.swiglu, stock.swiglu, ("z", "u"),
            Product("x", "w", transpose_right=True), {"M": TOKENS, "N": 28672, "K": 4096},
            _swiglu, _same),
    Pattern("rope", programs.rope, stock.rope, ("qk", "v"),
            Product("x", "w", transpose_right=True),
            {"M": TOKENS, "N": 6144, "K": 4096, "heads": 40}, _rope, _parted),
    Pattern("rms_backward", programs.rms_backward, stock.rms_backward, ("dx", "dg", "n"),
            Product("dz", "w"), {"M": TOKENS, "N": 4096, "K": 28672}, _rms_backward, _summed),
    Pattern("swiglu_backward", programs.swiglu_backward, stock.swiglu_backward, ("dz", "u"),
            Product("dx", "w"), {"M": TOKENS, "N": 14336, "K": 4096}, _swiglu_backward, _unscaled),
    Pattern("dw", programs.dw, stock.dw, ("dw",), Product("dz", "x", transpose_left=True),
            {"M": 28672, "N": 4096, "K": TOKENS}, _dw, _same),
    Pattern("dx", programs.dx, stock.dx, ("dx",), Product("dz", "w"),
            {"M": TOKENS, "N": 4096, "K": 4096}, _dx, _same),
    Pattern("cross_entropy", programs.cross_entropy, stock.cross_entropy, ("loss",),
            Product("x", "w", transpose_right=True), {"M": 8192, "N": 128256, "K": 4096},
            _cross_entropy, _loss),
)  # fmt: skip
