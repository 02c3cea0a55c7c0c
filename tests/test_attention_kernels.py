"""PyTorch's kernels of attention, each by its name: on a CPU, whose kernels are pretended."""

import threading

import pytest
import torch
import torch.nn.functional as F
from pretended_gpu import CALL, GPU, HEADS, chosen_here, pretend_gpu, pretend_kernels
from scores import by_formula
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from cadenza.library import attention, attention_choice, attention_kernels
from cadenza.library.attention_choice import known, order_of
from cadenza.library.attention_kernels import (
    ALL,
    EXPANDED,
    KERNELS,
    attend,
    is_free,
    preferring,
    serves,
)


@pytest.fixture(autouse=True)
def watch(monkeypatch, tmp_path):
    """A pretended GPU whose cache is empty."""
    return pretend_gpu(monkeypatch, tmp_path)


@pytest.fixture
def ran(monkeypatch):
    """The kernels that ran, and in which dtype; all of them serve."""
    return pretend_kernels(monkeypatch)


def parts(length=7, heads=4, keys=2, **options):
    """Random queries, keys and values, by heads."""
    sizes = [(2, count, length, 16) for count in (heads, keys, keys)]
    return [torch.randn(size, **{"requires_grad": True, **options}) for size in sizes]


# --- their operators ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_operators_take_what_they_are_given(name):
    keys = 4 if "efficient" in name else 2
    operands = parts(keys=keys, device="meta", dtype=torch.bfloat16)
    found = KERNELS[name].operator(*operands, 0.3)
    assert (found.shape, found.dtype) == (operands[0].shape, torch.bfloat16)
    gradients = torch.autograd.grad(found, operands, torch.empty_like(found))
    assert [g.shape for g in gradients] == [part.shape for part in operands]
    with torch.no_grad():
        assert KERNELS[name].operator(*operands, None).grad_fn is None


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_what_backward_needs_is_made_where_there_is_one(name, monkeypatch):
    asked, stock = [], attention_kernels._is_trained
    monkeypatch.setattr(
        attention_kernels, "_is_trained", lambda *given: asked.append(stock(*given)) or asked[-1]
    )
    for wanted in (True, False):
        KERNELS[name].operator(*parts(keys=4, device="meta", requires_grad=wanted), None)
    with torch.no_grad():
        KERNELS[name].operator(*parts(keys=4, device="meta"), None)
    assert asked == [True, False, False]


def test_heads_that_an_operator_could_not_take(ran):
    odd = [torch.randn(2, 4, 7, 12) for _ in range(3)]
    assert [serves(name, *odd) for name in KERNELS] == [False, True, True, True]
    assert [serves(name, *parts()) for name in KERNELS] == [True, True, False, False]


# --- the first that serves ------------------------------------------------------------------------

ORDERS = [
    (("cudnn", "flash"), (), "cudnn, shared"),
    (("efficient", "flash"), (), "flash, shared"),
    (("cudnn", EXPANDED), ("cudnn",), EXPANDED),
    (("cudnn",), ("cudnn",), None),
    ((), (), None),
]


def formula(query, key, value, scale=None):
    """The scores' formula, of heads."""
    qkv = torch.cat([part.transpose(1, 2).flatten(2) for part in (query, key, value)], 2)
    flat = by_formula(qkv, query.shape[1], key.shape[1], scale=scale)
    return flat.unflatten(2, (query.shape[1], -1)).transpose(1, 2)


@pytest.mark.parametrize(("order", "without", "expected"), ORDERS)
def test_the_first_that_serves_attends(order, without, expected, monkeypatch):
    ran = pretend_kernels(monkeypatch, without)
    operands = parts(dtype=torch.float64)
    found, wanted = attend(*operands, order, 0.3), formula(*operands, 0.3)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(wanted)
    for ours, theirs in zip(
        *(torch.autograd.grad(y, operands, upstream) for y in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    assert ran == ([(expected, torch.float64)] if expected else [])


def test_under_autocast_kernels_have_its_dtype(ran):
    operands = parts()
    with torch.autocast("cpu", torch.bfloat16):
        found, stock = attend(*operands, ("cudnn",)), attend(*operands, ())
    assert found.dtype == stock.dtype == torch.bfloat16
    assert ran == [("cudnn, shared", torch.bfloat16)]
    torch.testing.assert_close(found, stock)


# --- preferring -----------------------------------------------------------------------------------


def in_order():
    """PyTorch's kernels as it would try them now."""
    return torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)


def stock(**options):
    """PyTorch's function, as models call it."""
    options = {"is_causal": True, "enable_gqa": True, **options}
    return F.scaled_dot_product_attention(*parts(), **options)


def test_plain_causal_calls_run_on_what_is_preferred(ran):
    before = in_order()
    with preferring(("cudnn",)):
        stock()
        F.scaled_dot_product_attention(*parts(keys=4), None, 0.0, True)
        assert in_order() == before, "it is a setting of the whole process"
    stock()
    assert [name for name, _ in ran] == ["cudnn, shared", "cudnn"]


OTHER = [
    {"is_causal": False}, {"dropout_p": 0.5},
    {"is_causal": False, "attn_mask": torch.ones(7, 7, dtype=torch.bool).tril()},
]  # fmt: skip


@pytest.mark.parametrize("options", OTHER, ids=["whole", "dropout", "mask"])
def test_other_calls_are_pytorchs(options, ran):
    with preferring(("cudnn",)):
        torch.manual_seed(3)
        found, seed = stock(**options), torch.random.initial_seed()
    torch.manual_seed(seed)
    assert torch.equal(found, stock(**options))
    assert not ran


class Wrapped(torch.Tensor):
    """A tensor that has functions of its own."""


def test_tensors_of_others_are_pytorchs(ran):
    with preferring(("cudnn",)):
        operands = [part.detach().as_subclass(Wrapped) for part in parts(keys=4)]
        F.scaled_dot_product_attention(*operands, is_causal=True)
        flat = [part[0] for part in parts(keys=4)]
        F.scaled_dot_product_attention(*flat, is_causal=True)
        empty = parts(keys=4, length=0)
        F.scaled_dot_product_attention(*empty, is_causal=True)
    assert not ran


def test_what_a_model_says_itself_stays_said(ran):
    with preferring(("cudnn",)):
        with sdpa_kernel(SDPBackend.MATH):
            stock()
        assert not ran
        stock()
    assert len(ran) == 1


def test_what_raises_within_is_over():
    with pytest.raises(KeyError), preferring(("cudnn",)):
        raise KeyError
    assert not torch._C._len_torch_function_stack()


def in_turn(first, second):
    """Runs two lists of functions in threads of their own, one of each in turn."""
    done = [threading.Event() for _ in range(len(first) + len(second) + 1)]

    def run(steps, number):
        for step in steps:
            assert done[number].wait(10)
            step()
            done[number + 1].set()
            number += 2

    done[0].set()
    started = [threading.Thread(target=run, args=pair) for pair in ((first, 0), (second, 1))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert done[-1].is_set()


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_threads_change_nothing_of_one_another(first, ran):
    before, found = in_order(), []
    ours, theirs = preferring(("cudnn",)), sdpa_kernel(SDPBackend.MATH)

    def leave(context):
        found.append(in_order())
        context.__exit__(None, None, None)

    steps = [[each.__enter__, lambda each=each: leave(each)] for each in (ours, theirs)]
    in_turn(*(steps if first == "ours" else reversed(steps)))
    assert SDPBackend.CUDNN_ATTENTION not in found[0], "their setting is gone"
    assert in_order() == before
    assert not ran


def test_threads_prefer_at_the_same_time(ran):
    orders = ("cudnn", "flash"), ("flash", "cudnn")
    contexts = [preferring(order) for order in orders]
    in_turn(
        *(
            [each.__enter__, stock, lambda each=each: each.__exit__(None, None, None)]
            for each in contexts
        )
    )
    assert {name for name, _ in ran} == {"cudnn, shared", "flash, shared"}


# --- who has a say --------------------------------------------------------------------------------

FOUR = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION]  # fmt: skip


class Heard(TorchFunctionMode):
    """Somebody who does attention in PyTorch's place, as `context_parallel` does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


SAID = [
    lambda: sdpa_kernel(SDPBackend.MATH),
    lambda: sdpa_kernel(FOUR),
    lambda: sdpa_kernel(FOUR, set_priority=True),
    lambda: sdpa_kernel(list(ALL), set_priority=True),
    lambda: sdpa_kernel([*FOUR, SDPBackend.OVERRIDEABLE], set_priority=True),
    Heard,
]


@pytest.mark.parametrize("said", SAID)
def test_what_the_caller_has_said_counts(said, watch):
    assert is_free()
    with said():
        assert not is_free()
        assert order_of(CALL) == known(GPU, torch.bfloat16, *HEADS) == ()
    assert is_free()
    assert not watch.calls


def test_another_function_in_the_place_of_pytorchs_is_called(monkeypatch, ran):
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given, **options: given[2])
    assert not is_free()
    monkeypatch.setattr(attention, "chosen", chosen_here)
    qkv = torch.randn(2, 7, 128)
    values = HEADS.by_head(qkv)[2]
    found = attention.causal_attention(qkv, heads=4, key_value_heads=2)
    torch.testing.assert_close(found, values.transpose(1, 2).flatten(2))
    assert not ran


def test_a_default_device_and_kernels_that_are_preferred_say_nothing():
    with torch.device("cpu"), preferring(("cudnn",)):
        assert is_free()


@pytest.mark.parametrize("order", attention_kernels.OWN_ORDERS)
def test_pytorchs_own_orders_say_nothing(order):
    before = torch._C._get_sdp_priority_order()
    try:
        torch._C._set_sdp_priority_order([*order, int(SDPBackend.OVERRIDEABLE)])
        assert is_free()
    finally:
        torch._C._set_sdp_priority_order(before)
    assert before[:4] == [*attention_kernels.OWN_ORDERS[0]], "PyTorch begins with another order"


def test_of_what_another_thread_has_said_nothing_is_kept(watch, monkeypatch):
    say = sdpa_kernel(SDPBackend.MATH)

    def told(call, how):
        say.__enter__()
        return watch(call, how)

    with monkeypatch.context() as patch:
        patch.setattr(attention_choice, "times_of", told)
        assert order_of(CALL) == ()
        say.__exit__(None, None, None)
    assert order_of(CALL) == ("cudnn", "efficient")
    assert len(watch.calls) == 2
