"""Which class of work a kernel of a profile belongs to, by its name and by what launched it.

Names are those of cuBLAS, cuDNN, CUTLASS, PyTorch's own kernels, TorchInductor, FlashAttention,
NCCL, hipBLASLt and Triton. TorchInductor's names list what was fused, a product's name among them,
so they are judged by their beginning. Cadenza's kernels say what they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cadenza.tools.audit.counting import (
    ATTENTION,
    COMMUNICATION,
    MEMORY,
    OPTIMIZER,
    OTHER,
    PRODUCTS,
)

RULES = (
    (PRODUCTS, r"^cadenza_\w+_product\b"),
    (MEMORY, r"^cadenza_"),
    (COMMUNICATION, r"nccl|rccl|nvshmem|all_?reduce|all_?gather|reduce_scatter|multimem"),
    (OPTIMIZER, r"multi_tensor_apply|fused_?adam|adamw|FusedOptimizer"),
    (MEMORY, r"^triton_(poi|red|per|for|split_scan)_"),
    (
        ATTENTION,
        r"flash_?(fwd|bwd|attn|attention)|pytorch_flash|fmha|sdpa|flex_attention|mem_eff|"
        r"attention_(fwd|bwd|forward|backward)|cudnn::fusion::compute_dot_do_o",
    ),
    (
        PRODUCTS,
        r"nvjet|gemm|gemv|cutlass.*(Kernel|device_kernel)|cublas|splitK|Cijk_|"
        r"^triton_(tem|mm|bmm)|xmma|wgmma|conv.*(fprop|dgrad|wgrad)|matmul",
    ),
    (
        MEMORY,
        r"elementwise|at::native|CatArray|reduce_kernel|softmax|norm|embedding|Memcpy|Memset|"
        r"copy|fill|gather|scatter|index|transpose|dropout|cross_entropy|nll_loss|gelu|silu|rope",
    ),
)
ORIGINS = (
    (OPTIMIZER, r"^Optimizer\.step"),
    (COMMUNICATION, r"^(nccl:|c10d::|_c10d)"),
    (ATTENTION, r"scaled_dot_product|_(flash|efficient|cudnn)_attention|flex_attention"),
    (PRODUCTS, r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$"),
    (MEMORY, r"^(aten|prims)::"),
)


def sort_kernel(name: str, origins: Sequence[str] = ()) -> str:
    """The class of a kernel.

    `origins` are the operations and annotations that it was launched within, the innermost first.
    """
    if any(re.search(ORIGINS[0][1], origin) for origin in origins):
        return OPTIMIZER
    for kind, pattern in RULES:
        if re.search(pattern, name, re.IGNORECASE if kind != MEMORY else 0):
            return kind
    for origin in origins:
        for kind, pattern in ORIGINS:
            if re.search(pattern, origin):
                return kind
    return OTHER
