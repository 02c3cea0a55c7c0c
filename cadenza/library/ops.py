"""Operations that are more than one program: linear + cross-entropy, in chunks of rows."""

from __future__ import annotations

from cadenza.library.cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
