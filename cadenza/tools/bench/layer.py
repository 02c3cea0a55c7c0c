"""The suite `layer`: Llama between two attentions, forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from cadenza.core.cost import Work
from cadenza.tools.bench.case import Case, Sizes, Suite
from cadenza.tools.bench.contest import contest
from cadenza.tools.bench.draw import Draw
from cadenza.tools.bench.measurement import Calls
from cadenza.tools.bench.patterns import HEAD, LLAMA, Product
from cadenza.tools.bench.stage import Stage, Transform
from cadenza.tools.bench.subject import Forward, Layer
from cadenza.tools.explain import explain
from cadenza.tools.target import find_target

Tensor = torch.Tensor
FORWARD, BOTH = "forward", "forward-backward"
TOKENS = 16384
WIDTHS = (2048, 4096, 8192)
TRAINED = {"bf16": "bfloat16", "fp16": "float16"}
FORWARD_PRODUCTS = tuple(
    Product(left, right, transpose_right=True)
    for left, right in (("y", "wo"), ("h", "w_gate_up"), ("u", "w_down"), ("h", "w_qkv"))
)
BACKWARD_PRODUCTS = (
    Product("dqkv", "w_qkv"), Product("dqkv", "x", transpose_left=True),
    Product("dx", "w_down"), Product("dx", "u", transpose_left=True),
    Product("dz", "w_gate_up"), Product("dz", "x", transpose_left=True),
    Product("dx", "wo"), Product("dx", "y", transpose_left=True),
)  # fmt: skip


def sizes_of(width: int, **given: int) -> Sizes:
    """The sizes of a layer of a width: F is 8/3 of it rounded up to 256, heads are of 128."""
    head = given.get("HD", HEAD)
    heads = given.get("H", width // head)
    wide = -(-8 * width // (3 * 256)) * 256
    known = {"M": TOKENS, "D": width, "F": wide, "H": heads, "KV": heads, "HD": head}
    return {**known, **given}


class LayerStage(Stage):
    """A layer on operands that are many times as large as a cache."""

    peaks = True

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self.gradients = case.pattern == BOTH
        self.draw = Draw(case.torch_dtype, device, case.seed)
        self.layer = Layer.drawn(self.draw, case.sizes)

    def _calls(self, forward: Forward) -> Calls:
        return [forward.both if self.gradients else forward.call]

    def ours(self) -> Calls:
        """The built-in block."""
        return self._calls(self.layer.ours())

    def stock(self, transform: Transform) -> Calls:
        """Torch's layer."""
        return self._calls(self.layer.stock(transform(self.layer.function)))

    def liger(self) -> Calls:
        """Liger-Kernel's layer."""
        return self._calls(self.layer.liger())

    def makers(self) -> dict[str, Callable[[], Calls]]:
        """As of every suite, and those of this one."""
        return {**super().makers(), "liger": self.liger}

    def bare_products(self) -> Sequence[tuple[Mapping[str, Tensor], Sequence[Product]]]:
        """All products, 4 or 12, on random operands of the sizes that they have."""
        m, d, f = (self.case.sizes[name] for name in ("M", "D", "F"))
        known = dict(self.layer.operands)
        known |= {"h": self.draw.normal(m, d), "u": self.draw.normal(m, f)}
        if not self.gradients:
            return [(known, FORWARD_PRODUCTS)]
        known |= {"dx": self.draw.normal(m, d), "dz": self.draw.normal(m, 2 * f)}
        known["dqkv"] = self.draw.normal(m, known["w_qkv"].shape[0])
        return [(known, (*FORWARD_PRODUCTS, *BACKWARD_PRODUCTS))]

    def work(self) -> Work:
        """Of all kernels of the plans."""
        sizes = [f"{name}={size}" for name, size in self.case.sizes.items()]
        found = explain(find_target("llama", sizes, TRAINED[self.case.dtype]))
        passes = ("forward", "backward") if self.gradients else ("forward",)
        works = [work for name in passes for work in found.fused(name)]
        return Work(sum(w.flops for w in works), sum(w.bytes for w in works))


def _sizes(_: str) -> dict[str, Sizes]:
    widths = {f"D={width}": sizes_of(width) for width in WIDTHS}
    return {**widths, LLAMA: sizes_of(4096, F=14336, H=32, KV=8)}


def _changed(_: str, given: Sizes) -> Sizes:
    known = ("M", "D", "F", "H", "KV", "HD")
    own = {name: size for name, size in given.items() if name in known and name != "D"}
    return sizes_of(given.get("D", 4096), **own)


LAYER = Suite(
    "layer",
    ("ours", "compile", "autotune", "eager", "liger", "bare", "products"),
    (FORWARD, BOTH),
    _sizes,
    _changed,
    partial(contest, LayerStage),
)
