"""What is told of the library: each docstring of `cz.nn` and `cz.ops` says what a caller must know.

Shapes, dtypes, errors and options by name; of modules also mathematics and parameters. Each rule is
given a docstring that breaks it.
"""

import inspect
import re

import pytest
import torch
from torch import nn

import cadenza as cz

PUBLIC = {f"{home}.{name}": getattr(getattr(cz, home), name)
          for home in ("nn", "ops") for name in getattr(cz, home).__all__}  # fmt: skip
RULES = {
    "shapes": r"\[[^\]]*[a-z.][^\]]*\]",
    "a dtype": r"\b(float64|float32|float16|bfloat16|int64|no dtype)\b",
    "what it raises": r"\b[Rr]aises (\w+Error)\b",
}
MATHEMATICS = {"mathematics": r"= .*[·√Σ+]"}
# Arguments that only stand in a signature because torch's has them, and do nothing.
DEPRECATED = {"size_average", "reduce"}


def faults(text, rules, names=()):
    """What a docstring leaves out, of the rules and of the names of arguments or parameters."""
    words = " ".join(text.split())
    found = [name for name, pattern in rules.items() if not re.search(pattern, words)]
    return found + [name for name in names if not re.search(rf"\b{name}\b", words)]


def arguments_of(public):
    """The names that a call takes by keyword, but what a module is made of."""
    called = getattr(public, "function", public)
    known = inspect.signature(called).parameters.values()
    return [p.name for p in known if p.kind is not p.VAR_KEYWORD and p.name not in DEPRECATED]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_tells_shapes_dtypes_errors_and_options(name):
    public = PUBLIC[name]
    rules = RULES | (MATHEMATICS if name.startswith("nn.") else {})
    assert faults(public.__doc__, rules, arguments_of(public)) == []


SMALL = {
    cz.nn.Attention: lambda: cz.nn.Attention(12, 2, 1, architecture="qwen3"),
    cz.nn.DecoderLayer: lambda: cz.nn.DecoderLayer(12, 2, 1, 16, architecture="gemma2"),
    cz.nn.FeedForward: lambda: cz.nn.FeedForward(12, 16, bias=True),
    cz.nn.LayerNorm: lambda: cz.nn.LayerNorm(12),
    cz.nn.Linear: lambda: cz.nn.Linear(12, 16, norm=nn.LayerNorm(12)),
    cz.nn.LinearCrossEntropy: lambda: cz.nn.LinearCrossEntropy(12, 16, bias=True),
    cz.nn.RMSNorm: lambda: cz.nn.RMSNorm(12),
}


def test_every_module_is_made():
    assert {public for public in PUBLIC.values() if _is_module(public)} == SMALL.keys()


def _is_module(public):
    return isinstance(public, type) and issubclass(public, nn.Module)


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.__name__)
def test_parameters_are_told_by_name(kind):
    with torch.device("meta"):
        module = SMALL[kind]()
    names = {name.split(".")[0] for name, _ in module.named_parameters()}
    assert faults(kind.__doc__, {}, names) == []


def test_what_is_left_out_is_found():
    said = "y = x · weight of x `[..., width]` in float32; raises ProgramError."
    assert faults(said, RULES | MATHEMATICS, ["width"]) == []
    for rule, gone in {
        "shapes": "[..., width]", "a dtype": "float32", "what it raises": "raises ",
        "mathematics": "·",
    }.items():  # fmt: skip
        assert faults(said.replace(gone, ""), RULES | MATHEMATICS) == [rule]
    assert faults(said, RULES, ["widths"]) == ["widths"]
