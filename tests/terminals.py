"""Places to print to, a terminal and a pipe, where nothing asks for or against colour."""

import io


class Terminal(io.StringIO):
    """Takes what is printed, and says that it is a terminal."""

    def isatty(self) -> bool:
        return True


STREAMS = [(Terminal, True), (io.StringIO, False)]  # and whether it is coloured there


def as_usual(monkeypatch) -> None:
    """A terminal that has colours, which nobody asked for or against."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
