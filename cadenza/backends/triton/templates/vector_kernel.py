"""The kernel of products of a matrix with a vector.

It stands apart because importing it loads Triton, which plans are made without.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cadenza_vector_product(
    vector, matrix, out, N, K, stride,
    ALONG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[n] = sum of vector[k] times matrix[n, k] if ALONG, else matrix[k, n], in float32."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for first in range(0, K, BK):
        depth = first + tl.arange(0, BK)
        given = tl.load(vector + depth, mask=depth < K, other=0.0).to(tl.float32)
        if ALONG:
            mask = (columns < N)[:, None] & (depth < K)[None, :]
            at = columns.to(tl.int64)[:, None] * stride + depth[None, :]
            block = tl.load(matrix + at, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(block * given[None, :], 1)
        else:
            mask = (depth < K)[:, None] & (columns < N)[None, :]
            at = depth.to(tl.int64)[:, None] * stride + columns[None, :]
            block = tl.load(matrix + at, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(block * given[:, None], 0)
    tl.store(out + columns, total, mask=columns < N)
