"""Whether to defer at all: the cheaper of two forms, whatever needs a gradient; not in fp16."""

import pytest
import torch
from block_operands import cast, operands
from graphs import program
from planned import adjoints_of, call, execute, plain_results, products, verified

from cadenza.core import choice
from cadenza.core import lang as L
from cadenza.core.choice import price
from cadenza.core.pipeline import Pair, differentiate_program
from cadenza.core.plan_text import show_plans
from cadenza.library.blocks import BUILT_IN
from cadenza.tools.numerics import wanted


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """No choice is known yet."""
    monkeypatch.setattr(choice, "_KEPT", {})


def shared_weight(x, v, g, w):
    """One weight for a value and its norm: deferral gives their adjoints different scales."""
    y = x @ v
    return L.tanh(y @ w + L.rms_norm(y, g) @ w)


SHARED = ["x M 1024 bfloat16", "v 1024 1024 bfloat16", "g 1 1024 bfloat16", "w 1024 1024 bfloat16"]
ALL = ("x", "v", "g", "w")


def plans(pair: Pair):
    return [plan for plan in (pair.forward_plan, pair.backward_plan) if plan]


def graph_of(name: str, dtype: torch.dtype):
    given = cast(operands(name, 40), dtype)
    return BUILT_IN[name].graph(**given), wanted(given)


def test_the_textbook_form_is_kept_where_it_is_cheaper():
    graph = program(shared_weight, *SHARED)
    deferred, textbook, chosen = (
        differentiate_program(graph, ALL, deferral=form) for form in (True, False, None)
    )
    assert products(deferred.backward) == products(textbook.backward) + 1
    assert price(plans(textbook)) < price(plans(deferred))
    assert show_plans(chosen) == show_plans(textbook)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_no_form_is_cheaper_than_the_one_that_is_kept(name):
    graph, names = graph_of(name, torch.bfloat16)
    deferred, textbook, chosen = (
        differentiate_program(graph, names, deferral=form) for form in (True, False, None)
    )
    assert price(plans(chosen)) <= min(price(plans(deferred)), price(plans(textbook)))


def test_the_form_does_not_depend_on_what_needs_a_gradient():
    graph = program(shared_weight, *SHARED)
    expected = differentiate_program(graph, deferral=False).forward_plan
    for needed in ((), ("g",), ("x",), ALL):
        choice._KEPT.clear()
        found = differentiate_program(graph, needed).forward_plan
        assert [k.product for k in found.kernels] == [k.product for k in expected.kernels]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_fp16_keeps_the_textbook_form(name):
    graph, names = graph_of(name, torch.float16)
    textbook = differentiate_program(graph, names, deferral=False)
    assert show_plans(differentiate_program(graph, names)) == show_plans(textbook)


def test_a_form_is_priced_once_for_a_program(monkeypatch):
    priced = []
    monkeypatch.setattr(choice, "price", lambda plans: priced.append(plans) or price(plans))
    for needed in (ALL, ("x",), ()):
        differentiate_program(program(shared_weight, *SHARED), needed)
    assert len(priced) == 2


def test_nothing_is_priced_where_nothing_is_deferred(monkeypatch):
    monkeypatch.setattr(choice, "price", None)
    graph = program(lambda x, w: L.silu(x @ w), *SHARED[::3])
    assert differentiate_program(graph, ("x", "w")).backward_plan


@pytest.mark.parametrize("form", [True, False])
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_both_forms_have_the_same_values(name, form):
    made = call(name, 5)
    pair = verified(differentiate_program(made.pair().program, made.needed, deferral=form))
    upstream = adjoints_of(pair.program, 5)
    expected = plain_results(pair, made, upstream)
    for found, oracle in zip(execute(pair, made.tensors, 5, upstream, 3), expected, strict=True):
        assert list(found) == list(oracle)
        for value, exact in oracle.items():
            torch.testing.assert_close(found[value], exact, rtol=1e-9, atol=1e-11)
