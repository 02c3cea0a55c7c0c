"""Selection by measurement on a GPU: values stay right, and what workers compile is found again."""

import json
import os

import block_operands
import pytest
import torch
from calls import ALIGNED, check_as_good_as_torch, operands, upstream_of
from programs import labelled
from template_choice import forget_programs
from triton import knobs

from cadenza.backends.triton.tuning import choices, contests, records
from cadenza.core.errors import BackEndError
from cadenza.library.blocks import BUILT_IN

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
BRAIN = torch.bfloat16
SIZES = {**ALIGNED, "D": 512, "F": 1024}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Everything is worth measuring, and nothing is known."""
    monkeypatch.setenv("CADENZA_TUNE", "first")
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path))
    monkeypatch.setattr(choices, "_decided", {})
    monkeypatch.setattr(contests, "WORTH", 0)
    monkeypatch.setattr(contests, "WORTH_BYTES", 0)


def compiled(monkeypatch):
    """Of each kernel that this process asks for, whether Triton's cache had it."""
    found = []

    def heard(**named):
        found.append((named["cache_hit"], named["src"].name, named["metadata"]))

    monkeypatch.setattr(knobs.compilation, "listener", heard)
    return found


def settings_now():
    """What of Triton's settings a key may depend on, for the message of a failure."""
    from triton.backends.nvidia import compiler

    named = {name: value for name, value in os.environ.items() if name.startswith("TRITON")}
    return named, compiler.get_ptxas_version(90), vars(knobs.nvidia), vars(knobs.compilation)


def test_a_measured_block_is_as_good_as_torch(place, monkeypatch):
    arguments = operands("llama", 513, place, BRAIN, {**SIZES, "F": 1152})
    upstream = upstream_of(BUILT_IN["llama"].plain, arguments)
    hits = compiled(monkeypatch)
    heard = []
    with choices.telling(lambda *given: heard.append(given)):
        check_as_good_as_torch(BUILT_IN["llama"], arguments, upstream)
    assert len(heard) >= 12
    assert all(entry for *_, entry in heard), "a kernel of which no candidate ran"
    assert hits, "nothing was compiled"
    missed = [given for hit, *given in hits if not hit]
    told = f"workers compile something else than launches ask for: {missed}, {settings_now()}"
    assert len(missed) <= 0.2 * len(hits), told
    kept = json.loads(records.path().read_text())
    assert all(records.choice_of(entry) for entry in kept.values())


def test_another_process_would_measure_nothing(place, monkeypatch):
    arguments = operands("llama-mlp", 256, place, BRAIN, {**SIZES, "F": 1280})
    with torch.no_grad():
        first = labelled(BUILT_IN["llama-mlp"](**arguments))
    assert records.read(), "nothing was measured"
    measured = []
    monkeypatch.setattr(choices, "_decided", {})
    monkeypatch.setattr(choices, "_measure_missing", lambda plan, *_: measured.append(plan))
    forget_programs()
    with torch.no_grad():
        again = labelled(BUILT_IN["llama-mlp"](**arguments))
    assert choices._decided, "no choice was made"
    assert not measured
    for name, value in first.items():
        assert torch.equal(value, again[name])


def test_nothing_is_measured_while_a_graph_is_captured(place):
    arguments = operands("llama-mlp", 128, place, BRAIN, {**SIZES, "F": 896})
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(BackEndError, match="call it once before"), torch.cuda.graph(graph):
        BUILT_IN["llama-mlp"](**arguments)
    BUILT_IN["llama-mlp"](**block_operands.cast(arguments, BRAIN))
    torch.cuda.synchronize()
