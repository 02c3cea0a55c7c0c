"""Decoding with a cache is not slower than the stock model: what the row count of its path is for.

One token each of a few sequences, of as many as first take programs, and of twice as many, two
layers of width 4096. Both the time in which Python launches a step and that of its kernels, which
is what counts in a CUDA graph, are held and printed, beside a copy of the stock model, which tells
what is noise.
"""

import copy
import statistics
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import cadenza as cz
from cadenza.integrations.hf.layer import DECODED

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.alone]
PAST, STEPS, TURNS = 128, 12, 24
NOISE = 1.03  # between medians of turns


@pytest.fixture(scope="module")
def models():
    """A stock model, a copy of it, and the same accelerated."""
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("cuda"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ours = copy.deepcopy(made)
    assert cz.accelerate(ours).replaced
    return made, copy.deepcopy(made), ours


@pytest.fixture
def measured_kernels(monkeypatch, tmp_path):
    """Kernels are chosen as users have them, by measurement."""
    monkeypatch.setenv("CADENZA_TUNE", "first")
    monkeypatch.setenv("CADENZA_CACHE", str(tmp_path))


@torch.no_grad()
def steps(model, prompt, watch=None):
    """The microseconds of a step of decoding after a prompt."""
    cache = model(prompt, use_cache=True).past_key_values
    torch.cuda.synchronize()
    if watch is not None:
        watch.start()
    start = time.perf_counter()
    for _ in range(STEPS):
        model(prompt[:, -1:], past_key_values=cache, use_cache=True)
    torch.cuda.synchronize()
    taken = (time.perf_counter() - start) / STEPS * 1e6
    if watch is not None:
        watch.stop()
    return taken


def of_kernels(model, prompt):
    """The microseconds of a step's kernels."""
    watch = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    steps(model, prompt, watch)
    on_device = (e for e in watch.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return sum(event.device_time_total for event in on_device) / STEPS


@pytest.mark.parametrize("rows", [1, 8, DECODED, 2 * DECODED])
def test_a_step_of_decoding_is_not_slower(rows, models, measured_kernels, capsys):
    prompt = torch.randint(0, 1024, (rows, PAST), device="cuda")
    for model in 2 * models:  # compiles and chooses, then launches what was chosen
        steps(model, prompt)
    found = {model: [] for model in models}
    for turn in range(TURNS):
        for model in models[:: 1 if turn % 2 else -1]:
            found[model].append(steps(model, prompt))
    wall = [statistics.median(found[model]) for model in models]
    kernels = [of_kernels(model, prompt) for model in models]
    with capsys.disabled():
        print(
            f"\n{rows} sequences, a step: stock {wall[0]:.0f} µs, kernels {kernels[0]:.0f}; "
            f"its copy {wall[1]:.0f} µs, kernels {kernels[1]:.0f}; "
            f"accelerated {wall[2]:.0f} µs, kernels {kernels[2]:.0f}", end="",
        )  # fmt: skip
    assert wall[2] <= NOISE * max(wall[:2])
    assert kernels[2] <= NOISE * max(kernels[:2])
