"""`cadenza check --watch`: runs again on each save, whatever a save looks like."""

import os
import sys
import threading
import time

import pytest

from cadenza.tools.check.watch import watch
from cadenza.tools.cli import main


def test_a_file_is_run_again_each_time_it_is_saved(tmp_path):
    path, runs, pauses = tmp_path / "mine.py", [], iter(range(7))
    path.write_text("one")

    def pause(_):
        match next(pauses):
            case 1:
                path.write_text("second")
            case 3:
                path.unlink()  # as editors save: the old file goes, then the new one comes
            case 5:
                path.write_text("third!")
                os.utime(path, ns=(1, 1))
            case 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(path, lambda: runs.append(path.read_text()), pause)
    assert runs == ["one", "second", "third!"]


FILE = """
import cadenza as cz
from cadenza import lang as L

@cz.epilogue(shapes={"x": "M D", "w": "N D"})
def f(acc):
    return BODY
"""


@pytest.mark.parametrize("target", ["mine.py", "mine:f"])
def test_watching_shows_what_was_saved_last(tmp_path, monkeypatch, capsys, target):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of another test
    path = tmp_path / "mine.py"
    path.write_text(FILE.replace("BODY", "L.log(acc)"))
    # of one length, saved within a second: only the content tells them apart
    later = iter([FILE.replace("BODY", "L.exp(acc)"), "def half(:", None])
    printed = []

    def pause(_):
        printed.append(capsys.readouterr())
        text = next(later)
        if text is None:
            raise KeyboardInterrupt
        path.write_text(text)
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 1))

    monkeypatch.setattr("cadenza.tools.check.watch.watch.__defaults__", (pause,))
    assert main(["check", target, "--watch", "--gpu", "none"]) == 130
    first, second, third = printed
    assert "f: does not hold" in first.out
    assert "f: all holds" in second.out
    assert third.out == ""
    assert third.err.startswith("cadenza: mine")
    assert "cannot be imported: SyntaxError" in third.err


def test_looking_at_a_file_takes_no_time_of_the_processor(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("one")
    runs, stop = [], threading.Event()

    def run():
        runs.append(path.read_text())
        if stop.is_set():
            raise KeyboardInterrupt

    def watched():
        with pytest.raises(KeyboardInterrupt):
            watch(path, run)

    thread = threading.Thread(target=watched)
    start = time.thread_time()
    thread.start()
    time.sleep(0.7)
    stop.set()
    path.write_text("other")
    thread.join(5.0)
    assert not thread.is_alive()
    assert runs == ["one", "other"]
    assert time.thread_time() - start < 0.5
