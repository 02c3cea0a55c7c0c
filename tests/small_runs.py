"""Runs of `cadenza train` small enough for a test, and what they leave behind."""

import json

from cadenza.tools.cli import main

SIZES = "--width 32 --layers 1 --feed-forward 48 --context 16 --batch 2"
SMALL = SIZES.split()
PNG = b"\x89PNG\r\n\x1a\n"
# A sample as long as the command's own takes longer than ten steps of these models.
SAMPLE_BYTES = ("cadenza.tools.train.SAMPLE_BYTES", 8)


def train(out, *more):
    """Runs the command in this process on a small model; its exit code."""
    return main(["train", "--out", str(out), *SMALL, *map(str, more)])


def metrics(folder):
    """What the run in a folder wrote down."""
    return json.loads((folder / "metrics.json").read_text())


def contents(folder):
    """Every file below a folder, with its bytes, and every folder."""
    inside = list(folder.rglob("*"))
    return {path: path.read_bytes() if path.is_file() else None for path in inside}


def refusal(capsys, folder, arguments):
    """The line with which a command is refused, leaving the folder as it was."""
    before = contents(folder)
    capsys.readouterr()
    assert main(list(map(str, arguments))) == 2
    said = capsys.readouterr().err
    assert said.startswith("cadenza: ")
    assert said.endswith("\n")
    assert said.count("\n") == 1
    assert contents(folder) == before
    return said
