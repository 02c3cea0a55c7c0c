"""What values cost to keep and kernels to run: bytes, FLOPs, and the roofline of known GPUs.

Plans are priced at a fixed number of rows. FLOPs are those of products alone. The bytes of a
kernel are what it must move: each operand, load and vector once, each store and reduction once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cadenza.core.ir import Node
from cadenza.core.ops import BOOLEAN, Dim, Op, Type
from cadenza.core.plan import Kernel

ROWS = 16384  # plans must not depend on a call's M
_BYTES = {"float64": 8, "int64": 8, "bfloat16": 2, "float16": 2, "int16": 2}


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return _BYTES.get(dtype, 1 if dtype.startswith(("bool", "float8", "int8", "uint8")) else 4)


def bytes_of(shape: Type, dtype: str, rows: int = ROWS) -> int:
    """Bytes of a stored value of this type."""
    return _size(shape.rows, rows) * _size(shape.columns, rows) * itemsize(dtype)


def _size(dim: Dim, rows: int) -> int:
    return dim if isinstance(dim, int) else rows


class Work(NamedTuple):
    """Floating-point operations of products, and bytes moved to and from memory."""

    flops: int
    bytes: int

    def seconds(self, gpu: Gpu, dtype: str) -> float:
        """The roofline: what takes longer, computing or moving, at sustained rates."""
        return max(self.flops / gpu.flops(dtype), self.bytes / gpu.bytes)


def product_flops(node: Node, rows: int = ROWS) -> int:
    """2 · M · N · K of a product; 0 for anything else."""
    if node.op is not Op.MATMUL:
        return 0
    a = node.inputs[0].type
    inner = a.rows if node.attributes["transpose_a"] else a.columns
    return 2 * _size(node.type.rows, rows) * _size(node.type.columns, rows) * _size(inner, rows)


def moved(nodes: Iterable[Node], dtypes: Mapping[Node, str], rows: int = ROWS) -> int:
    """Bytes of some stored values, each once; constants and indices are nowhere in memory."""
    return sum(
        bytes_of(node.type, "bool" if node.type.kind == BOOLEAN else dtypes[node], rows)
        for node in dict.fromkeys(nodes)
        if node.op not in (Op.CONSTANT, Op.COLUMN_INDEX, Op.ROW_INDEX)
    )


def kernel_work(kernel: Kernel, dtypes: Mapping[Node, str], rows: int = ROWS) -> Work:
    """What one kernel of a plan computes and must move.

    Partials count as the vector that they are finished to: a tile leaves only a few numbers.
    """
    operands = kernel.product.inputs if kernel.product is not None else ()
    flops = product_flops(kernel.product, rows) if kernel.product is not None else 0
    read = moved([*operands, *kernel.loads, *kernel.vectors], dtypes, rows)
    return Work(flops, read + moved([*kernel.stores, *kernel.reductions], dtypes, rows))


def vector_product_work(product: Node, dtypes: Mapping[Node, str], rows: int = ROWS) -> Work:
    """What a matrix-vector product computes and must move."""
    return Work(product_flops(product, rows), moved([product, *product.inputs], dtypes, rows))


class Gpu(NamedTuple):
    """A GPU's nominal rates, dense, and the share of them that real kernels sustain.

    `half` is 16-bit products with float32 sums, `single` float32 ones outside of the tensor cores
    in TFLOP/s; `memory` is TB/s. The shares are of arithmetic and of memory.
    """

    name: str
    half: float
    single: float
    memory: float
    computing: float = 0.667
    moving: float = 0.90

    def nominal(self, dtype: str) -> float:
        """TFLOP/s that the data sheet gives products of this dtype."""
        return self.half if itemsize(dtype) <= 2 else self.single

    def flops(self, dtype: str) -> float:
        """FLOP/s sustained by products of this dtype."""
        return self.nominal(dtype) * 1e12 * self.computing

    @property
    def bytes(self) -> float:
        """Bytes a second sustained."""
        return self.memory * 1e12 * self.moving


# Nominal: the vendors' data sheets, without sparsity (H100 and H200 Tensor Core GPU, A100 80 GB
# SXM, HGX B200 for one GPU, L40S, RTX 4090 in the Ada whitepaper, MI300X). Sustained: an H200 does
# the four bf16 products of a Llama-3-8B layer forward, 7.147 TFLOP, in 10.82 ms one after the other
# (benchmarks/results/layer.json, bare), 660 TFLOP/s, 0.667 of nominal; one of them after a pause
# does 0.79. No other GPU, and no bandwidth, has been measured: this share and 0.9 stand for them.
GPUS = {
    "h100": Gpu("H100 SXM", 989.4, 66.9, 3.35),
    "h200": Gpu("H200", 989.4, 66.9, 4.8),
    "a100": Gpu("A100 SXM 80 GB", 312.0, 19.5, 2.039),
    "b200": Gpu("B200", 2250.0, 75.0, 8.0),
    "l40s": Gpu("L40S", 362.05, 91.6, 0.864),
    "rtx4090": Gpu("RTX 4090", 165.2, 82.6, 1.008),
    "mi300x": Gpu("MI300X", 1307.4, 163.4, 5.3),
}
