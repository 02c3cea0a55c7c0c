"""The forward of an accelerated norm that stands between layers: the last one of a model."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from cadenza.integrations.hf.layer import is_few, is_traced
from cadenza.integrations.hf.plan import NormKind, has_eps
from cadenza.integrations.hf.replace import PLAN, Forward
from cadenza.library import programs
from cadenza.library.weights import is_plain


def norm_forward(stock: Any) -> Forward:
    """The forward of accelerated norms of a class."""

    @functools.wraps(stock.forward)
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        kind = self.__dict__.get(PLAN)
        if (
            kind is None
            or is_few(hidden_states)
            or is_traced()
            or not _fits(self, kind, hidden_states)
        ):
            return stock.forward(self, hidden_states)
        return programs.norm(
            hidden_states, self.weight, getattr(self, "bias", None), kind=kind.kind,
            offset=kind.offset, eps=kind.eps,
        )  # fmt: skip

    return forward


def _fits(norm: Any, kind: NormKind, x: Tensor) -> bool:
    return is_plain(norm.weight) and norm.weight.dtype == x.dtype and has_eps(norm, kind.eps)
