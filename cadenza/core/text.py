"""The printed form of a program and its digest; core/parse reads it back.

The form is a small part of Python's own syntax: one function with typed parameters, one line a
named value, expressions with operators and calls. It holds all that has a meaning, so a digest of
it is the identity of the program. Products are called acc1, acc2, …, other lines v1, v2, … unless
the author gave a name.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from unicodedata import normalize

from cadenza.core.ir import Graph, Node
from cadenza.core.ops import Op

LANGUAGE_VERSION = 1
LINE = 88
COMPARISON, SUM, PRODUCT, SIGN, POWER, ATOM = range(6)
INFIX = {Op.ADD: ("+", SUM), Op.SUB: ("-", SUM), Op.MUL: ("*", PRODUCT), Op.DIV: ("/", PRODUCT)}


def digest(graph: Graph) -> str:
    """64 hexadecimal digits: equal in every process, different for any other printed program."""
    return hashlib.sha256(f"cadenza {LANGUAGE_VERSION}\n{show(graph)}".encode()).hexdigest()


def show(graph: Graph, names: Mapping[Node, str] | None = None) -> str:
    """The printed form; `parse(show(graph))` is equal to the graph.

    `names` may call values otherwise, inputs too, to read beside a plan with these names.
    """
    printer = _Printer(graph, names or {})
    lines = [_header(graph, printer.texts), *(f"    {line}" for line in printer.lines())]
    return "\n".join([*lines, f"    return {printer.returned()}", ""])


def _header(graph: Graph, texts: Mapping[Node, Text]) -> str:
    parameters = [f"{texts[i].text}: {_annotation(i)}" for i in graph.inputs]
    header = f"def {graph.name}({', '.join(parameters)}):"
    if len(header) <= LINE:
        return header
    return "\n".join([f"def {graph.name}(", *(f"    {p}," for p in parameters), "):"])


def _annotation(node: Node) -> str:
    return f"{node.attributes['dtype']}[{node.type.rows}, {node.type.columns}]"


class Text(NamedTuple):
    """An expression and how tightly it binds."""

    text: str
    binding: int = ATOM

    def within(self, binding: int) -> str:
        """The text as an operand of something that binds like `binding`."""
        return self.text if self.binding >= binding else f"({self.text})"


class _Printer:
    """Decides which values get a line of their own and what each line says."""

    def __init__(self, graph: Graph, names: Mapping[Node, str]) -> None:
        self.graph = graph
        self.names = {**graph.names, **names}
        self.nodes = graph.nodes()
        self.uses = Counter(i for n in self.nodes for i in n.inputs)
        self.uses.update(graph.outputs)
        self.texts = {i: Text(names.get(i, str(i.attributes["name"]))) for i in graph.inputs}
        self.taken = {text.text for text in self.texts.values()}
        self.serial: Counter[str] = Counter()

    def lines(self) -> Iterator[str]:
        for node in self.nodes:
            if node.op is Op.INPUT:
                continue
            text = expression(node, [self.texts[i] for i in node.inputs])
            if self._inline(node, text):
                self.texts[node] = text
            else:
                self.texts[node] = Text(self._fresh(node))
                yield f"{self.texts[node].text} = {text.text}"

    def returned(self) -> str:
        values = [self.texts[o].text for o in self.graph.outputs]
        if self.graph.structure == "dict":
            pairs = zip(self.graph.labels, values, strict=True)
            return "{" + ", ".join(f"{label!r}: {value}" for label, value in pairs) + "}"
        if self.graph.structure == "tuple":
            return ", ".join(values) + ("," if len(values) == 1 else "")
        return values[0]

    def _inline(self, node: Node, text: Text) -> bool:
        if node.op is Op.CONSTANT:
            return True
        single = self.uses[node] <= 1 and node not in self.names
        return single and node.op is not Op.MATMUL and len(text.text) <= LINE

    def _fresh(self, node: Node) -> str:
        stem = "acc" if node.op is Op.MATMUL else "v"
        name = normalize("NFKC", self.names.get(node, ""))  # as Python reads names
        while not name or name in self.taken:
            stem = self.names.get(node, stem)
            self.serial[stem] += 1
            name = f"{stem}{self.serial[stem]}"
        self.taken.add(name)
        return name


def expression(node: Node, inputs: list[Text]) -> Text:
    """What an operation says over the texts of its inputs."""
    attributes = node.attributes
    if node.op in INFIX:
        return _infix(*INFIX[node.op], *inputs)
    if node.op is Op.COMPARE:
        sides = [i.within(SUM) for i in inputs]
        return Text(f"{sides[0]} {attributes['relation']} {sides[1]}", COMPARISON)
    if node.op is Op.NEG and node.inputs[0].op is not Op.CONSTANT:
        return Text(f"-{inputs[0].within(POWER)}", SIGN)
    if node.op is Op.POWER:
        return Text(f"{inputs[0].within(ATOM)}**{attributes['exponent']}", POWER)
    if node.op is Op.MATMUL:
        return _matmul(attributes["transpose_a"], attributes["transpose_b"], *inputs)
    if node.op is Op.CONSTANT:
        return _constant(node)
    arguments = [i.text for i in inputs]
    arguments += [f"{name}={value!r}" for name, value in attributes.items()]
    return Text(f"{node.op.label}({', '.join(arguments)})")


def _infix(sign: str, binding: int, left: Text, right: Text) -> Text:
    return Text(f"{left.within(binding)} {sign} {right.within(binding + 1)}", binding)


def _matmul(transpose_a: bool, transpose_b: bool, a: Text, b: Text) -> Text:
    left = f"{a.within(ATOM)}.T" if transpose_a else a.within(PRODUCT)
    right = f"{b.within(ATOM)}.T" if transpose_b else b.within(PRODUCT + 1)
    return Text(f"{left} @ {right}", PRODUCT)


def _constant(node: Node) -> Text:
    value = node.attributes["value"]
    finite = math.isfinite(value)
    shape = (node.type.rows, node.type.columns)
    if finite and shape == (1, 1):
        return Text(repr(value), SIGN if repr(value).startswith("-") else ATOM)
    number = repr(value) if finite else repr(str(value))
    sizes = "" if shape == (1, 1) else f", rows={shape[0]!r}, columns={shape[1]!r}"
    return Text(f"constant({number}{sizes})")
