"""The pages around the authoring kit: what they name exists, what they say of themselves holds."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from test_docs import ROOT, blocks, broken_links, programs, prose, read, unknown_commands

import cadenza as cz
from cadenza import lang as L
from cadenza.library.variants import Variant
from cadenza.tools.bench.results import ratio
from cadenza.tools.check.run import judge
from cadenza.tools.check.subject import Subject
from cadenza.tools.cli import app

PAGES = ("AGENTS.md", "examples/exercises/README.md", "docs/authoring.md", "docs/techniques.md")
WORDS = 6000
RESULTS = "benchmarks/results/kernels.json"
# Rows of the table of techniques, and the pattern whose records they are of.
TECHNIQUES = {
    "residual + RMSNorm": "residual_rms", "SwiGLU": "swiglu", "RoPE": "rope",
    "SwiGLU backward": "swiglu_backward", "RMSNorm backward": "rms_backward", "dW": "dw",
}  # fmt: skip
COMPILED = ("compile", "autotune")


def named_files(text):
    """What stands in backquotes and looks like a path of the repository."""
    found = re.findall(r"`((?:cadenza|tests|docs|examples|benchmarks)/[\w./*]+)`", text)
    return [name.rstrip(".") for name in found]


@pytest.mark.parametrize("path", PAGES)
def test_links_commands_and_files_exist(path):
    text = read(path)
    assert broken_links(path, text) == []
    assert unknown_commands(text, read("Makefile")) == []
    assert [name for name in named_files(text) if not list(ROOT.glob(name.rstrip("/")))] == []


def test_the_map_of_agents_names_files_that_exist():
    rows = re.findall(r"^\| .+? \| (.+) \|$", prose(read("AGENTS.md")), re.MULTILINE)
    lost = []
    for cell in rows:
        folder = ""
        for name in re.findall(r"`([\w./*]+)`", cell):
            folder = name.rpartition("/")[0] if "/" in name.rstrip("/") else folder
            places = (name, f"{folder}/{name}", f"{folder}/{name}".rstrip("/"))
            if "." in name and not any(list(ROOT.glob(place)) for place in places):
                lost.append(name)
    assert lost == []


@pytest.mark.parametrize("path", PAGES)
def test_commands_of_ours_exist(path):
    known = {c.name or c.callback.__name__ for c in app.registered_commands}
    named = set(re.findall(r"(?:^|`|bin/)cadenza (\w+)", read(path), re.MULTILINE))
    assert named <= known
    assert named or path == "docs/techniques.md"


def test_authoring_fits_into_a_prompt():
    assert 2000 < len(read("docs/authoring.md").split()) < WORDS


def worked():
    """The ten epilogues of the page, by name, with their source."""
    text = read("docs/authoring.md")
    section = text.partition("## Ten epilogues")[2].partition("## What fuses")[0]
    code = "\n".join(b.text for b in blocks(text) if b.language == "python" and b.text in section)
    namespace = {"cz": cz, "L": L, "F": F, "torch": torch, "__name__": "authoring"}
    exec(code, namespace)
    return {name: (namespace[name], node) for name, node in programs(code).items()}


def test_the_page_has_ten_epilogues_of_two_to_twelve_lines_that_the_check_passes():
    found = worked()
    assert len(found) == 10
    for name, (program, node) in found.items():
        assert 2 <= node.body[-1].end_lineno - node.body[0].lineno + 1 <= 12, name
        given = {"heads": 4} if "heads" in program.parameters else {}
        subject = Subject(name, Variant(program, program.shapes, {}), given, "bfloat16")
        judgement = judge(subject, [])
        assert judgement.holds, [f for f in judgement.findings if f.holds is False]


def test_figures_of_techniques_are_those_on_record():
    records = {
        (r["pattern"], r["variant"]): r
        for r in json.loads(read(RESULTS))["records"]
        if r["size"] == "llama-3-8b" and r["dtype"] == "bf16" and r["mode"] == "sustained"
    }
    rows = re.findall(r"^\| .+ \| (.+?) \| ([\d.]+) \| ([\d.]+) \|$", read("docs/authoring.md"),
                      re.MULTILINE)  # fmt: skip
    assert {row[0] for row in rows} == set(TECHNIQUES)
    for where, bare, compiled in rows:
        of = {v: records[TECHNIQUES[where], v] for v in ("ours", *COMPILED, "bare")}
        assert float(bare) == pytest.approx(ratio(of["ours"], of["bare"]), abs=5.1e-4)
        least = min(ratio(of[variant], of["ours"]) for variant in COMPILED)
        assert float(compiled) == pytest.approx(least, abs=5.1e-4)


def test_a_page_that_names_what_is_not_there_is_caught():
    assert named_files("see `cadenza/core/nowhere.py` and `x`") == ["cadenza/core/nowhere.py"]
    assert not list(ROOT.glob("cadenza/core/nowhere.py"))
