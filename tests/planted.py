"""What planting faults takes: the shortest case of an operation, random programs, the checks.

The checks are those that the tests of gradients and of random programs are made of.
"""

import functools
import random

from case_functions import FUNCTIONS
from case_operations import OPERATIONS
from cases import Case
from programs import check_against, check_direction
from random_programs import LIMIT, Recipe, written

from cadenza.core.errors import CadenzaError
from cadenza.core.ir import Graph
from cadenza.core.ops import REAL, Op
from cadenza.library import operator, specialize

CASES = [*OPERATIONS, *FUNCTIONS]
# Shapes that come out wrong end in torch or in the verifier before a check sees a number.
REFUSED = (AssertionError, RuntimeError, CadenzaError)
ROWS = 5


def forget(monkeypatch):
    """Puts away what is compiled."""
    monkeypatch.setattr(specialize, "BY_DIGEST", {})
    monkeypatch.setattr(operator, "BY_DIGEST", specialize.BY_DIGEST)


@functools.cache
def graphs() -> list[tuple[Case, Graph]]:
    """Every case with its program, the shortest first."""
    found = [(c, c.program().graph(**c.tensors(ROWS))) for c in CASES]
    return sorted(found, key=lambda pair: len(pair[1].nodes()))


def depends(graph: Graph, op: Op, position: int) -> bool:
    """Whether the argument at this position of some such operation is made of the operands."""
    made = set()
    for node in graph.nodes():
        if node.op is Op.INPUT or any(i in made for i in node.inputs):
            made.add(node)
    arguments = [n.inputs[position] for n in graph.nodes() if n.op is op and n.inputs[position:]]
    return any(a in made and a.type.kind == REAL for a in arguments)


def shortest(op: Op, position: int = 0) -> Case:
    """The shortest case that differentiates through this argument."""
    return next(c for c, graph in graphs() if depends(graph, op, position))


def using(op: Op) -> Case:
    """The shortest case with this operation."""
    return next(c for c, graph in graphs() if any(n.op is op for n in graph.nodes()))


@functools.cache
def random_recipes() -> list[tuple[Recipe, Graph]]:
    """Random programs, the same in every run."""
    numbers, found = random.Random(1), []
    for _ in range(600):
        codes = [[numbers.randrange(LIMIT) for _ in range(9)] for _ in range(8)]
        recipe = written(codes, numbers.randint(2, 7), 3)
        found.append((recipe, recipe.program().graph(**recipe.tensors())))
    return found


def against_plain(chosen: Case) -> None:
    """The first check of test_gradients."""
    program = chosen.program()
    check_against(program, program.plain, chosen.tensors(ROWS))


def against_oracle(chosen: Case) -> None:
    """The second check of test_gradients."""
    check_against(chosen.program(), chosen.expected, chosen.tensors(ROWS))


def along_a_direction(chosen: Case) -> None:
    """The third check of test_gradients."""
    check_direction(chosen.program(), chosen.tensors(ROWS))


GRADIENT_CHECKS = (against_plain, against_oracle, along_a_direction)


def fails(check, *arguments) -> bool:
    """Whether a check raises."""
    try:
        check(*arguments)
    except REFUSED:
        return True
    return False
