"""Emitted modules as files: where they are, who may read them, and what is never executed."""

import errno
import inspect
import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from cadenza.backends.triton import modules, settings

TEXT = '"""F1: acc1 = y @ wo.T  [M, 64]"""\n\nSIGN = "é"\n\n\ndef kernel():\n    return {}\n'
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, and a process that has warned of nothing yet."""
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(modules, "_warned", set())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    modules.function.cache_clear()
    modules._private.cache_clear()
    yield tmp_path / "cache" / "kernels"
    modules.function.cache_clear()
    modules._private.cache_clear()


def text(number=3):
    return TEXT.format(number)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def files(place):
    return sorted(path.name for path in place.iterdir())


# --- where ----------------------------------------------------------------------------------------


def test_the_environment_names_the_folder(monkeypatch, tmp_path):
    assert modules.folder() == tmp_path / "cache" / "kernels"
    monkeypatch.delenv("CADENZA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert modules.folder() == tmp_path / "xdg" / "cadenza" / "kernels"
    monkeypatch.setenv("HOME", str(tmp_path / "own"))
    for nowhere in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", nowhere)
        assert modules.folder() == tmp_path / "own" / ".cache" / "cadenza" / "kernels"
    monkeypatch.setenv("CADENZA_CACHE", "~/kept")
    assert modules.folder() == tmp_path / "own" / "kept" / "kernels"
    monkeypatch.setenv("CADENZA_CACHE", "")
    assert modules.folder().parts[-3:] == (".cache", "cadenza", "kernels")


def test_a_file_is_readable_and_named_by_title_and_digest(cache):
    path = modules.written(text())
    assert path.name == f"F1_acc1_y_wo_T_M_64_{modules.digest(text())}.py"
    assert path.read_text(encoding="utf-8") == text()
    assert files(cache) == [path.name]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_folders_are_for_this_user_alone(cache, mask):
    before = os.umask(mask)
    try:
        modules.written(text())
    finally:
        os.umask(before)
    assert (mode(cache), mode(cache.parent)) == (0o700, 0o700)


def test_a_folder_that_others_could_enter_is_closed(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    modules.written(text())
    assert mode(cache) == 0o700


# --- what runs ------------------------------------------------------------------------------------


def test_the_function_of_a_module_is_made_once():
    assert modules.function(text())() == 3
    assert modules.function(text()) is modules.function(text())
    assert modules.function(text(4))() == 4


def test_annotations_are_values_as_in_a_file_of_its_own():
    found = modules.function("def kernel(x: int):\n    return x\n")
    assert found.__annotations__ == {"x": int}


WRONG = 'raise AssertionError("what a file holds was executed")\n'


def test_a_file_with_another_text_is_replaced_and_never_executed(cache):
    path = modules.written(text())
    for wrong in (WRONG, text()[:-1], "", text() + "#"):
        path.write_text(wrong)
        modules.function.cache_clear()
        assert modules.function(text())() == 3
        assert path.read_text(encoding="utf-8") == text()
    path.write_bytes(b"\xff\xfe")
    assert modules.written(text()).read_text(encoding="utf-8") == text()


def test_a_file_that_is_right_is_left_alone():
    path = modules.written(text())
    before = path.stat()
    assert modules.written(text()) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_what_is_shown_as_source_is_what_runs(cache):
    found = modules.function(text())
    modules.written(text()).write_text(WRONG * 20)
    assert inspect.getsource(found) == "def kernel():\n    return 3\n"


def test_a_link_is_replaced_and_what_it_leads_to_untouched(cache, tmp_path):
    path = modules.written(text())
    for content in (WRONG, text()):
        elsewhere = tmp_path / "elsewhere.py"
        elsewhere.write_text(content)
        path.unlink()
        path.symlink_to(elsewhere)
        assert modules.written(text()) == path
        assert not path.is_symlink()
        assert elsewhere.read_text() == content
    assert modules.function(text())() == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_replaced_and_not_waited_for(cache):
    path = modules.written(text())
    path.unlink()
    os.mkfifo(path)
    assert modules.written(text()).read_text(encoding="utf-8") == text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_replaced(cache):
    path = modules.written(text())
    os.chown(path, 12345, -1)
    assert modules.written(text()) == path
    assert path.stat().st_uid == os.geteuid()


def test_no_compiled_file_is_left_or_read(cache):
    modules.function(text())
    assert files(cache) == [modules.file_name(text())]


# --- where it can't be written --------------------------------------------------------------------


def fallen_back(caplog, tmp_path):
    """The temporary folder, after two kernels that should be in it and one warning."""
    with caplog.at_level(logging.WARNING, "cadenza"):
        paths = [modules.written(text(n)) for n in (1, 2)]
        assert modules.function(text(1))() == 1
    (place,) = (tmp_path / "temporary").iterdir()
    assert mode(place) == 0o700
    assert [path.parent for path in paths] == [place, place]
    assert len(caplog.records) == 1
    assert "CADENZA_CACHE names another place" in caplog.text
    return place


def test_a_folder_that_can_not_be_made(monkeypatch, caplog, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path / "file" / "below"))
    fallen_back(caplog, tmp_path)


def test_a_full_disk(monkeypatch, caplog, tmp_path, cache):
    replace = os.replace

    def full(source, target):
        if Path(target).parent == cache:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    fallen_back(caplog, tmp_path)
    assert "No space left on device" in caplog.text
    assert files(cache) == [], "no part of a file is left"


def test_a_folder_of_another_user(monkeypatch, caplog, tmp_path, cache):
    modules.written(text(1))
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    fallen_back(caplog, tmp_path)
    assert "is another user's" in caplog.text


def test_no_home(monkeypatch, caplog, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CADENZA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    fallen_back(caplog, tmp_path)


def test_no_place_at_all(monkeypatch):
    def nowhere(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(modules, "kept", nowhere)
    assert modules.function(text(5))() == 5


def test_the_temporary_folder_goes_with_its_process(monkeypatch):
    place = modules._private()
    modules._removed(place, os.getpid() + 1)
    assert place.is_dir(), "a forked process leaves it"
    modules._removed(place, os.getpid())
    assert not place.exists()


# --- several processes ----------------------------------------------------------------------------

COUNT = 60
WRITER = f"""
COUNT = {COUNT}
import sys
from cadenza.backends.triton import modules
start, text = int(sys.argv[1]), sys.stdin.read()
for n in [*range(start, COUNT), *range(start)]:
    given = text.replace("{{}}", str(n))
    assert modules.written(given).read_text(encoding="utf-8") == given
"""


@pytest.mark.slow
def test_several_processes_write_at_once(cache):
    def started(first):
        command = [sys.executable, "-c", WRITER, str(first)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, encoding="utf-8")

    writers = [started(first) for first in (0, 0, 20)]
    for writer in writers:
        writer.stdin.write(TEXT)
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert files(cache) == sorted(modules.file_name(text(n)) for n in range(COUNT))


# --- compiled kernels -----------------------------------------------------------------------------


def test_kernels_are_kept_where_they_were_before_torch_compile_moved_the_cache(monkeypatch):
    from triton import knobs

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = knobs.cache.dir
    monkeypatch.setenv("TRITON_CACHE_DIR", "/moved")
    monkeypatch.setitem(settings.TRITON_LOADED, "TRITON_CACHE_DIR", None)
    assert knobs.cache.dir == "/moved"
    with settings.as_loaded():
        assert knobs.cache.dir == before
    assert knobs.cache.dir == os.environ["TRITON_CACHE_DIR"] == "/moved"
    monkeypatch.setitem(settings.TRITON_LOADED, "TRITON_CACHE_DIR", "/chosen")
    with settings.as_loaded():
        assert knobs.cache.dir == "/chosen"


@pytest.fixture
def assembler(monkeypatch, tmp_path):
    """An assembler in PyTorch's folder, as torch.compile names it to the whole process."""
    from triton.backends.nvidia import compiler

    place = tmp_path / "torch" / "bin" / "ptxas"
    place.parent.mkdir(parents=True)
    place.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.9, V11.9.1'\n")
    place.chmod(0o755)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(place))
    for name in settings.TRITON_LOADED:
        monkeypatch.setitem(settings.TRITON_LOADED, name, None)
    compiler.get_ptxas_version.cache_clear()
    yield place
    compiler.get_ptxas_version.cache_clear()


def key() -> str:
    """What of a kernel's key depends on the assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return str(make_backend(GPUTarget("cuda", 80, 32)).hash())


def test_kernels_are_assembled_as_before_torch_compile_named_its_assembler(assembler):
    from triton import knobs

    with settings.as_loaded():
        assert "11.9" not in key()
        assert knobs.nvidia.ptxas.path != str(assembler)
        assert "TRITON_PTXAS_PATH" not in os.environ
    assert "11.9" in key(), "Triton remembers the version of an assembler that is not used any more"
    assert knobs.nvidia.ptxas.path == os.environ["TRITON_PTXAS_PATH"] == str(assembler)
    with pytest.raises(KeyError), settings.as_loaded():
        raise KeyError
    assert os.environ["TRITON_PTXAS_PATH"] == str(assembler)
    moved = {"A": "b", "TRITON_PTXAS_PATH": str(assembler), "TRITON_CACHE_DIR": "/moved"}
    assert settings.loaded(moved) == {"A": "b"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_assembler_of_ones_own_is_used(assembler, monkeypatch, when):
    """Named before the package was loaded, PyTorch's too; or after."""
    if when == "before":
        monkeypatch.setitem(settings.TRITON_LOADED, "TRITON_PTXAS_PATH", str(assembler))
    else:
        monkeypatch.setattr(torch, "__file__", "/elsewhere/torch/__init__.py")
    with settings.as_loaded():
        assert "11.9" in key()
    found = settings.loaded({"TRITON_PTXAS_PATH": str(assembler)})
    assert found == {"TRITON_PTXAS_PATH": str(assembler)}


def test_threads_change_settings_one_after_another(assembler):
    inside, seen = [], []

    def compile_something():
        with settings.as_loaded():
            inside.append(1)
            time.sleep(0.01)
            seen.append((len(inside), os.environ.get("TRITON_PTXAS_PATH")))
            inside.pop()

    threads = [threading.Thread(target=compile_something) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(1, None)] * 4
    assert os.environ["TRITON_PTXAS_PATH"] == str(assembler)
