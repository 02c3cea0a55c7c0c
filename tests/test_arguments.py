"""Whatever is given to a function of the language, it is taken or refused in the author's words.

What each refusal says is in test_errors and docs/errors.md. No other error may come: it would name
a line of Cadenza's own, and no cure.
"""

import contextlib
import inspect
import math

import numpy
import pytest
import torch

from cadenza import block
from cadenza import lang as L
from cadenza.core.errors import CadenzaError, ProgramError

X = torch.randn(5, 8)
ODD = [None, "a", [1], {}, 3.5, math.nan, -1, 0, True, object(), 1j, b"x", torch.float32,
       torch.ones(2), numpy.ones(3), numpy.float32(2), lambda: 0]  # fmt: skip


def arguments(function):
    """Something odd in each place in turn, beside values, and beside numbers."""
    parameters = inspect.signature(function).parameters.values()
    count = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
    for place in range(count):
        for given in ([X] * count, [X, *[2] * count][:count]):
            for odd in ODD:
                yield [*given[:place], odd, *given[place + 1 :]]


def called_with(function, given):
    """A function of x that calls another: with x where X stands."""
    return lambda x: function(*(x if one is X else one for one in given))


@pytest.mark.parametrize("name", L.__all__)
def test_in_a_program(name):
    for given in arguments(getattr(L, name)):
        with contextlib.suppress(CadenzaError):
            block(called_with(getattr(L, name), given))(X)


@pytest.mark.parametrize(
    "call",
    [
        lambda: L.row_sum(torch.ones(2, 3, 8)),  # torch would add up what stands in dimension 1
        lambda: L.column_max(torch.ones(8)),
        lambda: L.logsumexp(X, torch.ones(5)),  # torch would take a row for a column
        lambda: L.columns(torch.ones(2, 3, 8), 0, 2),
        lambda: L.matmul(torch.ones(2, 3, 8), X, transpose_b=True),
        lambda: L.random(torch.ones(8), 3),
        lambda: L.where(X, X, 0.0),
        lambda: L.cast(X, torch.int8),
    ],
)
def test_on_tensors(call):
    with pytest.raises(ProgramError):
        call()


def test_a_seed_is_a_tensor_of_any_shape():
    for seed in (torch.tensor(3), torch.tensor([3]), torch.tensor([[3]])):
        assert torch.equal(L.random(X, seed), L.random(X, 3))
