"""Choosing PyTorch's attention kernel without a GPU: times, sizes and devices are pretended."""

import logging

import pytest
import torch
from pretended_gpu import CALL, GPU, HEADS, TIMES, Watch, another_process, pretend_gpu

from cadenza.backends.triton.tuning import records
from cadenza.core.errors import BackEndError
from cadenza.library import attention_choice, attention_race
from cadenza.library.attention_choice import TABLE, known, order_of
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_kernels import KERNELS, OWN


@pytest.fixture(autouse=True)
def watch(monkeypatch, tmp_path):
    """A pretended GPU whose cache is empty."""
    return pretend_gpu(monkeypatch, tmp_path)


# --- the choice and its cache ---------------------------------------------------------------------


def test_what_is_faster_than_pytorchs_own_choice_is_chosen_once(watch, monkeypatch):
    assert order_of(CALL) == ("cudnn", "efficient")
    assert order_of(CALL) == ("cudnn", "efficient")
    assert watch.calls == [(CALL.rounded(), "first")]
    another_process(monkeypatch)
    assert order_of(CALL) == ("cudnn", "efficient")
    assert len(watch.calls) == 1
    [entry] = records.read(TABLE).values()
    assert entry["microseconds"] == TIMES
    assert not records.read(), "it is in the table of kernels"


def test_calls_of_about_the_same_size_are_measured_once(watch):
    for length in (257, 300, 512):
        assert order_of(CALL._replace(length=length)) == ("cudnn", "efficient")
    assert len(watch.calls) == 1
    order_of(CALL._replace(length=513))
    assert len(watch.calls) == 2


DIFFERENT = [
    {"dtype": torch.float16}, {"heads": Heads(4, 4, 16)}, {"heads": Heads(4, 2, 32)},
    {"batch": 3}, {"backward": False},
]  # fmt: skip


@pytest.mark.parametrize("changes", DIFFERENT, ids=str)
def test_a_choice_is_that_of_its_calls_alone(changes, watch):
    order_of(CALL)
    order_of(CALL._replace(**changes))
    assert len(watch.calls) == 2
    assert len(records.read(TABLE)) == 2


FLASH = "current_flash_attention_impl"
CHANGES = {
    "GPU": (torch.cuda, "get_device_name", lambda device: "another GPU"),
    "torch": (torch, "__version__", "99.0"),
    "cuDNN": (torch.backends.cudnn, "version", lambda: 99999),
    "flash": (torch.nn.attention, FLASH, lambda: "FA4"),
    "kernels": (attention_choice, "KERNELS", {**KERNELS, "another": None}),
    "method": (attention_choice, "METHOD", attention_choice.METHOD + 1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_place_is_measured_anew(what, watch, monkeypatch):
    order_of(CALL)
    another_process(monkeypatch)
    monkeypatch.setattr(*CHANGES[what], raising=what != "flash")
    order_of(CALL)
    assert len(watch.calls) == 2


def test_a_release_with_one_flash_alone(watch, monkeypatch):
    monkeypatch.delattr(torch.nn.attention, FLASH, raising=False)
    assert order_of(CALL) == order_of(CALL) == ("cudnn", "efficient")
    assert len(watch.calls) == 1


def test_another_flash_is_another_choice_in_the_same_process(watch, monkeypatch):
    order_of(CALL)
    watch.times = {OWN: 10.0, "flash": 2.0}
    monkeypatch.setattr(torch.nn.attention, FLASH, lambda: "FA4", raising=False)
    assert order_of(CALL) == known(GPU, torch.bfloat16, *HEADS) == ("flash",)


def test_decisions_of_ever_new_sizes_are_few(watch, monkeypatch):
    monkeypatch.setattr(attention_choice, "DECIDED", 5)
    orders = [order_of(CALL._replace(length=300 + more)) for more in range(30)]
    assert len(attention_choice._decided) == 5
    assert [order_of(CALL._replace(length=300 + more)) for more in range(30)] == orders
    assert len(watch.calls) == 1


RANKINGS = [
    ({OWN: 10.0, "flash": 9.8, "cudnn": 9.75}, []),
    ({OWN: 10.0, "flash": 9.6, "cudnn": 9.5, "efficient": 30.0}, ["cudnn", "flash"]),
    ({OWN: "out of memory", "flash": 9.8, "cudnn": "no"}, ["flash"]),
    ({OWN: 10.0, "flash": "no", "cudnn": "no"}, []),
    ({OWN: "no", "flash": "no"}, []),
    ({}, []),
]


@pytest.mark.parametrize(("times", "expected"), RANKINGS)
def test_a_kernel_has_to_be_faster_by_more_than_chance(times, expected):
    assert attention_race.ranking(times) == expected


def test_off_leaves_it_to_pytorch(watch, monkeypatch):
    monkeypatch.setenv("CADENZA_TUNE", "off")
    assert order_of(CALL) == known(GPU, torch.bfloat16, *HEADS) == ()
    assert not watch.calls
    monkeypatch.setenv("CADENZA_TUNE", "first")
    assert order_of(CALL)


def test_an_unknown_word(watch, monkeypatch):
    monkeypatch.setenv("CADENZA_TUNE", "on")
    with pytest.raises(BackEndError, match="one of off, first, full"):
        order_of(CALL)


def test_full_measures_again_what_was_measured_in_short(watch, monkeypatch):
    order_of(CALL)
    another_process(monkeypatch)
    monkeypatch.setenv("CADENZA_TUNE", "full")
    order_of(CALL)
    another_process(monkeypatch)
    order_of(CALL)
    assert [how for _, how in watch.calls] == ["first", "full"]


# --- where nothing is measured --------------------------------------------------------------------


def capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def backwards(monkeypatch):
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)


def without_triton(monkeypatch):
    monkeypatch.setattr(attention_choice, "has_triton", lambda: False)


@pytest.mark.parametrize("state", [backwards, without_triton])
def test_nothing_is_measured_nor_remembered(state, watch, monkeypatch):
    with monkeypatch.context() as patch:
        state(patch)
        assert order_of(CALL) == ()
    assert not watch.calls
    assert order_of(CALL) == ("cudnn", "efficient")
    with monkeypatch.context() as patch:
        state(patch)
        assert order_of(CALL) == ("cudnn", "efficient"), "what was chosen stays chosen"


@pytest.mark.parametrize("state", [capturing, backwards])
def test_what_was_measured_of_about_this_size_counts(state, watch, monkeypatch):
    order_of(CALL)
    state(monkeypatch)
    assert order_of(CALL._replace(length=301)) == ("cudnn", "efficient")
    another_process(monkeypatch)
    assert order_of(CALL) == ("cudnn", "efficient"), "another process has measured it"
    assert len(watch.calls) == 1


def test_what_a_capture_ran_on_stays_chosen(watch, monkeypatch):
    with monkeypatch.context() as patch:
        capturing(patch)
        assert order_of(CALL) == ()
    assert not watch.calls
    assert order_of(CALL._replace(length=301)) == ("cudnn", "efficient")
    assert order_of(CALL) == (), "its forward may run again, in backward"


@pytest.mark.parametrize("state", [capturing, backwards])
def test_nobody_waits_there_for_who_measures(state, watch, monkeypatch):
    state(monkeypatch)
    with attention_choice._lock:
        assert order_of(CALL) == ()


def test_deterministic_algorithms_are_left_to_pytorch(watch):
    torch.use_deterministic_algorithms(True)
    try:
        assert order_of(CALL) == known(GPU, torch.bfloat16, *HEADS) == ()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not watch.calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn], ids=str)
def test_dtypes_that_no_kernel_has_are_left_alone(dtype, watch):
    assert known(GPU, dtype, *HEADS) == ()


def test_nothing_is_asked_of_other_devices(watch):
    for device in ("cpu", "meta"):
        assert attention_choice.chosen(torch.empty(2, 300, 128, device=device), HEADS) == ()


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_failure_of_measuring_costs_no_result(monkeypatch, caplog):
    monkeypatch.setattr(attention_choice, "times_of", attention_race.times_of)
    with caplog.at_level(logging.ERROR, "cadenza"):
        assert order_of(CALL) == ()  # there is no CUDA here
    assert "measuring attention failed" in caplog.text
    assert not records.read(TABLE)
    monkeypatch.setattr(attention_choice, "times_of", None)
    assert order_of(CALL) == (), "it is tried once a process"


def test_what_was_out_of_memory_is_not_kept_for_others(monkeypatch):
    times = {OWN: 10.0, "flash": 5.0, "cudnn": "OutOfMemoryError: tried to allocate"}
    monkeypatch.setattr(attention_choice, "times_of", Watch(times))
    assert order_of(CALL) == ("flash",)
    assert not records.read(TABLE)


BROKEN = [
    '{"%s": 1}', '{"%s": {"order": []}}', "[]", "{",
    '{"%s": {"kind": "", "batch": 2, "length": 512, "order": ["math"]}}',
    '{"%s": {"kind": "", "batch": 2, "length": 512, "order": "flash"}}',
    '{"%s": {"kind": "", "batch": "2", "length": 512, "order": []}}',
]  # fmt: skip


@pytest.mark.parametrize("content", BROKEN)
def test_an_entry_that_cannot_be_read_counts_as_not_there(content, watch):
    records.add({}, TABLE)
    content = content.replace("%s", attention_choice._key(CALL.rounded()))
    records.path(TABLE).write_text(content)
    assert order_of(CALL) == ("cudnn", "efficient")
    assert len(watch.calls) == 1


def test_a_cache_that_cannot_be_written_costs_nothing(watch, monkeypatch):
    monkeypatch.setenv("CADENZA_CACHE", "/dev/null/nowhere")
    assert order_of(CALL) == order_of(CALL) == ("cudnn", "efficient")
    assert len(watch.calls) == 1


def test_cudnn_plans_few_sizes(watch, monkeypatch):
    monkeypatch.setattr(attention_choice, "SIZES", 3)
    orders = [order_of(CALL._replace(length=300 + more)) for more in range(5)]
    assert orders == [("cudnn", "efficient")] * 3 + [("efficient",)] * 2
    assert [order_of(CALL._replace(length=300 + more)) for more in range(5)] == orders


def test_a_compiled_call_may_plan_any_size(watch, monkeypatch):
    monkeypatch.setattr(attention_choice, "SIZES", 0)
    assert order_of(CALL) == ("efficient",)
    assert known(GPU, torch.bfloat16, *HEADS) == ("cudnn", "efficient")
