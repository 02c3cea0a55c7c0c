"""What a value costs to keep: bytes at the fixed number of rows that plans are priced at."""

from __future__ import annotations

from cadenza.core.ops import Dim, Type

ROWS = 16384  # plans must not depend on a call's M
_BYTES = {"float64": 8, "int64": 8, "bfloat16": 2, "float16": 2, "int16": 2}


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return _BYTES.get(dtype, 1 if dtype.startswith(("bool", "float8", "int8", "uint8")) else 4)


def bytes_of(shape: Type, dtype: str) -> int:
    """Bytes of a stored value of this type."""
    return _size(shape.rows) * _size(shape.columns) * itemsize(dtype)


def _size(dim: Dim) -> int:
    return dim if isinstance(dim, int) else ROWS
