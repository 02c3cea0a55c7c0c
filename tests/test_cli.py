"""The command line itself: what it answers, and how it refuses what it cannot read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import refusal

from cadenza import __version__
from cadenza.core.errors import BackEndError
from cadenza.tools.cli import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs a command that must be refused in one line, which it returns, without a new file."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: refusal(capsys, tmp_path, arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --steps many", "'--steps'"),
        ("train --steps 1.5", "'--steps'"),
        ("train --steps", "--steps"),
        ("train --width wide", "'--width'"),
        ("train --stpes 10", "--stpes"),
        ("train again", "again"),
        ("trian", "trian"),
        ("--verbose", "--verbose"),
    ],
)
def test_a_command_line_that_cannot_be_read(refused, arguments, said):
    line = refused(*arguments.split())
    assert said in line
    assert "--help" in line


def test_a_back_end_that_does_not_exist(monkeypatch, capsys):
    def unknown(*_, **__):
        raise BackEndError("unknown back end 'abacus'\n  write: reference")

    monkeypatch.setattr("cadenza.tools.train.train", unknown)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "cadenza: unknown back end 'abacus'; write: reference\n"


def test_a_fault_of_ours_is_not_taken_for_bad_input(monkeypatch):
    def broken(*_, **__):
        raise AssertionError("ours")

    monkeypatch.setattr("cadenza.tools.train.train", broken)
    with pytest.raises(AssertionError, match="ours"):
        main(["train"])


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cadenza {__version__}\n"


def test_help_names_every_option_and_its_default(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help"]) == 0
    said = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    for option in ("--steps", "--text", "--out", "--resume", "--compare", "--key-value-heads"):
        assert option in said
    assert "query heads (default 4)" in said
    assert "steps in all (default 500, 50 to compare in float64)" in said


def test_without_a_command_it_lists_them(capsys):
    assert main([]) == 0
    assert "train" in capsys.readouterr().out


# Stands in for the package's public surface, which does need torch.
HELP_PROBE = """
import sys, types
sys.modules["cadenza"] = package = types.ModuleType("cadenza")
package.__path__, package.__version__ = ["cadenza"], "0"
from cadenza.tools.cli import main
main(["train", "--help"])
sys.exit(len({"torch", "matplotlib", "safetensors", "numpy"} & set(sys.modules)))
"""


def test_the_command_line_answers_before_anything_heavy_is_imported():
    done = subprocess.run([sys.executable, "-c", HELP_PROBE], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
