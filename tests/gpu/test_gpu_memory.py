"""What kernels write and read on a GPU: nothing beside their outputs, all of these, no input.

Every new tensor lies between guard bytes and is NaN before; inputs lie among NaN. Tensors of more
than 2**31 elements, contiguous and strided, give what torch gives on sampled rows. By the plain
template and by Hopper's.
"""

import pytest
import torch
from calls import BRAIN, NAMES, RAGGED, check_same, example
from plans import DIRECTIONS, GuardedOn, among_poison, attempt, check_agrees, trials
from template_choice import PINGPONG, PLAIN

import cadenza as cz
from cadenza import lang as L

pytestmark = pytest.mark.gpu
PAST = 2**31


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("sizes", "gap", "template"),
    [(RAGGED, 64, PLAIN), (RAGGED, 5, PLAIN), (None, 5, PLAIN), (RAGGED, 64, PINGPONG)],
    ids=["by descriptors", "by pointers", "odd sizes", "by Hopper's template"],
    indirect=["template"],
)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_written_whole_and_nothing_else_is(
    name, sizes, gap, template, place, monkeypatch
):
    plans = trials(name, place.rows(129), place, sizes)
    for direction, given in zip(DIRECTIONS, plans, strict=True):
        inputs = [among_poison(tensor, gap) for tensor in given.inputs]
        before = [tensor.clone() for tensor in inputs]
        guarded = GuardedOn()
        with monkeypatch.context() as patch:
            guarded.patch(patch)
            found = attempt(given._replace(inputs=inputs))
            again = found.executable(inputs, given.rows)
        try:
            guarded.check()
            check_agrees(given, found.outputs, place)
            check_same(dict(enumerate(again)), dict(enumerate(found.outputs)), "when replayed")
            for tensor, kept in zip(inputs, before, strict=True):
                assert torch.equal(tensor, kept), "an input was changed"
        except AssertionError as error:
            raise AssertionError(f"{direction}: {error}") from error


# --- past 2**31 elements --------------------------------------------------------------------------


@cz.block(shapes={"x": "M K", "w": "N K", "r": "M N"})
def scaled(x, w, r):
    """A product with an operand as large as its result, which backward needs too."""
    acc = L.linear(x, w)
    return r * acc + r


def free_bytes():
    """What the GPU has left, this process's own cache counted in."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def near(actual, expected, what):
    """Raises AssertionError unless each row is as near as two roundings to bfloat16 allow."""
    expected = expected.double()
    error, size = (actual.double() - expected).norm(dim=1), expected.norm(dim=1)
    wrong = ~(error <= 2.0**-7 * size)
    assert not wrong.any(), f"{what}: sampled rows {wrong.nonzero()[:, 0].tolist()} are wrong"


@pytest.mark.alone
def test_operands_and_results_of_more_than_2_to_the_31_elements(template, place):
    rows, columns, width = 70_000, 32_768, 64
    if free_bytes() < 40e9:
        pytest.skip("needs 40 GB of a GPU's memory")

    def random(*shape):
        return torch.empty(shape, dtype=BRAIN, device=place.device).normal_()

    x, w, r = random(rows, width), random(columns, width) / width**0.5, random(rows, columns)
    assert r.numel() > PAST
    leaves = [t.requires_grad_() for t in (x, w, r)]
    y, upstream = scaled(x, w, r), random(rows, columns)
    dx, dw, dr = torch.autograd.grad(y, leaves, upstream)
    edge = PAST // columns
    sample = torch.tensor([0, 1, 4097, edge - 1, edge, edge + 1, rows - 2, rows - 1]).to(x.device)
    with torch.no_grad():
        xs, rs, gs = (t[sample].float() for t in (x, r, upstream))
        acc = xs @ w.float().T
        near(y[sample], rs * acc + rs, "y")
        near(dr[sample], gs * (acc + 1.0), "dr")
        near(dx[sample], (gs * rs) @ w.float(), "dx")
        expected = torch.zeros(columns, width, device=x.device)
        for part in torch.arange(rows, device=x.device).split(8192):
            expected += (upstream[part].float() * r[part].float()).T @ x[part].float()
        near(dw, expected, "dw")


@pytest.mark.alone
@pytest.mark.parametrize("offset", [0, 1], ids=["by descriptors", "by pointers"])
@pytest.mark.parametrize(("rows", "stride"), [(40, 2**26), (3, PAST + 64)])
def test_rows_further_apart_than_2_to_the_31_elements(rows, stride, offset, template, place):
    width, columns = 128, 256
    length = (rows - 1) * stride + 2 * columns
    if free_bytes() < 3 * length:
        pytest.skip(f"needs {3 * length / 1e9:.0f} GB of a GPU's memory")
    base = torch.empty(length, dtype=BRAIN, device=place.device)

    def far(tensor):
        return base[offset:].as_strided(tensor.shape, (stride, 1)).copy_(tensor)

    near_y = torch.randn(rows, width, dtype=BRAIN, device=place.device)
    near_x = torch.randn(rows, columns, dtype=BRAIN, device=place.device)
    w = torch.randn(columns, width, dtype=BRAIN, device=place.device)
    program = example("residual_rms").residual_rms
    expected = program(near_y, w, residual=near_x)
    plain = template.name == PLAIN  # else it stands in where the template can't reach
    check_pair(program(far(near_y), w, residual=near_x), expected, "y", plain or not offset)
    check_pair(program(near_y, w, residual=far(near_x)), expected, "residual", plain)


def check_pair(found, expected, what, same_kernel):
    """What `residual_rms` returns is what is expected: bit by bit if one kernel made both."""
    pairs = [dict(zip(("x", "square_sum"), both, strict=True)) for both in (found, expected)]
    if same_kernel:
        check_same(*pairs, what)
        return
    for name, value in pairs[0].items():
        near(value, pairs[1][name], f"{what}: {name}")
