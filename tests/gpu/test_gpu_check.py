"""`cadenza check` on a GPU: solved exercises agree there, and are timed."""

import json

import pytest
import torch
from calls import launches
from solved import NAMES, solved

from cadenza.tools.check.device import device_finding, usable_device
from cadenza.tools.check.subject import find_subjects
from cadenza.tools.check.timing import timed
from cadenza.tools.cli import main
from cadenza.tools.explain import explain

pytestmark = pytest.mark.gpu


@pytest.fixture
def judged(tmp_path, place):
    """An exercise with its solution, as a subject; all of it tiny where Triton interprets."""

    def subject(name):
        path = tmp_path / f"{name}.py"
        path.write_text(solved(name), encoding="utf-8")
        dtype = "float16" if place.interpreted else "bfloat16"
        ((found,), _) = find_subjects(str(path), {}, dtype)
        tiny = {"M": 19, **dict.fromkeys(found.names, 32)} if place.interpreted else {}
        ((found,), _) = find_subjects(str(path), tiny, dtype)
        return found

    return subject


@pytest.mark.interpreted
@pytest.mark.parametrize("name", NAMES)
def test_solutions_agree_with_float64(name, place, judged):
    with launches() as made:
        found = device_finding(judged(name), place.device)
    assert found.holds, found
    assert len(made), "nothing ran by Triton"


@pytest.mark.alone
@pytest.mark.parametrize("name", ["learned_swish", "clamped_glu", "capped_entropy"])
def test_solutions_are_timed_beside_their_products_and_torch_compile(name, judged, place):
    subject = judged(name)
    findings, records = timed(subject, explain(subject.large()), place.device, print)
    assert [f.check for f in findings] == ["time, forward", "time, forward and backward"]
    assert not [(r["variant"], r["failed"]) for r in records if "us" not in r]
    assert all("torch.compile" in f.figure and "bare products" in f.figure for f in findings)


@pytest.mark.alone
def test_the_command_judges_what_it_ran(tmp_path, capsys):
    path = tmp_path / "huber.py"
    path.write_text(solved("huber"), encoding="utf-8")
    main(["check", str(path), "--json", "--gpu", "none", "--size", "M=4096,D=1024,N=1024"])
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    found = {f["check"]: f for f in program["findings"]}
    assert usable_device() is not None
    assert found[f"agrees on {torch.cuda.get_device_name()}"]["holds"]
    assert {"time, forward", "time, forward and backward"} <= set(found)
    assert program["times"]
