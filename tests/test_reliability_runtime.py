"""Living in a process, by numbers of docs/reliability.md: devices, graphs that are captured, time
that tuning takes, packages that are missing, memory that is promised, figures beside others'.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tuning_place
from stock_programs import operands
from test_layers import pair, tables_of
from torch import nn
from tuning_place import place

import cadenza as cz
from cadenza.backends.triton.executable import Executable
from cadenza.backends.triton.launch import Launcher
from cadenza.backends.triton.tuning import choices
from cadenza.backends.triton.tuning.worker import Compile
from cadenza.backends.triton.tuning.workers import Hangs
from cadenza.core.errors import BackEndError, ProgramError
from cadenza.library.nn import decoder
from cadenza.library.variants import VARIANTS
from cadenza.tools.bench.suites import SUITES

ROOT = Path(__file__).resolve().parent.parent
tuning = pytest.mark.usefixtures(place.__name__)


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kernels", "layer", "loss", "accuracy"])
def test_25_every_suite_measures_torch_compile_beside_ours(name):
    assert {"ours", "compile"} <= set(SUITES[name].variants)


def test_25_every_table_of_times_has_a_column_of_torch_compile():
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    headers = re.findall(r"^\| .*\bours\b.*\|$\n^\|[-| ]+\|$", text, re.MULTILINE)
    assert headers
    assert [header for header in headers if "compile" not in header] == []


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"weight-gradient"}))
def test_31_an_operand_on_another_device_raises_and_is_named(name):
    given = operands(name, 5)
    tensors = [n for n, v in given.items() if isinstance(v, torch.Tensor)]
    for other in tensors[1:]:
        moved = given | {other: given[other].to("meta")}
        with pytest.raises(ProgramError, match=rf"two devices(.|\n)*{other} on meta"):
            VARIANTS[name].program(**moved)


@pytest.mark.parametrize("other", ["gradient", "x", "dy"])
def test_31_a_gradient_is_added_to_on_its_own_device(other):
    given = {"gradient": torch.zeros(6, 5), "x": torch.randn(9, 5), "dy": torch.randn(9, 6)}
    given[other] = given[other].to("meta")
    with pytest.raises(ProgramError, match=r"on (cpu|meta)(.|\n)*one device"):
        cz.ops.accumulate_weight_gradient(**given)


# --- captured graphs ------------------------------------------------------------------------------


def forbidden(*given, **named):
    raise AssertionError("this is not allowed while a graph is captured")


@tuning
def test_35_nothing_is_measured_or_made_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(choices, "choices", forbidden)
    plan, text = tuning_place.plans("llama-mlp")[0]
    executable = Executable(plan, described=lambda: text, target=tuning_place.HOPPER)
    with pytest.raises(BackEndError, match="call it once before"):
        executable._choose([torch.empty(1)] * len(plan.graph.inputs), 16384)
    assert not executable.programs


def test_35_nothing_is_compiled_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launcher = Launcher(forbidden, {}, {})
    with pytest.raises(BackEndError, match="call it once before"):
        launcher((1, 1), [torch.empty(16), 3], torch.device("cuda", 0))
    assert not launcher.compiled


# --- time of tuning -------------------------------------------------------------------------------


class Stuck(tuning_place.Pretended):
    """Workers whose compiler never answers; they say how long they were waited for."""

    def __init__(self):
        super().__init__(tuning_place.library)
        self.waited = []

    def ask(self, task, seconds, kind, hear=None):
        """What needs no compiler is timed; for the rest, nothing after the time that was given."""
        if not isinstance(task, Compile):
            return super().ask(task, seconds, kind, hear)
        self.waited.append(seconds)
        raise Hangs("no answer in time", None)


@tuning
def test_36_a_compiler_that_hangs_costs_bounded_time_and_no_result(monkeypatch):
    """The product without an epilogue is the library's; the other one's kernel is the default."""
    workers = Stuck()
    found = tuning_place.chosen(monkeypatch, workers)
    assert [choice.library for choice in found] == [False, True]
    assert max(workers.waited) <= 60.0


# --- packages that are missing --------------------------------------------------------------------

WITHOUT = """
import sys
for name in {missing}:
    sys.modules[name] = None  # as if it were not installed
import torch, cadenza as cz
x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
cz.ops.linear(x, w, activation="gelu").sum().backward()
cz.nn.DecoderLayer(16, 4, 2, 24)(torch.randn(1, 3, 16), None, *torch.ones(2, 1, 3, 2))
cz.ops.linear_cross_entropy(x, w, torch.zeros(4).long()).backward()
for name in {names}:
    getattr(cz, name)
try:
    cz.ops.linear(x, w, backend="triton")
except cz.core.errors.BackEndError as error:
    print(error)
"""


@pytest.mark.slow
def test_37_without_compiler_gpu_and_optional_packages_everything_imports_and_runs():
    missing = ["triton", "rich", "typer", "matplotlib", "transformers", "liger_kernel", "peft"]
    names = [name for name in cz.__all__ if name != "models"]  # models are read from safetensors
    code = WITHOUT.format(missing=missing, names=names)
    environment = {n: v for n, v in os.environ.items() if n != "CADENZA_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install triton" in done.stdout


# --- memory ---------------------------------------------------------------------------------------

ROWS, WIDTH, HEADS, COLUMNS, FEED_FORWARD, FLOAT = 40, 16, 4 * 6, (4 + 2 * 2) * 6, 20, 4


def kept_by(module, *given):
    """Bytes of the storages that autograd keeps for backward beside parameters and inputs."""
    kept = {}
    known = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *given)}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = module(*given)
    assert held is not None
    return sum(size for place, size in kept.items() if place not in known)


def test_38_a_layer_keeps_what_its_formula_says(monkeypatch):
    """M rows of A, what attention gives, D each of x1 and of the stream that the next layer gets,
    2F of raw gate and up, and one number. No weight, be those of one product in one storage or
    copied together. What attention keeps is its own.
    """
    monkeypatch.setattr(decoder, "causal_attention", lambda qkv, **_: qkv[..., :HEADS].clone())
    layer = pair("llama")[0].float()
    tables = [table.float() for table in tables_of("llama", 4, 10)]
    x = torch.randn(4, 10, WIDTH, requires_grad=True)
    given = x, x.square().sum(-1, keepdim=True), *tables
    matrices = ROWS * (HEADS + 2 * WIDTH + 2 * FEED_FORWARD)
    assert kept_by(layer, *given) == FLOAT * (matrices + ROWS)
    for weight in layer.parameters():
        weight.data = weight.data.clone()
    assert kept_by(layer, *given) == FLOAT * (matrices + ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_38_a_compiled_layer_keeps_a_copy_of_joined_weights(monkeypatch, trained):
    """Of (N + 2F) · D numbers, as the documentation says."""
    monkeypatch.setattr(decoder, "causal_attention", lambda qkv, **_: qkv[..., :HEADS].clone())
    layer = pair("llama")[0].float().requires_grad_(trained)
    tables = [table.float() for table in tables_of("llama", 4, 10)]
    x = torch.randn(4, 10, WIDTH, requires_grad=True)
    given = x, x.square().sum(-1, keepdim=True).detach(), *tables
    expected = kept_by(layer, *given)
    compiled = kept_by(torch.compile(layer, backend="aot_eager", dynamic=False), *given)
    assert compiled - expected == FLOAT * (COLUMNS + 2 * FEED_FORWARD) * WIDTH


def test_38_a_stock_layer_keeps_more():
    """The measure sees what stock code keeps: normalised activations, and each step of SwiGLU."""
    twin = pair("llama")[1].float()
    tables = [table.float() for table in tables_of("llama", 4, 10)]
    x = torch.randn(4, 10, WIDTH, requires_grad=True)

    class Fed(nn.Module):
        """The half of the layer after attention."""

        def __init__(self):
            super().__init__()
            self.twin = twin

        def forward(self, x, *tables):
            return x + self.twin.mlp(self.twin.post_attention_layernorm(x))

    assert kept_by(Fed(), x, *tables) >= FLOAT * ROWS * (WIDTH + 4 * FEED_FORWARD)
