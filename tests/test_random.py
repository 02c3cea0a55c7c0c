"""Random numbers of the language: Philox by counters, and dropout made of them.

A number is a function of the seed, the row and the column alone: the same in forward and backward,
in every call, and whatever the number of rows. A seed in a tensor changes without compilation.
"""

import math

import philox
import pytest
import torch

import cadenza as cz
from cadenza import lang as L
from cadenza.backends import random
from cadenza.library import specialize

SEEDS = (0, 5, -1, 2**32 - 1, 2**32 + 7, -(2**63), 2**63 - 1)
ONES = 0xFFFFFFFF
KNOWN = [  # from the known answers that come with Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, words):
    assert philox.philox(counter, key) == words
    assert tuple(int(word) for word in random.philox(counter, key)) == words
    tensors = [torch.tensor([word]) for word in (*counter, *key)]
    assert tuple(int(w) for w in random.philox(tuple(tensors[:4]), tuple(tensors[4:]))) == words


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_those_of_seed_row_and_column(seed):
    program = cz.block(lambda x: L.random(x, seed) + 0.0 * x)
    x = torch.zeros(129, 5, dtype=torch.float64)
    assert torch.equal(program(x), philox.uniform(seed, 129, 5))
    assert torch.equal(program.plain(x), program(x))
    assert torch.equal(program(x[:7]), program(x)[:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_do_not_depend_on_the_dtype(dtype):
    program = cz.block(lambda x: L.where(L.random(x, 3) < 0.5, 1.0, 2.0 * x))
    x = torch.ones(50, 6, dtype=dtype)
    expected = torch.where(philox.uniform(3, 50, 6) < 0.5, 1.0, 2.0)
    assert torch.equal(program(x).double(), expected)
    assert torch.equal(program.plain(x).double(), expected)


@cz.block
def dropped(x, p, seed):
    """The program of most tests here."""
    return L.dropout(x, p, seed)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_fraction_dropped_is_p(p):
    y = dropped(torch.ones(400, 251), p, 11)
    fraction = (y == 0).double().mean().item()
    assert abs(fraction - p) < 4 * math.sqrt(p * (1 - p) / y.numel())
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_nothing_is_dropped_at_0():
    x = torch.randn(3, 5)
    assert torch.equal(dropped(x, 0.0, 11), x)


def test_the_mask_is_the_same_in_backward():
    x = (torch.rand(129, 7) + 0.5).requires_grad_()
    y = dropped(x, 0.4, 3)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    assert torch.equal(x.grad, torch.where(y != 0, torch.tensor(1 / 0.6), 0.0))


def test_the_mask_follows_seed_row_and_column():
    x = torch.ones(64, 64)
    mask = dropped(x, 0.5, 3)
    assert torch.equal(mask, dropped(x, 0.5, 3))
    assert not torch.equal(mask, dropped(x, 0.5, 4))
    assert not torch.equal(mask, dropped(x, 0.5, 3 + 2**32))
    assert len(mask.unique(dim=0)) == len(mask.unique(dim=1)) == 64
    assert not torch.equal(mask, mask.T)


def test_a_seed_in_a_tensor_changes_without_compilation(monkeypatch):
    compiled = []
    original = specialize.compile_program
    monkeypatch.setattr(
        specialize, "compile_program", lambda *a, **k: compiled.append(a) or original(*a, **k)
    )
    program = cz.block(lambda x, seed: L.dropout(x, 0.5, seed))
    x = torch.randn(9, 5, requires_grad=True)
    for shape in ((), (1,), (1, 1)):
        for seed in SEEDS:
            y = program(x, torch.full(shape, seed))
            assert torch.equal(y, dropped(x, 0.5, seed))
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(gradient != 0, y != 0)
    own = [call for call in compiled if call[0] is program.function]
    assert len(own) == 1, f"{len(own)} compilations"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_seed_in_a_tensor_for_a_single_row(shape):
    x = torch.ones(1, 64)
    assert torch.equal(dropped(x, 0.5, torch.full(shape, 7)), dropped(x, 0.5, 7))
