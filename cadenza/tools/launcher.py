"""How this program was started, to be written in a line for the shell that starts it again."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

NAME = "cadenza"


def shell_line(*arguments: str) -> str:
    """A line for the shell that runs this program, from the same folder, on other arguments."""
    return shlex.join([*_program(), *arguments])


def _program() -> list[str]:
    started = sys.argv[0]
    if Path(started).name != NAME:
        return [sys.executable, "-m", NAME]
    return [NAME if shutil.which(NAME) == str(Path(started).absolute()) else started]
