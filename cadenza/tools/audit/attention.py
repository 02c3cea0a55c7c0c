"""The FLOPs of attention kernels, which skip the pairs of tokens that a mask hides.

Forward is two products, query by key and weights by value; backward computes the first again and
has four more. A causal kernel works on the pairs of a token and those up to it, in a window of W on
the last W of those.
"""

from __future__ import annotations

from typing import Any

NAMES = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention", "flex_attention")


def is_attention(name: str) -> bool:
    """Whether an operation is one of torch's attention kernels."""
    return name.startswith(NAMES)


def pairs(queries: int, keys: int, causal: bool, window: int | None = None) -> int:
    """How many pairs of tokens one head works on."""
    if not causal:
        return queries * keys
    earlier = keys - queries  # the queries are the last tokens of the keys
    seen = (min(earlier + n, window or keys) for n in range(1, queries + 1))
    return sum(max(one, 0) for one in seen)


def attention_flops(function: Any, args: Any, kwargs: Any) -> int:
    """FLOPs of one call of an attention kernel, query [B, H, S, D], value [B, H', T, D']."""
    given = _by_name(function, args, kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    batch, heads, queries, inner = query.shape
    seen = pairs(queries, key.shape[-2], bool(given.get("is_causal")))
    outer = value.shape[-1]
    backward = "backward" in function._schema.name
    numbers = 3 * inner + 2 * outer if backward else inner + outer
    return int(2 * batch * heads * seen * numbers)


def _by_name(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in function._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)
