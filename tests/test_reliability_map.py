"""docs/reliability.md names tests for each number: pytest collects them all, and no test that is
named after a number is missing there."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import cadenza as cz

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = range(1, 39)
# Those that kernels could have as well; the others are of Python alone.
OF_KERNELS = {1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19, 23, 24, 26, 27, 28, 31,
              35, 38}  # fmt: skip
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py"))


def sections(text: str) -> dict[int, str]:
    """What the page says of each number. Raises ValueError for a number that stands there twice."""
    found = re.split(r"^### (\d+)\. ", text, flags=re.MULTILINE)[1:]
    numbers = [int(number) for number in found[::2]]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"a number stands twice among {numbers}")
    return dict(zip(numbers, found[1::2], strict=True))


def named(text: str) -> list[str]:
    """The tests that a text lists."""
    return re.findall(r"^- `(tests/\S+::\w+)`$", text, re.MULTILINE)


@cache
def functions(path: str) -> frozenset[str]:
    """The tests that stand in a file; none of a file that is not there."""
    file = ROOT / path
    if not file.is_file() or not file.name.startswith("test_"):
        return frozenset()
    body = ast.parse(file.read_text(encoding="utf-8")).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return frozenset(name for name in names if name.startswith("test_"))


def missing(text: str) -> list[str]:
    """The tests that a text lists and that don't exist."""
    pairs = [test.split("::") for test in named(text)]
    return ["::".join(pair) for pair in pairs if pair[1] not in functions(pair[0])]


def unlisted(text: str) -> list[str]:
    """The tests named after a number that its section doesn't list."""
    own = sections(text)
    places = {f"{path}::{name}": name for path in FILES for name in functions(path)}
    numbered = {test: re.match(r"test_(\d\d)_", name) for test, name in places.items()}
    return [
        test
        for test, match in numbered.items()
        if match and test not in named(own.get(int(match[1]), ""))
    ]


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs/reliability.md").read_text(encoding="utf-8")


def test_every_number_is_there_with_tests_of_its_own(page):
    own = sections(page)
    assert list(own) == list(NUMBERS)
    assert [number for number, text in own.items() if not named(text)] == []


def test_every_number_has_a_test_that_is_named_after_it(page):
    """Without a GPU, and on one where a kernel could have the fault."""
    for number, text in sections(page).items():
        own = [test for test in named(text) if f"::test_{number:02}_" in test]
        on_gpu = [test for test in own if test.startswith("tests/gpu/")]
        assert len(own) > len(on_gpu), number
        assert on_gpu or number not in OF_KERNELS, number


def test_every_test_that_is_named_stands_in_its_file(page):
    assert missing(page) == []


def test_every_line_of_a_list_names_a_test(page):
    lines = [line for line in page.splitlines() if line.startswith("- ")]
    assert len(lines) == len(named(page))


def test_every_test_with_a_number_is_listed_under_it(page):
    assert unlisted(page) == []


@pytest.mark.slow
def test_pytest_collects_every_test_that_is_named(page):
    wanted = set(named(page))
    files = sorted({test.split("::")[0] for test in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    collected = {re.sub(r"\[.*", "", line) for line in done.stdout.splitlines() if "::" in line}
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert sorted(wanted - collected) == []


def test_28_the_overloads_of_all_forward_operations_are_listed(page):
    assert cz.ops.linear_cross_entropy is not None  # the operations are there once it is imported
    shown = set(re.findall(r"torch\.ops\.cadenza\.(\w+)\.default", sections(page)[28]))
    every = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("cadenza::")}  # fmt: skip
    inside = {"scaled_gradient", "accumulate_weight_gradient", "sum"}
    assert shown == {name for name in every if not name.endswith("_backward")} - inside


# --- the checks themselves ------------------------------------------------------------------------

HERE = "tests/test_reliability_map.py"
GOOD = f"### 1. One\n\n- `{HERE}::test_every_line_of_a_list_names_a_test`\n"


def test_a_test_that_does_not_exist_is_caught():
    assert missing(GOOD) == []
    assert missing(GOOD.replace("every_line", "no_line")) != []
    assert missing(GOOD.replace("reliability_map", "reliability_mop")) != []
    assert missing(GOOD.replace("::test_every", "::sections_test_every")) != []


def test_a_number_that_stands_twice_is_caught():
    with pytest.raises(ValueError, match="twice"):
        sections(GOOD + GOOD)


def test_a_numbered_test_under_another_number_is_caught():
    test = f"{HERE}::test_28_the_overloads_of_all_forward_operations_are_listed"
    assert test in unlisted(f"### 1. One\n\n- `{test}`\n")
    assert test not in unlisted(f"### 28. One\n\n- `{test}`\n")
