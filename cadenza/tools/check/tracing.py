"""Whether a function is a program: it runs on symbols, and every operation's types fit."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cadenza.core import lang
from cadenza.core.errors import ProgramError
from cadenza.core.ir import Graph, verify
from cadenza.core.ops import BOOLEAN, TypeRuleError
from cadenza.core.storage import dtypes_of
from cadenza.core.trace import trace
from cadenza.tools.blame import OURS, is_ours
from cadenza.tools.check.findings import Finding
from cadenza.tools.check.subject import Subject
from cadenza.tools.target import Target, declaration, place_of

TRACES, TYPES = "traces", "typechecks"
ONE_RUN = "the function is run once, on symbols: use what cadenza.lang has, on values alone"


class Traced(NamedTuple):
    """A target with its graph, and the findings; no graph where it is no program."""

    findings: Sequence[Finding]
    target: Target | None = None
    graph: Graph | None = None


def traced(subject: Subject) -> Traced:
    """Runs the function on symbols at small sizes. Raises Fault where a size is missing."""
    if not subject.variant.shapes:
        cure = declaration(subject.program)
        return Traced([Finding(TRACES, False, f"{subject.place}: no declared shapes", cure)])
    target = subject.small()
    try:
        graph = verify(graph_of(target))
    except ProgramError as error:
        return Traced(_refused(error, place_of(error, subject.program)))
    except Exception as error:  # noqa: BLE001  # whatever an author's function does on symbols
        if is_ours(error):
            return Traced([Finding(TRACES, False, f"{subject.place}: {_said(error)}", OURS)])
        if _is_unwritten(error, subject):
            said = f"{_place(error, subject)}: not written yet"
            return Traced([Finding(TRACES, False, said, f"write the body of {subject.name}")])
        said = f"{_place(error, subject)}: {_said(error)}"
        return Traced([Finding(TRACES, False, said, cure_of(error))])
    done = Finding(TRACES, True, f"{len(graph.nodes())} values")
    return Traced([done, Finding(TYPES, True, signature(graph))], target, graph)


def graph_of(target: Target) -> Graph:
    """The program of a target; ProgramError, or what the author's function raises."""
    function = target.program.specializations.function
    return trace(function, target.signature, name=target.program.__name__)


def signature(graph: Graph) -> str:
    """The types of outputs, as `f(x: bfloat16[M, 64]) -> 0: bfloat16[M, 96]` has them."""
    stored = dtypes_of(graph)
    outputs = [
        f"{'' if graph.structure == 'value' else f'{label}: '}"
        f"{'bool' if node.type.kind == BOOLEAN else stored[node]}{node.type}"
        for label, node in zip(graph.labels, graph.outputs, strict=True)
    ]
    inputs = [f"{i.attributes['name']} {i.type}" for i in graph.inputs]
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def summary(error: ProgramError) -> str:
    """An error in one line, without its place and what to write."""
    problem, found, expected, _ = error.parts
    parts = [f"found {found}" if found else "", f"expected {expected}" if expected else ""]
    return f"{problem}: {'; '.join(filter(None, parts))}"


def cure_of(error: Exception) -> str:
    """What to write where Python itself refuses a line of an author's function."""
    said = str(error)
    if isinstance(error, NameError):
        return "a name that the file defines, a parameter of the function, or L. before it"
    if isinstance(error, ValueError) and "to unpack" in said:
        return "a, b = L.split(x) for two parts, L.columns(x, start, stop) for any other"
    called = said.partition("(")[0]
    if isinstance(error, TypeError) and called in lang.__all__:
        return f"L.{called}({_parameters(getattr(lang, called))})"
    return ONE_RUN


def _parameters(function: Callable[..., Any]) -> str:
    """The parameters of a function, without their types."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)


def _refused(error: ProgramError, place: str) -> list[Finding]:
    text, write = f"{place}: {summary(error)}", error.parts[-1]
    if isinstance(error.__context__, TypeRuleError):
        return [Finding(TRACES, True, f"up to {place}"), Finding(TYPES, False, text, write)]
    return [Finding(TRACES, False, text, write)]


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _is_unwritten(error: Exception, subject: Subject) -> bool:
    """Whether the author's own file raises it, as a body that is to be written does."""
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, NotImplementedError) and raised == subject.place.rpartition(":")[0]


def _place(error: Exception, subject: Subject) -> str:
    """The innermost line of the author's own file that an error passed through."""
    file = subject.place.rpartition(":")[0]
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"{file}:{lines[-1]}" if lines else subject.place
