"""`cadenza doctor`: what follows from a machine's parts, and what it says of this one."""

import json
from dataclasses import replace

import pytest
import torch

from cadenza import __version__
from cadenza.tools import doctor
from cadenza.tools.cli import main
from cadenza.tools.doctor import Cache, Device, Machine, diagnose

H200 = Device("NVIDIA H200", "sm_90", 141 * 2**30)
A100 = Device("NVIDIA A100", "sm_80", 80 * 2**30)
P100 = Device("Tesla P100", "sm_60", 16 * 2**30, old=True)
GOOD = Machine((H200,), 0, "13.0", "3.6.0", "/usr/bin/cc")
KEPT = Cache("folder", 3, 1000, 2)


def finding(machine, name):
    """What is said of one part."""
    return next(one for one in diagnose(machine, KEPT).backends if one.name == name)


def test_all_is_well():
    found = diagnose(GOOD, KEPT)
    assert all(one.usable for one in found.backends)
    assert (found.healthy, found.install) == (True, [])


@pytest.mark.parametrize(
    ("changed", "reason", "cure"),
    [
        ({"triton": None}, "no package triton", "pip install triton"),
        ({"compiler": None}, "no C compiler", "gcc"),
        ({"devices": (P100,)}, "Tesla P100 is sm_60, older than sm_80", ""),
        ({"probe": "OSError: no ptxas"}, "a small program fails: OSError: no ptxas", "reason"),
        ({"devices": (), "unseen": 2}, "a driver lists 2 GPUs", "as new as CUDA 13.0"),
        ({"devices": (), "unseen": 1, "cuda": None}, "a driver lists 1", "a build of PyTorch"),
    ],
)
def test_a_gpu_without_the_fast_back_end_is_ill(changed, reason, cure, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    machine = replace(GOOD, **changed)
    found = diagnose(machine, KEPT)
    fast = finding(machine, "triton")
    assert not found.healthy
    assert not fast.usable
    assert fast.reason.startswith(reason)
    assert cure in " ".join(found.install)
    assert bool(cure) == bool(found.install)
    assert finding(machine, "reference").usable
    assert not finding(machine, "pingpong template").usable


def test_a_machine_without_a_gpu_is_well():
    machine = replace(GOOD, devices=())
    assert diagnose(machine, KEPT).healthy
    assert "no GPU" in finding(machine, "triton").reason
    assert finding(replace(machine, interpreting=True), "triton").usable
    assert diagnose(Machine(), KEPT).install == []


def test_the_pingpong_template_is_for_one_architecture():
    found = finding(replace(GOOD, devices=(A100,)), "pingpong template")
    assert not found.usable
    assert "sm_80 has the plain template" in found.reason
    assert diagnose(replace(GOOD, devices=(A100,)), KEPT).healthy
    assert finding(replace(GOOD, devices=(A100, H200)), "pingpong template").usable


def test_the_direct_launcher_is_for_known_releases():
    found = finding(replace(GOOD, triton="3.9.1"), "direct launcher")
    assert (found.usable, "3.9.1" in found.reason) == (False, True)
    assert diagnose(replace(GOOD, triton="3.9.1"), KEPT).healthy


def test_a_cache_is_counted_and_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path / "new"))
    assert doctor.cache() == Cache(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    kernels = tmp_path / "new" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "a.py").write_text("1" * 10)
    (tmp_path / "new" / "tuned.json").write_text('{"a": 1, "b": 2}')
    assert doctor.cache() == Cache(str(tmp_path / "new"), 1, 26, 2)


def test_a_cache_that_cannot_be_written_is_to_be_mended(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path / "file" / "cache"))
    kept = doctor.cache()
    assert "can't be written" in kept.problem
    assert any("CADENZA_CACHE" in line for line in diagnose(GOOD, kept).install)


def test_drivers_are_asked_for_gpus_that_torch_does_not_see(tmp_path, monkeypatch):
    nvidia, amd = tmp_path / "gpus", tmp_path / "nodes"
    for place in (nvidia / "0000:01:00.0", nvidia / "0000:02:00.0", amd / "0", amd / "1"):
        place.mkdir(parents=True)
    (amd / "0" / "gpu_id").write_text("0\n")
    (amd / "1" / "gpu_id").write_text("51234\n")
    monkeypatch.setattr(doctor, "DRIVERS", (str(nvidia), str(amd)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor.this_machine().unseen == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="says something else beside a GPU")
def test_the_command_on_a_machine_without_a_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "DRIVERS", (str(tmp_path / "none"), str(tmp_path / "none")))
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in (__version__, torch.__version__, "reference", "pingpong template", str(tmp_path)):
        assert word in said
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["healthy"] is True
    assert [one["name"] for one in data["backends"]][:2] == ["reference", "triton"]
    assert data["cache"]["folder"] == str(tmp_path)


def test_the_command_fails_beside_a_gpu_that_nothing_uses(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "this_machine", lambda: replace(GOOD, compiler=None))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "cuda:0    NVIDIA H200, sm_90, 141 GiB" in said
    assert "a C compiler: apt-get install gcc" in said
