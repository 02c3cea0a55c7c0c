"""How tests of errors say what a message must be: its place and its four parts, word for word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cadenza.core.errors import CadenzaError

Parts = tuple[str, str, str, str]


def tensor(*shape: int) -> torch.Tensor:
    """A random tensor of float32."""
    return torch.randn(shape)


def line_of(function: Callable[..., Any], offset: int = 0) -> str:
    """`file:line` of a function's first line, or of one further down."""
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


def message(place: str, parts: Parts) -> str:
    """The text of an error at a place, of its problem, found, expected and write."""
    problem, found, expected, write = parts
    return f"{place}: {problem}\n  found:    {found}\n  expected: {expected}\n  write:    {write}"


def assert_raises(kind: type[CadenzaError], call: Callable[[], Any], text: str) -> None:
    """The call raises exactly this kind of error with exactly this text."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value) == text
