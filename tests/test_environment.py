"""What stands around the code: the environment that make builds, and what every test runs under.

The Makefile is run in a folder of its own with a Python that only pretends: nothing is installed.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INPUTS = ("Makefile", "pyproject.toml", "constraints.txt")

# Stands in for a Python that makes environments whose pip writes down how it was called.
PRETENDER = """#!/bin/sh
if [ "$2" = venv ]; then
  mkdir -p .venv/bin
  printf '#!/bin/sh\\necho "$@" >> installed\\nexit PIP_EXIT\\n' > .venv/bin/python
  printf '#!/bin/sh\\necho "cadenza $@"\\n' > .venv/bin/cadenza
  chmod +x .venv/bin/python .venv/bin/cadenza
fi
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with what make needs."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path)
    pretend(tmp_path)
    return tmp_path


def pretend(folder, pip_exit=0):
    """Puts the pretended Python there, its pip succeeding or not."""
    python = folder / "python"
    python.write_text(PRETENDER.replace("PIP_EXIT", str(pip_exit)))
    python.chmod(0o755)


def make(folder, *arguments):
    """Runs make as a person would, not as a part of the make that runs the tests."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "PYTHON=./python", *arguments],
        cwd=folder,
        env=environment | {"MFLAGS": ""},
        capture_output=True,
        text=True,
    )


def test_make_train_builds_the_environment_once_and_passes_arguments_on(checkout):
    first, second = (make(checkout, "train", "ARGS=--steps 10") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert second.stdout.splitlines()[-1] == "cadenza train --steps 10"
    called = (checkout / "installed").read_text().splitlines()
    assert called == ["-m pip install --constraint constraints.txt --editable .[dev]"]


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_what_is_needed_builds_the_environment_again(checkout, changed):
    make(checkout, "train")
    (checkout / ".venv" / "left_over").touch()
    later = (checkout / ".venv" / ".installed").stat().st_mtime + 1
    os.utime(checkout / changed, (later, later))
    make(checkout, "train")
    assert len((checkout / "installed").read_text().splitlines()) == 2
    assert not (checkout / ".venv" / "left_over").exists()


def test_a_failed_installation_is_not_taken_for_a_finished_one(checkout):
    pretend(checkout, pip_exit=1)
    assert make(checkout, "train").returncode != 0
    assert not (checkout / ".venv" / ".installed").exists()
    pretend(checkout)
    assert make(checkout, "train").returncode == 0


@pytest.mark.parametrize(
    "lack", ["sys.version_info = (3, 10, 13)", "sys.modules['venv'] = None", "1 / 0"]
)
def test_a_python_that_will_not_do_is_named_in_one_line(checkout, lack):
    probe = f'{sys.executable} -c "import sys; {lack}; exec(sys.argv[1])" "$2"'
    (checkout / "python").write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then {probe}; else echo Python 3.10.13; fi\n'
    )
    done = make(checkout, "train")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make:")]
    assert done.returncode != 0
    assert len(said) == 1
    assert re.search(r"needs Python 3\.11 .*venv.*Python 3\.10\.13.*PYTHON=", said[0])
    assert not (checkout / ".venv").exists()


def test_continuous_integration_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make test"


def test_every_dependency_is_pinned():
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    needed = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    names = {re.match(r"[\w-]+", requirement).group() for requirement in needed}
    assert names <= set(pinned)


def test_the_number_of_examples_follows_the_command_line(request):
    if request.config.getoption("--hypothesis-profile"):
        pytest.skip("another profile was asked for")
    makefile = (ROOT / "Makefile").read_text()
    quick = re.search(r'^quick:.*\n.* -m "(.*?)"', makefile, re.MULTILINE)[1]
    usual = 100 if request.config.getoption("markexpr") == quick else 500
    expected = 5000 if request.config.getoption("--long") else usual
    assert settings.default.max_examples == expected
    assert settings.default.deadline is None
    assert not settings.default.derandomize


def test_every_test_starts_from_the_same_seed():
    assert torch.initial_seed() == 0
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_every_example_starts_from_the_same_seed():
    drawn = []

    @settings(max_examples=20)
    @given(st.integers())
    def draw(_):
        drawn.append(torch.rand(()).item())

    draw()
    assert len(drawn) > 1
    assert len(set(drawn)) == 1
