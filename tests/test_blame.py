"""Whose fault an error is: a line of Cadenza's that fails is not told as the author's mistake.

Faults are planted in the compiler, in the checker and in the audit; each must come out as ours.
What an author's code raises, or refuses to take, must come out as the author's.
"""

import math

import pytest
import torch

from cadenza.core.errors import ProgramError, VerificationError
from cadenza.core.ir import Builder
from cadenza.tools.audit.fusion import Kernels
from cadenza.tools.audit.options import AuditOptions
from cadenza.tools.audit.run import audit
from cadenza.tools.blame import OURS, is_ours
from cadenza.tools.check import agreement
from cadenza.tools.check.subject import find_subjects
from cadenza.tools.check.tracing import traced
from cadenza.tools.check.values import Values
from cadenza.tools.fault import Fault
from cadenza.tools.target import load_module

FILE = """
import cadenza as cz
from cadenza import lang as L
from torch import nn
import torch

@cz.block(shapes={"x": "M D"})
def f(x):
    return L.exp(x) * 2.0

def f_reference(x):
    return x.exp() * 2.0

def narrow(y):
    return y.exp() * 2.0

def listed(x):
    return [x.exp() * 2.0]

def refusing(x):
    raise ValueError("no such x")

def misspelt(x):
    return L.gelu(x, aproximate="tanh")

def ill_shaped(x):
    return L.linear(x, torch.ones(3, 5))

def odd_rotary(x):
    return x * cz.ops.Rotary(3).columns

def out_of_range(x):
    return cz.ops.linear_cross_entropy(x, torch.ones(4, x.shape[1]), torch.full((x.shape[0],), 99))

def misnamed():
    return cz.nn.Linear(8, 8, foo=1), torch.zeros(2, 8)

def unknown():
    return cz.nn.DecoderLayer(8, 1, 1, 16, architecture="lama"), torch.zeros(2, 8)

def needing(width):
    return nn.Linear(width, 8), torch.zeros(2, 8)

def untraceable():
    class Eager(nn.Linear):
        def forward(self, x):
            if type(x).__name__ == "FunctionalTensor":  # what torch.compile traces with
                raise ValueError("eager alone")
            return super().forward(x)
    return Eager(8, 8), torch.zeros(2, 8)

def usual():
    return nn.Linear(8, 8), torch.zeros(2, 8)
"""
UNMEASURED = AuditOptions(gpu="h200", measure=False)


@pytest.fixture
def subject(tmp_path, monkeypatch):
    """The program of an author's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    ((one,), _) = find_subjects("mine.py:f", {}, "float32")
    return one


def of_reference(subject, name="f_reference", meanwhile=lambda: None):
    """What is found of a reference in the author's file."""
    found = traced(subject)
    values = Values(subject, found.target, found.graph)
    meanwhile()
    return values._reference(getattr(load_module("mine.py"), name))


def raised(call, kind=Exception):
    """The error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def test_a_fault_of_the_compilers(subject, monkeypatch):
    monkeypatch.delattr(Builder, "constant")
    (finding,) = traced(subject).findings
    assert (finding.holds, finding.cure) == (False, OURS)
    assert "AttributeError: 'Builder' object has no attribute 'constant'" in finding.figure


def test_a_call_that_a_function_of_the_language_does_not_take(subject, tmp_path):
    """Its cure is the function's own parameters."""
    text = FILE.replace("return L.exp(x) * 2.0", "return L.gelu(x, aproximate='tanh')")
    (tmp_path / "other.py").write_text(text, encoding="utf-8")
    ((other,), _) = find_subjects("other.py:f", {}, "float32")
    (finding,) = traced(other).findings
    assert "other.py:9: arguments of L.gelu" in finding.figure
    assert finding.cure == "L.gelu(x, approximate='none')"


def test_a_fault_of_the_checkers(subject, monkeypatch):
    finding = of_reference(subject, meanwhile=lambda: monkeypatch.delattr(agreement, "leaves_of"))
    assert (finding.holds, finding.cure) == (False, OURS)
    assert "f_reference raises NameError" in finding.figure


@pytest.mark.parametrize(
    ("name", "figure", "cure"),
    [
        ("refusing", "refusing raises ValueError: no such x", "def refusing(x): the call's own"),
        ("narrow", "narrow raises TypeError", "def narrow(x): the call's own"),
        ("listed", "output 0 of listed is a list", "return tensors there"),
        ("misspelt", "misspelt raises ProgramError", "def misspelt(x)"),
        ("ill_shaped", "ill_shaped raises RuntimeError", "def ill_shaped(x)"),
        ("odd_rotary", "odd_rotary raises ValueError: rotary embedding of 3", "def odd_rotary(x)"),
        ("out_of_range", "out_of_range raises IndexError", "def out_of_range(x)"),
    ],
)
def test_a_mistake_of_the_authors_reference(subject, name, figure, cure):
    finding = of_reference(subject, name)
    assert finding.holds is False
    assert finding.figure.startswith(figure)
    assert finding.cure.startswith(cure)


def test_a_reference_that_is_right(subject):
    assert of_reference(subject).holds


def test_a_fault_of_the_audits(subject, monkeypatch):
    monkeypatch.delattr(Kernels, "launches")
    with pytest.raises(AttributeError, match="launches"):
        audit("mine.py:usual", UNMEASURED)


def test_what_torch_compile_cannot_trace_is_not_predicted(subject):
    prediction = audit("mine.py:untraceable", UNMEASURED).prediction
    said = "torch.compile cannot trace it: ValueError: eager alone"
    assert prediction.missing["compiled"] == said


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("needing", "needing fails: TypeError: missing a required argument: 'width'"),
        ("refusing", "refusing fails: TypeError"),
        ("misnamed", "misnamed fails: ProgramError.*arguments of cz.nn.Linear"),
        ("unknown", "unknown fails: ValueError: no architecture 'lama'"),
    ],
)
def test_a_function_that_cannot_be_audited(subject, target, said):
    with pytest.raises(Fault, match=said):
        audit(f"mine.py:{target}", UNMEASURED)


@pytest.mark.parametrize(
    "text",
    [
        "def f(:",
        "x = 1\0",
        "x = 1 / 0",
        "import no_such_module",
        "import cadenza; cadenza.ops.Rotary(3)",
        "import cadenza; cadenza.nn.Linear(8, 8, foo=1)",
    ],
)
def test_a_file_that_cannot_be_run(subject, tmp_path, text):
    (tmp_path / "broken.py").write_text(text, encoding="utf-8")
    with pytest.raises(Fault, match=r"broken\.py(:1: | cannot be imported: )"):
        load_module("broken.py")


def test_what_is_raised_on_purpose_is_not_ours():
    assert not is_ours(raised(lambda: load_module("no_such.py")))
    assert not is_ours(raised(lambda: math.sqrt(-1.0)))
    assert not is_ours(raised(lambda: torch.ones(2, 3) @ torch.ones(2, 3)))
    assert not is_ours(ProgramError("a mistake"))
    assert is_ours(VerificationError("a pass broke a program"))


def test_the_first_cause_decides(monkeypatch):
    def called():
        Builder().lift(3.0, None)

    def wrapped():
        try:
            called()
        except AttributeError as error:
            raise RuntimeError("a framework's own words") from error

    monkeypatch.delattr(Builder, "constant")
    assert is_ours(raised(wrapped))
