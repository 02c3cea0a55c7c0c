"""Every exercise can be solved: its solution is short, right by the task's own words, and checked.

What is judged is the exercise's file with the solution's function in the place of its own.
"""

import ast
import re
import runpy

import pytest
import torch
from programs import check_against, check_direction
from solved import EXERCISES, NAMES, SOLUTIONS, function, lines_of, solution_lines, solved

from cadenza.tools.check.operands import drawn, index_limits
from cadenza.tools.check.run import judge
from cadenza.tools.check.subject import REFERENCE, find_subjects
from cadenza.tools.check.tracing import graph_of
from cadenza.tools.cli import main

README = EXERCISES / "README.md"
LINES = 12
each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def file(tmp_path, request):
    """The exercise of a test's `name`, solved."""
    name = request.getfixturevalue("name")
    path = tmp_path / f"{name}.py"
    path.write_text(solved(name), encoding="utf-8")
    return path


def head(name, folder):
    """A function without its body: decorators, name, parameters and the comment on shapes."""
    text = (folder / f"{name}.py").read_text(encoding="utf-8")
    node = function(text, name)
    first, _ = lines_of(node)
    return text.splitlines()[first - 1 : node.body[0].lineno - 1]


def test_there_are_twenty_each_with_a_solution_and_a_row():
    assert len(NAMES) == 20
    assert sorted(path.stem for path in SOLUTIONS.glob("*.py")) == NAMES
    rows = re.findall(r"^\| \[(\w+)\.py\]\((\w+)\.py\) \| (.+) \|$", README.read_text("utf-8"),
                      re.MULTILINE)  # fmt: skip
    assert sorted(row[0] for row in rows) == NAMES
    assert all(row[0] == row[1] for row in rows)


@each
def test_an_exercise_is_a_statement_a_reference_and_nothing_written_yet(name, capsys):
    text = (EXERCISES / f"{name}.py").read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)).startswith("Exercise: ")
    assert function(text, f"{name}{REFERENCE}")
    (statement,) = function(text, name).body
    assert ast.unparse(statement) == "raise NotImplementedError"
    assert main(["check", str(EXERCISES / f"{name}.py"), "--gpu", "none"]) == 1
    said = capsys.readouterr().out
    assert "not written yet" in said
    assert f"write the body of {name}" in said


@each
def test_a_solution_is_short_and_changes_nothing_else(name):
    assert 1 <= solution_lines(name) <= LINES
    assert head(name, SOLUTIONS) == head(name, EXERCISES)


@each
def test_value_and_gradients_are_those_of_the_tasks_words(name, file):
    module = runpy.run_path(str(file))
    program, reference = module[name], module[f"{name}{REFERENCE}"]
    ((subject,), _) = find_subjects(str(file), {}, "bfloat16")
    for target, rows in ((subject.small(), 33), (subject.small(**subject.odd()), 7)):
        limits = index_limits(graph_of(target))
        operands = drawn(target, rows, limits)
        check_against(program, reference, operands, floor=1e-3)
    check_direction(program, operands)


@each
def test_a_solution_passes_the_check(name, file, capsys):
    assert main(["check", str(file), "--gpu", "none"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@each
def test_a_solution_passes_the_check_with_its_kernels_compiled(name, file, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path / "kernels"))
    ((subject,), _) = find_subjects(str(file), {}, "bfloat16")
    judgement = judge(subject, ["h100"])
    assert judgement.holds, [f for f in judgement.findings if f.holds is False]
    assert all(d["registers"] > 0 for d in judgement.compiled)
    assert {d["kernel"] for d in judgement.compiled} >= {"F1", "B1", "B2"}


def test_another_formula_is_no_solution(tmp_path, capsys):
    text = solved("capped_entropy")
    path = tmp_path / "capped_entropy.py"
    for right, wrong in (("/ total", "/ total * 1.001"), ("+ cap", ""), ("e * z", "e")):
        assert right in text
        path.write_text(text.replace(right, wrong))
        assert main(["check", str(path), "--gpu", "none"]) == 1
        assert "capped_entropy_reference" in capsys.readouterr().out


def test_a_task_is_solved_in_place_of_its_own_function():
    text = solved("huber")
    assert "NotImplementedError" not in text
    assert text.count("def huber(") == 1
    assert "near * (e - 0.5 * near)" in text
    assert "def huber_reference(" in text


def test_operands_of_the_tasks_are_drawn_alike():
    ((subject,), _) = find_subjects(str(EXERCISES / "contrastive.py"), {}, "bfloat16")
    made = drawn(subject.small(), 5, {"target": 32})
    assert made["target"].shape == (5,)
    assert made["target"].dtype == torch.int64
