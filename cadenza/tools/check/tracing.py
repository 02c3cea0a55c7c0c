"""Whether a function is a program: it runs on symbols, and every operation's types fit."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import NamedTuple

from cadenza.core.errors import ProgramError
from cadenza.core.ir import Graph, verify
from cadenza.core.ops import BOOLEAN, TypeRuleError
from cadenza.core.storage import dtypes_of
from cadenza.core.trace import trace
from cadenza.tools.check.findings import Finding
from cadenza.tools.check.subject import Subject
from cadenza.tools.target import Target

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
        cure = "write @cz.block(shapes={'x': 'M D', 'w': 'N D'}), @cz.epilogue likewise"
        return Traced([Finding(TRACES, False, f"{subject.place}: no declared shapes", cure)])
    target = subject.small()
    try:
        graph = verify(graph_of(target))
    except NotImplementedError as error:
        said = f"{_place(error, subject)}: not written yet"
        return Traced([Finding(TRACES, False, said, f"write the body of {subject.name}")])
    except ProgramError as error:
        return Traced(_refused(error))
    except Exception as error:  # noqa: BLE001  # whatever an author's function does on symbols
        return Traced(
            [Finding(TRACES, False, f"{_place(error, subject)}: {_said(error)}", ONE_RUN)]
        )
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


def summary(error: ProgramError) -> tuple[str, str]:
    """An error in one line, without what to write, and what to write."""
    problem, found, expected, write = error.parts
    place, _, _ = str(error).partition(f": {problem}")
    parts = [f"found {found}" if found else "", f"expected {expected}" if expected else ""]
    return f"{place}: {problem}: {'; '.join(filter(None, parts))}", write


def _refused(error: ProgramError) -> list[Finding]:
    text, write = summary(error)
    if isinstance(error.__context__, TypeRuleError):
        place = text.split(": ", 1)[0]
        return [Finding(TRACES, True, f"up to {place}"), Finding(TYPES, False, text, write)]
    return [Finding(TRACES, False, text, write)]


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _place(error: Exception, subject: Subject) -> str:
    """The innermost line of the author's own file that an error passed through."""
    file = subject.place.rpartition(":")[0]
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"{file}:{lines[-1]}" if lines else subject.place
