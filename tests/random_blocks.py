"""Random whole blocks, written from numbers: the strategy behind test_random_blocks.

As in random_programs, an instruction is a few whole numbers that choose among what is possible
where it is read. Here the steps are those of Transformer blocks: a residual stream, norms, several
products in chain and side by side, gated units, rotary embedding, reductions used twice, losses.
A recipe's repr is code that replays it. The epsilon of norms is large, so that
a row of equal values, whose norm is rounding alone, is not blown up.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from cadenza import lang as L
from cadenza.core.ops import M
from cadenza.core.trace import Operand, Signature

LIMIT = 1000  # of the numbers in an instruction
ROWS = (4, 1, 7, 0)
Tensor = torch.Tensor


class BlockRecipe(NamedTuple):
    """A block as text; operands as "rows columns"; labels of what it returns; M rows."""

    operands: dict[str, str]
    lines: list[str]
    returns: str
    rows: int

    def function(self) -> Callable[..., Any]:
        """The block as a Python function over `L`."""
        text = "\n    ".join([f"def block({', '.join(self.operands)}):", *self.lines])
        scope: dict[str, Any] = {"L": L}
        exec(f"{text}\n    return {self.returns}", scope)
        return scope["block"]

    def signature(self, dtype: str = "float64") -> Signature:
        """What compiling it takes, with all real operands of one dtype."""
        found = []
        for name, text in self.operands.items():
            rows, columns = text.split()
            own = "int64" if name == "t" else dtype
            found.append(Operand(name, M if rows == M else int(rows), int(columns), own))
        return Signature(tuple(found))

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Random operands: weights keep the size of what they multiply, gains are near one."""
        return {name: self._tensor(name, text, dtype) for name, text in self.operands.items()}

    def _tensor(self, name: str, text: str, dtype: torch.dtype) -> Tensor:
        rows, columns = text.split()
        shape = (self.rows if rows == M else int(rows), int(columns))
        if name == "t":
            return torch.randint(-1, 3, shape)
        values = torch.randn(shape, dtype=torch.float64)
        if name[0] in "wv":
            values = values * shape[name[0] == "w"] ** -0.5
        return (1.0 + 0.3 * values if name[0] == "g" else values).to(dtype)


class Value(NamedTuple):
    """A matrix of M rows, by name."""

    name: str
    columns: int


class Impossible(Exception):
    """Nothing at hand fits the instruction, which is left out."""


class Writer:
    """Writes the lines of a block; every instruction is a sequence of numbers that choose."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.operands = {"x": f"M {width}"}
        self.lines: list[str] = []
        self.stream = Value("x", width)
        self.values = [self.stream]
        self.vectors: list[str] = []  # columns [M, 1]
        self.codes: Iterator[int] = iter(())

    def choose(self, options: Sequence[Any]) -> Any:
        """One of the options; the first when the numbers have run out."""
        if not options:
            raise Impossible
        return options[next(self.codes, 0) % len(options)]

    def value(self, fits: Callable[[Value], bool] = lambda v: True) -> Value:
        """A value that fits, most often the newest, so that blocks get deep."""
        options = [v for v in reversed(self.values) if fits(v)]
        if not options:
            raise Impossible
        return options[int(len(options) * (next(self.codes, 0) / LIMIT) ** 3)]

    def operand(self, letter: str, rows: int | str, columns: int) -> str:
        """An operand of this letter and shape: a new one, or now and then one that exists."""
        text = f"{rows} {columns}"
        known = [n for n, t in self.operands.items() if n[0] == letter and t == text]
        if known and self.choose([False, True, False]):
            return known[0]
        name = f"{letter}{len(self.operands)}"
        self.operands[name] = text
        return name

    def line(self, text: str) -> str:
        """A line for a new value; its name."""
        name = f"h{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def matrix(self, text: str, columns: int) -> Value:
        """A line for a new matrix of M rows."""
        self.values.append(Value(self.line(text), columns))
        return self.values[-1]

    def instruction(self, codes: Sequence[int]) -> None:
        """A few lines, or none where nothing fits."""
        self.codes = iter(codes)
        try:
            self.choose(STEPS)(self)
        except Impossible:
            return

    def recipe(self, codes: Sequence[int], rows: int) -> BlockRecipe:
        """The block that returns the newest value and up to two others."""
        self.codes = iter(codes)
        kept = [self.values[-1].name]
        if self.choose([False, True, True]):
            kept.append(self.stream.name)
        if self.choose([False, True]):
            kept.append(self.value().name)
        if self.vectors and self.choose([True, False]):
            kept.append(self.vectors[-1])
        kept = list(dict.fromkeys(kept))
        returns = ", ".join(f"'{chr(97 + k)}': {name}" for k, name in enumerate(kept))
        return BlockRecipe(self.operands, self.lines, f"{{{returns}}}", rows)


# --- instructions ---------------------------------------------------------------------------------


def normed(writer: Writer, v: Value) -> str:
    """A norm of a value, as text."""
    forms = ["L.rms_norm({v}, {g}, 0.25)", "L.layer_norm({v}, {g}, {b}, eps=0.25)",
             "L.rms_norm({v}, None, 0.25)", "L.layer_norm({v}, None, eps=0.25)",
             "L.rms_norm({v}, {g}, 0.25, offset=1.0)"]  # fmt: skip
    form = writer.choose(forms)
    given = {k: writer.operand(k, 1, v.columns) for k in "gb" if f"{{{k}}}" in form}
    return form.format(v=v.name, **given)


def product(writer: Writer, v: Value, columns: int) -> str:
    """A value times a weight, with or without a bias, as text."""
    form = writer.choose(["L.linear({v}, {w})", "L.linear({v}, {w}, {b})", "{v} @ {u}"])
    shapes = {"w": (columns, v.columns), "b": (1, columns), "u": (v.columns, columns)}
    letters = {"w": "w", "b": "b", "u": "v"}
    given = {
        k: writer.operand(letters[k], *shape) for k, shape in shapes.items() if f"{{{k}}}" in form
    }
    return form.format(v=v.name, **given)


def norm(writer: Writer) -> None:
    """A norm alone."""
    v = writer.value()
    writer.matrix(normed(writer, v), v.columns)


def project(writer: Writer) -> None:
    """A product, most often of a normed value."""
    v = writer.value()
    if writer.choose([True, False, True]):
        v = writer.matrix(normed(writer, v), v.columns)
    columns = writer.choose([2 * writer.width, 6, writer.width, 3, 4])
    writer.matrix(product(writer, v, columns), columns)


def residual(writer: Writer) -> None:
    """The stream plus a product, which may have a norm of its own."""
    v = writer.value()
    added = Value(writer.line(product(writer, v, writer.width)), writer.width)
    if writer.choose([False, False, True]):
        added = Value(writer.line(normed(writer, added)), writer.width)
    writer.stream = writer.matrix(f"{writer.stream.name} + {added.name}", writer.width)


def side_by_side(writer: Writer) -> None:
    """The stream plus two products."""
    a, b = writer.value(), writer.value()
    texts = [writer.line(product(writer, v, writer.width)) for v in (a, b)]
    writer.stream = writer.matrix(f"{writer.stream.name} + {' + '.join(texts)}", writer.width)


def activate(writer: Writer) -> None:
    """An activation."""
    v = writer.value()
    form = writer.choose(["L.silu({0})", "L.gelu({0}, 'tanh')", "L.gelu({0})", "L.tanh({0})",
                          "L.relu({0})", "L.softcap({0}, 2.0)", "L.sigmoid({0}) * {0}",
                          "L.exp(-({0} * {0}))"])  # fmt: skip
    writer.matrix(form.format(v.name), v.columns)


def gate(writer: Writer) -> None:
    """A gated unit of the two halves of a value, or of interleaved columns."""
    v = writer.value(lambda v: v.columns % 2 == 0)
    form = writer.choose(["L.swiglu({0})", "L.geglu({0})", "L.reglu({0})", "interleaved"])
    if form == "interleaved":
        parts = writer.line(f"L.split({v.name}, 1)")
        form = f"L.silu({parts}[0]) * {parts}[1]"
    writer.matrix(form.format(v.name), v.columns // 2)


def rotate(writer: Writer) -> None:
    """Rotary embedding of some heads, now and then of normed ones."""
    v = writer.value(lambda v: v.columns % 2 == 0)
    head_dim = writer.choose([n for n in range(2, v.columns + 1, 2) if v.columns % n == 0])
    if writer.choose([False, False, True]):
        gain = writer.operand("g", 1, head_dim)
        v = writer.matrix(f"L.qk_norm({v.name}, {gain}, {head_dim}, eps=0.25)", v.columns)
    cos, sin = (writer.operand(letter, M, head_dim // 2) for letter in "cs")
    heads = writer.choose(range(1, v.columns // head_dim + 1))
    inter = writer.choose([False, True])
    text = f"L.rope({v.name}, {cos}, {sin}, {head_dim}, heads={heads}, interleaved={inter})"
    writer.matrix(text, v.columns)


def reduce_rows(writer: Writer) -> None:
    """One number a row, for later."""
    v = writer.value()
    form = writer.choose(["L.row_mean({0} * {0})", "L.row_sum({0}) * 0.25", "L.row_variance({0})",
                          "L.row_max({0})", "L.logsumexp({0})"])  # fmt: skip
    writer.vectors.append(writer.line(form.format(v.name)))


def use_column(writer: Writer) -> None:
    """A matrix and one number a row, a reduction or an operand."""
    v = writer.value()
    column = writer.choose([*reversed(writer.vectors), writer.operand("z", M, 1)])
    form = writer.choose(["{v} * {c}", "{v} - {c}", "{v} * L.rsqrt({c} * {c} + 0.5)",
                          "{v} / ({c} * {c} + 1.0)", "{v} * L.sigmoid({c}) + {c}"])  # fmt: skip
    writer.matrix(form.format(v=v.name, c=column), v.columns)


def use_row(writer: Writer) -> None:
    """A matrix and one number a column: an operand, a sum of columns, or a scalar."""
    v = writer.value()
    given = writer.choose(["{g}", "L.column_sum({v}) * 0.25", "{s}", "L.tanh({b})",
                           "L.row_sum(L.column_sum({v})) * 0.1"])  # fmt: skip
    operands = {k: writer.operand(k, 1, v.columns) for k in "gb" if f"{{{k}}}" in given}
    if "{s}" in given:
        operands["s"] = writer.operand("q", 1, 1)
    form = writer.choose(["{v} * ", "{v} + ", "{v} - 0.5 * "])
    writer.matrix((form + given).format(v=v.name, **operands), v.columns)


def combine(writer: Writer) -> None:
    """Two values of one width."""
    a = writer.value()
    b = writer.value(lambda v: v.columns == a.columns)
    form = writer.choose(["{0} + {1}", "{0} * {1}", "{0} - 0.5 * {1}", "L.maximum({0}, {1})",
                          "{0} * L.row_mean({1}) + {1} * L.row_mean({0})"])  # fmt: skip
    writer.matrix(form.format(a.name, b.name), a.columns)


def arrange(writer: Writer) -> None:
    """Values beside one another, or some columns of one."""
    a, b = writer.value(), writer.value(lambda v: v.columns <= 12)
    if a.columns > 2 and writer.choose([True, False]):
        writer.matrix(f"L.columns({a.name}, 1, {a.columns})", a.columns - 1)
    else:
        writer.matrix(f"L.concat({a.name}, {b.name})", a.columns + b.columns)


def across_rows(writer: Writer) -> None:
    """A product over the rows, and a value times it: the weight is made here."""
    a, b = writer.value(lambda v: v.columns > 1), writer.value(lambda v: v.columns > 1)
    scale = writer.choose(["0.1", f"{writer.operand('g', 1, a.columns)}.T * 0.1"])
    gram = writer.line(f"L.matmul({a.name}, {b.name}, True) * {scale}")
    writer.matrix(f"{a.name} @ {gram}", b.columns)


def vector_product(writer: Writer) -> None:
    """A row made of the columns' sums, through a weight, added to a product."""
    v = writer.value(lambda v: v.columns > 1)
    w = writer.operand("w", 5, v.columns)
    row = writer.line(f"L.linear(L.column_sum({v.name}) * 0.1, {w})")
    writer.matrix(f"L.linear({v.name}, {w}) * 0.5 + {row}", 5)


def loss(writer: Writer) -> None:
    """The cross-entropy of logits, one number a row."""
    v = writer.value()
    logits = writer.matrix(product(writer, v, 3), 3)
    writer.operands["t"] = "M 1"
    text = f"L.logsumexp({logits.name}, L.pick({logits.name}, t))"
    writer.vectors.append(writer.line(text))


def nothing(writer: Writer) -> None:
    """No line: what an instruction of zeros is, so that hypothesis shrinks to few lines."""


STEPS = [
    nothing, norm, activate, activate, gate, gate, rotate, reduce_rows, use_column, use_row,
    combine, arrange, across_rows, vector_product, loss, side_by_side,
    *[project] * 5, *[residual] * 4,
]  # fmt: skip

CODES = st.lists(st.integers(0, LIMIT - 1), min_size=8, max_size=8)


def written(instructions: Sequence[Sequence[int]], width: int, rows: int) -> BlockRecipe:
    """The recipe of some instructions; the last one chooses what is returned."""
    writer = Writer(width)
    *lines, last = instructions
    for codes in lines:
        writer.instruction(codes)
    return writer.recipe(last, rows)


@st.composite
def block_recipes(draw: st.DrawFn) -> BlockRecipe:
    """Random blocks and calls."""
    instructions = draw(st.lists(CODES, min_size=3, max_size=9))
    return written(instructions, draw(st.sampled_from([4, 5, 2, 1])), draw(st.sampled_from(ROWS)))
