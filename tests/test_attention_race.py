"""Timing PyTorch's kernels of attention: on a CPU, whose kernels are pretended."""

import random

import pytest
import torch
from pretended_gpu import CALL, GPU, HEADS, pretend_kernels

from cadenza.backends.triton.tuning import timing
from cadenza.library import attention_race
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_kernels import EXPANDED, KERNELS, OWN
from cadenza.library.attention_race import Call

# --- sizes that are run ---------------------------------------------------------------------------

SIZES = [(1, 1), (2, 300), (64, 100), (5000, 64), (1, 131072), (8, 4096), (1, 10**6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "heads", [Heads(32, 8, 128), Heads(1, 1, 8), Heads(128, 128, 256)], ids=str
)
@pytest.mark.parametrize(("batch", "length"), SIZES)
def test_rounded_sizes_take_a_bounded_time(batch, length, heads, dtype):
    found = Call(GPU, dtype, heads, batch, length, True).rounded()
    assert found.rounded() == found
    assert found.length >= attention_race.LEAST
    assert found.batch * found.length <= attention_race.TOKENS
    least = (found.batch, found.length) == (1, attention_race.LEAST)
    work = 7 * found.batch * found.length**2 * heads.queries * heads.columns
    assert least or work <= attention_race.WORK[dtype.itemsize]


def test_sizes_are_rounded_to_the_next_power_of_two():
    assert CALL.rounded()[3:5] == (2, 512)
    assert CALL._replace(batch=5, length=128).rounded()[3:5] == (8, 128)


# --- the race, on a CPU ---------------------------------------------------------------------------


@pytest.fixture
def race(monkeypatch):
    """A race on a CPU: flash serves, cuDNN does not, the expanded kernel raises when it runs."""
    call = Call(torch.device("cpu"), torch.float32, HEADS, 2, 16, True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pretend_kernels(monkeypatch, without=("cudnn",))

    def raises(*given):
        raise RuntimeError("no kernel image\nis available")

    def timed(runs, seconds):
        for each in runs.values():
            each()
        return dict.fromkeys(runs, 1.0)

    monkeypatch.setitem(KERNELS, EXPANDED, KERNELS[EXPANDED]._replace(operator=raises))
    monkeypatch.setattr(timing, "timed", timed)
    return call


def test_what_raises_or_does_not_serve_is_out(race):
    found = attention_race._measured(race, 0.0)
    assert found == {
        OWN: 1.0,
        "flash": 1.0,
        "cudnn": "RuntimeError: it does not serve such calls",
        "efficient": "RuntimeError: it does not serve such calls",
        EXPANDED: "RuntimeError: no kernel image",
    }


def test_heads_that_nobody_shares_are_not_expanded(race):
    found = attention_race._measured(race._replace(heads=Heads(4, 4, 16)), 0.0)
    assert "as many heads" in found[EXPANDED]
    assert found["efficient"] == 1.0


def test_each_kernel_runs_under_its_name(race, monkeypatch):
    ran = pretend_kernels(monkeypatch)
    attention_race._measured(race, 0.0)
    assert [name for name, _ in ran] == ["flash, shared", "cudnn, shared", EXPANDED] * 2


def test_measuring_draws_no_random_numbers_of_the_callers(race):
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    attention_race._elsewhere(lambda: attention_race._measured(race, 0.0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_measuring_has_none_of_the_callers_modes():
    found = []

    def look():
        found.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        found.append(torch.is_inference_mode_enabled())

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        attention_race._elsewhere(look)
    assert found == [(True, False), False]
