"""What the reader of printed programs refuses; each refusal names the line of the text.

Only what `show` prints is accepted, and nothing of a text is ever executed.
"""

import pytest

from cadenza.core.errors import ProgramError
from cadenza.core.ir import equal
from cadenza.core.parse import parse

HEADER = "def f(x: float32[M, 4]):\n"
EXPRESSION = "an expression of the language"
ASSIGNMENT = "a new name = an expression"
PARAMETER = "a new name: dtype[rows, columns]"
FUNCTION = "one function definition, of plain typed parameters"


def refusal(text: str) -> list[str]:
    """The lines of the error, without their labels."""
    with pytest.raises(ProgramError) as caught:
        parse(text)
    return [line.split(": ", 1)[1].strip() for line in str(caught.value).splitlines()]


def line_of(text: str) -> str:
    with pytest.raises(ProgramError) as caught:
        parse(text)
    return str(caught.value).split(":")[0]


# The lines of a body, with what is found and expected; the fault is in the last line.
BODIES = [
    ("v1 = sinus(x)", "sinus(x)", EXPRESSION),
    ("v1 = exp(y)", "y", EXPRESSION),
    ("v1 = exp(x)\n    v2 = v1 + v3", "v3", EXPRESSION),
    ("v1 = x.shape", "x.shape", EXPRESSION),
    ("return x.T", "x.T", EXPRESSION),
    ("v1 = x[0]", "x[0]", EXPRESSION),
    ("v1 = x > 0.0", "x > 0.0", EXPRESSION),
    ("v1 = 0.0 < x < 1.0", "0.0 < x < 1.0", EXPRESSION),
    ("v1 = x if x else x", "x if x else x", EXPRESSION),
    ("v1 = [x for x in y]", "[x for x in y]", EXPRESSION),
    ("v1 = f'{x}'", "f'{x}'", EXPRESSION),
    ("v1 = not x", "not x", EXPRESSION),
    ("v1 = +x", "+x", EXPRESSION),
    ("v1 = x % 2.0", "x % 2.0", EXPRESSION),
    ("v1 = constant()", "constant()", EXPRESSION),
    ("return [x]", "[x]", EXPRESSION),
    ("return x, (x, x)", "(x, x)", EXPRESSION),
    ("return ()", "()", EXPRESSION),
    ("v1 = x + True", "True", "a number"),
    ("v1 = x + 'a'", "'a'", "a number"),
    ("v1 = x + None", "None", "a number"),
    ("v1 = x * 1j", "1j", "a number"),
    ("v1 = x + constant('a')", "constant('a')", "a number"),
    ("v1 = x**x", "x", "a number or a string"),
    ("v1 = split(x, part=0)", "split(x, part=0)", "the attributes part, inner"),
    ("v1 = split(x, inner=2, part=0)", "split(x, inner=2, part=0)", "the attributes part, inner"),
    ("v1 = exp(x, base=2)", "exp(x, base=2)", "the attributes of none"),
    ("v1 = exp(x, **y)", "exp(x, **y)", "the attributes of none"),
    ("v1 = x + constant(1.0, rows=1)", "constant(1.0, rows=1)", "the attributes rows, columns"),
    ("import os", "import os", ASSIGNMENT),
    ("v1 = v2 = x", "v1 = v2 = x", ASSIGNMENT),
    ("v1, v2 = x", "v1, v2 = x", ASSIGNMENT),
    ("v1 += x", "v1 += x", ASSIGNMENT),
    ("v1: float = x", "v1: float = x", ASSIGNMENT),
    ("x = exp(x)", "x = exp(x)", ASSIGNMENT),
    ("v1 = exp(x)\n    v1 = log(x)", "v1 = log(x)", ASSIGNMENT),
    ("if x:\n        v1 = x", "if x:", ASSIGNMENT),
    ("print(x)", "print(x)", ASSIGNMENT),
    ("return {'a': x, **x}", "{'a': x, **x}", "different strings as keys"),
    ("return {1: x}", "{1: x}", "different strings as keys"),
    ("return {'a': x, 'a': x}", "{'a': x, 'a': x}", "different strings as keys"),
]


@pytest.mark.parametrize(("body", "found", "expected"), BODIES, ids=[b for b, _, _ in BODIES])
def test_a_wrong_line_is_named(body, found, expected):
    ending = "" if body.startswith("return") else "\n    return x"
    text = f"{HEADER}    {body}{ending}\n"
    problem = ["not a printed program", found, expected, "what cadenza.core.text.show prints"]
    assert refusal(text) == problem
    assert line_of(text) == ("line 3" if body.startswith("v1 = exp(x)\n") else "line 2")


@pytest.mark.parametrize(
    ("text", "line", "found", "expected"),
    [
        ("", 1, "0 statements", "one function definition"),
        (f"{HEADER}    return x\nv1 = 1\n", 1, "2 statements", "one function definition"),
        ("v1 = 1", 1, "v1 = 1", FUNCTION),
        (f"@cache\n{HEADER}    return x", 2, "@cache", FUNCTION),
        (f"async {HEADER}    return x", 1, f"async {HEADER}".strip(), FUNCTION),
        ("def f(x: float32[M, 4] = 1):\n    return x", 1, "def f(x: float32[M, 4]=1):", FUNCTION),
        ("def f(*x: float32[M, 4]):\n    return x", 1, "def f(*x: float32[M, 4]):", FUNCTION),
        ("def f(*, x: int64[M, 4]):\n    return x", 1, "def f(*, x: int64[M, 4]):", FUNCTION),
        ("def f(x: int64[M, 4], /):\n    return x", 1, "def f(x: int64[M, 4], /):", FUNCTION),
        ("def f(x: int64[M, 4]) -> x:\n    return x", 1, "def f(x: int64[M, 4]) -> x:", FUNCTION),
        ("def f(x):\n    return x", 1, "x", PARAMETER),
        ("def f(x: float32):\n    return x", 1, "x: float32", PARAMETER),
        ("def f(x: float32[M]):\n    return x", 1, "x: float32[M]", PARAMETER),
        ("def f(x: float32[M, 4, 1]):\n    return x", 1, "x: float32[M, 4, 1]", PARAMETER),
        ("def f(x: float31[M, 4]):\n    return x", 1, "x: float31[M, 4]", PARAMETER),
        ("def f(x: float32[M, N]):\n    return x", 1, "x: float32[M, N]", PARAMETER),
        ("def f(x: float32[M, 4.0]):\n    return x", 1, "x: float32[M, 4.0]", PARAMETER),
        ("def f(x: float32[M, True]):\n    return x", 1, "x: float32[M, True]", PARAMETER),
        ("def f(\n    x: int64[M, 4],\n    x: int64[M, 4],\n):\n    return x", 3,
         "x: int64[M, 4]", PARAMETER),
        ("def f(x: float32[K, 4]):\n    return x", 1, "K", "M or a number of rows"),
        (f"{HEADER}    v1 = exp(x)\n", 2, "v1 = exp(x)", "return values"),
        (f"{HEADER}    return\n", 2, "return", "return values"),
        (f"{HEADER}    pass\n", 2, "pass", "return values"),
        (f"{HEADER}    v1 = exp(x\n    return x\n", 2, "'(' was never closed", "Python's syntax"),
        (f"{HEADER}\n\n    lambda = x\n    return x\n", 4, "invalid syntax", "Python's syntax"),
    ],
)  # fmt: skip
def test_a_wrong_frame_is_named(text, line, found, expected):
    problem, *rest = refusal(text)
    assert line_of(text) == f"line {line}"
    assert (problem, rest[:2]) == ("not a printed program", [found, expected])


# What breaks a type rule is explained as in an author's function, at the line of the text.
@pytest.mark.parametrize(
    ("body", "line", "problem"),
    [
        ("v1 = split(x, part=0, inner=3)\n    return v1", 2, "split of x [M, 4]"),
        ("v1 = exp(x)\n\n    return split(v1, part=0, inner=3)", 4, "split of [M, 4]"),
        ("v1 = exp(x, x)\n    return v1", 2, "exp of x [M, 4] and x [M, 4]"),
        ("v1 = x**2.5\n    return v1", 2, "power of x [M, 4]"),
        ("return {'a': x,\n            'b': x @ x}", 3, "matmul of x [M, 4] and x [M, 4]"),
        ("return x + constant(1.0, rows='K', columns=4)", 2, "add of x [M, 4] and [K, 4]"),
        ("return random(1.5, rows='M', columns=4)", 2, "random of [1, 1]"),
    ],
)
def test_a_wrong_type_names_the_line_of_the_text(body, line, problem):
    text = f"{HEADER}    {body}\n"
    assert line_of(text) == f"line {line}"
    assert refusal(text)[0] == problem


@pytest.mark.parametrize(
    "text",
    [
        HEADER + "    v1 = __import__('pathlib').Path({path}).touch()\n    return x\n",
        HEADER + "    v1 = exp(open({path}, 'w'))\n    return x\n",
        HEADER + "    v1 = x**open({path}, 'w')\n    return x\n",
        HEADER + "    v1 = split(x, part=open({path}, 'w'), inner=1)\n    return x\n",
        HEADER + "    v1 = (lambda: open({path}, 'w'))()\n    return x\n",
        HEADER + "    return constant(open({path}, 'w'))\n",
        "def f(x: float32[M, open({path}, 'w')]):\n    return x\n",
        "def f(x: float32[open({path}, 'w'), 4]):\n    return x\n",
        "def f(x: float32[M, 4] = open({path}, 'w')):\n    return x\n",
        "@open({path}, 'w').write\n" + HEADER + "    return x\n",
    ],
)
def test_nothing_is_executed(text, tmp_path):
    path = tmp_path / "executed"
    with pytest.raises(ProgramError, match=r"line 1|line 2"):
        parse(text.replace("{path}", repr(str(path))))
    assert not path.exists()


def test_spaces_comments_and_parentheses_do_not_matter():
    plain = f"{HEADER}    v1 = exp(x)\n    return v1 * x + 1.0\n"
    spaced = f"# read back\n\n{HEADER}    v1 = exp( x )  # once\n\n    return ((v1*x)) + (1.0)\n"
    assert equal(parse(plain), parse(spaced))
