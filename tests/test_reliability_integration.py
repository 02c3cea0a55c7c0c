"""How programs and modules live beside other code, by numbers of docs/reliability.md.

Arguments that nothing would use, derivatives that there are none of, strides, modules without
tokens, frozen and wrapped parts, operations as torch sees them, weights outside of their module.
"""

import copy
from contextlib import contextmanager

import pytest
import torch
from citizens import Calls
from loss_options import EVERYTHING, TRAINED, assert_equal, each_form, example
from test_layers import MAKES, pair, tables_of
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cadenza as cz
from cadenza.core.errors import BackEndError, ProgramError
from cadenza.library.models import LlamaConfig

OPERATIONS = torch.ops.cadenza
CONFIG = LlamaConfig(
    vocabulary=61, width=24, layers=2, heads=4, key_value_heads=2, feed_forward=40, context=16
)


def layer_of(make="llama"):
    """A layer in float32, a stream and its tables."""
    layer, _ = pair(make)
    tables = [table.float() for table in tables_of(make, 1, 4) or ()]
    return layer.float(), torch.randn(1, 4, 16), tables


# --- arguments ------------------------------------------------------------------------------------

X, W = torch.randn(4, 12), torch.randn(16, 12)
HEADS = {"head_dim": 4, "heads": 2, "key_value_heads": 1}
UP = {"w_up": torch.randn(30, 12), "w_down": torch.randn(12, 15)}
TARGET = torch.zeros(4, dtype=torch.int64)
UNKNOWN = {
    **{name: (lambda n=name, **more: getattr(cz.ops, n)(X, W, **more), "unknown 'bias_'")
       for name in ("linear", "norm", "qkv_projection", "feed_forward", "decoder_block")},
    "loss": (lambda **more: cz.ops.linear_cross_entropy(X, W, TARGET, **more), "argument 'bias_'"),
    "attention": (lambda **more: cz.ops.causal_attention(X[None], heads=1, **more), "'bias_'"),
    "tables": (lambda **more: cz.ops.rotary_tables({"head_dim": 4}, TARGET, **more), "'bias_'"),
    "DecoderLayer": (lambda **more: cz.nn.DecoderLayer(12, 4, 2, 24, **more), "'bias_'"),
    "Architecture": (lambda **more: cz.nn.Architecture("rms", **more), "'bias_'"),
    "Linear": (lambda **more: cz.nn.Linear(12, 24, **more), "'bias_'"),
    "LinearCrossEntropy": (lambda **more: cz.nn.LinearCrossEntropy(12, 24, **more), "'bias_'"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "named"), UNKNOWN.values(), ids=UNKNOWN)
def test_06_an_unknown_argument_raises_and_is_named(call, named):
    with pytest.raises(TypeError, match=named):
        call(bias_=None)


UNUSED = {
    "offset alone": (cz.ops.linear, (X, W), {"norm_offset": 1.0}, "norm_offset that nothing"),
    "offset without weight": (cz.ops.norm, (X,), {"offset": 1.0}, "norm_offset that nothing"),
    "offset of RMSNorm without weight": (
        cz.ops.feed_forward, (X,), {**UP, "norm": "rms", "norm_offset": 1.0}, "norm_offset that"),
    "offset of no norm": (
        cz.ops.decoder_block, (X, X, W[:12]), {**UP, "norm_offset": 1.0}, "norm_offset that"),
    "offset of heads": (cz.ops.qkv_projection, (X, W), {**HEADS, "norm_offset": 1.0}, "norm_off"),
    "pairs": (cz.ops.qkv_projection, (X, W), {**HEADS, "interleaved": True}, "nothing rotates"),
    "no cap": (cz.ops.linear, (X, W), {"softcap": 0.0}, "a cap of nothing"),
}  # fmt: skip


@pytest.mark.parametrize(("program", "args", "named", "said"), UNUSED.values(), ids=UNUSED)
def test_06_an_option_that_nothing_uses_raises(program, args, named, said):
    with pytest.raises(ProgramError, match=said):
        program(*args, **named)


# --- derivatives ----------------------------------------------------------------------------------


def loss_of(x):
    return cz.ops.linear_cross_entropy(x, W, TARGET)


@pytest.mark.parametrize("function", [lambda x: cz.ops.linear(x, W), loss_of])
def test_08_forward_mode_derivatives_raise_and_name_the_cure(function):
    """A kernel would compute without the tangent, as if it were 0."""
    with pytest.raises(ProgramError, match=r"a tangent of x(.|\n)*write: .*(plain|F\.cross)"):
        torch.func.jvp(function, (X,), (X,))
    assert function(X).isfinite().all()
    for transform in (torch.func.grad(lambda x: function(x).sum()), torch.func.jacrev(function)):
        message = r"within a transform of torch\.func(.|\n)*write: .*(plain|F\.cross)"
        with pytest.raises(ProgramError, match=message):
            transform(X)


# --- layouts --------------------------------------------------------------------------------------

PLACES = {
    "transposed": lambda t: t.T.contiguous().T,
    "sliced": lambda t: torch.cat((t, t), 1)[:, : t.shape[1]],
    "spread": lambda t: t.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_13_a_gradient_of_any_strides_is_added_to_where_it_is(dtype, place):
    x, dy = torch.randn(9, 5).bfloat16(), torch.randn(9, 6).bfloat16()
    start = torch.randn(6, 5).to(dtype)
    gradient, expected = place(start.clone()), start.clone()
    assert not gradient.is_contiguous()
    cz.ops.accumulate_weight_gradient(gradient, place(x), place(dy))
    cz.ops.accumulate_weight_gradient(expected, x, dy)
    torch.testing.assert_close(gradient, expected)
    assert not torch.equal(gradient, start)


# --- no tokens, frozen parts ----------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0)])
@pytest.mark.parametrize("make", MAKES)
def test_18_a_layer_without_tokens_has_zero_gradients(make, batch, length):
    layer, _, tables = layer_of(make)
    tables = [table[:, :1].expand(batch, length, -1) for table in tables]
    stream, squares = layer(torch.randn(batch, length, 16, requires_grad=True), None, *tables)
    (stream.sum() + squares.sum()).backward()
    assert (stream.shape, squares.shape) == ((batch, length, 16), (batch, length, 1))
    for name, weight in layer.named_parameters():
        assert weight.grad.shape == weight.shape, name
        assert not weight.grad.any(), name


FROZEN = {"nothing": 0, "self_attn": 2, "mlp": 2, "mlp.down_proj": 1, "": 4}


@pytest.mark.parametrize(("frozen", "fewer"), FROZEN.items())
def test_19_frozen_parts_of_a_layer_cost_no_product(frozen, fewer, monkeypatch):
    layer, x, tables = layer_of()
    if frozen != "nothing":
        layer.get_submodule(frozen).requires_grad_(False)
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: products.append(1) or mm(a, b))
    layer(x.requires_grad_(), None, *tables)[0].sum().backward()
    assert len(products) == 4 + 8 - fewer


# --- modules that are wrapped ---------------------------------------------------------------------


class Adapted(nn.Module):
    """A projection with a low-rank adapter, which hands through its weight and bias."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lower, self.upper = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + self.upper(self.lower(x))


class Quantised(nn.Linear):
    """A Linear whose forward is not that of its weight."""

    def forward(self, x):
        return super().forward(x.round())


def quantised(linear):
    linear.__class__ = Quantised
    return linear


def hooked(module):
    module.register_forward_hook(lambda module, args, output: 2.0 * output)
    return module


def patched(module):
    module.forward = lambda x: 2.0 * x
    return module


WRAPPERS = {
    "adapter": Adapted, "class": quantised, "hook": hooked, "forward": patched,
    "mask": lambda linear: prune.random_unstructured(linear, "weight", 0.5),
}  # fmt: skip
PROJECTIONS = [f"self_attn.{n}_proj" for n in "qkvo"] + [
    f"mlp.{n}_proj" for n in ("gate", "up", "down")
]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("path", PROJECTIONS)
def test_20_a_projection_that_does_more_than_its_weight_raises(path, wrap):
    layer, x, tables = layer_of()
    layer.set_submodule(path, wrap(layer.get_submodule(path)))
    with pytest.raises(ProgramError, match=r"never calls it(.|\n)*merge_and_unload"):
        layer(x, None, *tables)


@pytest.mark.parametrize("make", ["llama", "gemma2", "gemma3", "olmo2", "gpt2"])
@pytest.mark.slow
def test_20_a_norm_that_does_more_than_its_weight_raises(make):
    layer, x, tables = layer_of(make)
    norms = [name for name, _ in layer.named_modules() if "norm" in name]
    for name in norms:
        watched = copy.deepcopy(layer)
        hooked(watched.get_submodule(name))
        with pytest.raises(ProgramError, match="with hooks"):
            watched(x, None, *tables)


def test_20_a_parametrised_weight_is_the_weight():
    layer, x, tables = layer_of()
    parametrizations.weight_norm(layer.mlp.up_proj)
    layer(x, None, *tables)[0].sum().backward()
    assert all(weight.grad is not None for weight in layer.mlp.up_proj.parameters())


def test_20_hooks_on_the_layer_are_called():
    layer, x, tables = layer_of()
    expected = layer(x, None, *tables)[0]
    layer.register_forward_hook(lambda module, args, output: (2.0 * output[0], output[1]))
    assert torch.equal(layer(x, None, *tables)[0], 2.0 * expected)


# --- operations as torch sees them ----------------------------------------------------------------


def recorded(lean, reduction):
    """The calls of our operations in one loss with every option, forward and backward."""
    case = example(EVERYTHING | {"reduction": reduction}, rows=6)
    given = {n: v.requires_grad_(n in TRAINED) for n, v in case.operands.items()}
    with Calls() as calls:
        cz.ops.linear_cross_entropy(**given, **case.options, lean=lean, chunk=4).sum().backward()
    return [(op, args) for op, args, _ in calls.calls if op.namespace == "cadenza"]


LOSSES = {
    "cross_entropy_sum", "scaled_gradient", "cross_entropy_rows", "cross_entropy_rows_backward",
    "cross_entropy_lean", "cross_entropy_lean_backward", "sum",
}  # fmt: skip


@pytest.mark.slow
def test_24_opcheck_of_every_operation_of_a_loss():
    calls = [
        c for form in ((False, "sum"), (False, "none"), (True, "mean")) for c in recorded(*form)
    ]
    found = {op._opname: (op, args) for op, args in calls}
    assert found.keys() == LOSSES
    for name, (op, args) in found.items():
        detached = args if "backward" not in name and "scaled" not in name else _detached(args)
        assert set(torch.library.opcheck(op, detached).values()) == {"SUCCESS"}, name


def _detached(args):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)


def test_24_every_operation_is_one_that_is_opchecked():
    """A new operation needs an opcheck here, in test_operator or in test_accumulate."""
    known = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("cadenza::")}  # fmt: skip
    assert known == LOSSES | {"run", "run_backward", "accumulate_weight_gradient"}


@each_form
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "selective"])
def test_28_a_loss_computed_again_is_the_same_bit_by_bit(kind, reduction, lean):
    """And not computed again where selective checkpointing lists its overload."""
    case = example({"bias": True}, dtype=torch.float32)
    names = [op._opname for op, _ in recorded(lean, reduction)]
    operation = getattr(OPERATIONS, next(n for n in names if n != "sum")).default
    options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts([operation])

    def loss(x, w, target, bias):
        return cz.ops.linear_cross_entropy(
            x, w, target, bias=bias, lean=lean, chunk=4, reduction=reduction
        )

    expected, _ = backward_of(loss, case)
    found, calls = backward_of(lambda *given: checkpoint(loss, *given, **options), case)
    assert_equal(found, expected, 0.0)
    assert len(calls.of(operation)) == (kind != "selective")


def backward_of(function, case):
    """The loss and its gradients, and what ran in backward."""
    given = {n: v.clone().requires_grad_(n in TRAINED) for n, v in case.operands.items()}
    loss = function(*given.values())
    with Calls() as calls:
        loss.backward(torch.ones_like(loss).cumsum(0) if loss.dim() else torch.tensor(0.3))
    return [loss, *(v.grad for n, v in given.items() if n in TRAINED)], calls


# --- weights outside of their module --------------------------------------------------------------


class Absent:
    """Takes a unit's parameters away but in its forward, and gives them back for backward."""

    def __init__(self, unit):
        self.kept = {p: p.detach().clone() for p in unit.parameters()}
        self.take()
        unit.register_forward_pre_hook(lambda *_: self.give())
        unit.register_forward_hook(lambda *_: self.take())

    def give(self):
        for parameter, value in self.kept.items():
            parameter.data = value

    def take(self):
        for parameter in self.kept:
            parameter.data = torch.empty(0)


def test_29_each_weight_is_used_in_the_forward_of_its_own_unit():
    """Layers, embedding and all else are units, as fully_shard would have them."""
    torch.manual_seed(1)
    model, twin = (cz.models.Llama(CONFIG) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    tokens = torch.randint(61, (2, 5))
    expected = twin(tokens, tokens)
    units = [Absent(unit) for unit in (*model.model.layers, model.model.embed_tokens)]
    assert model.model.layers[0].mlp.up_proj.weight.numel() == 0
    with torch.no_grad():
        loss = model(tokens, tokens)
    assert torch.equal(loss, expected)
    assert all(parameter.numel() == 0 for unit in units for parameter in unit.kept)


FREED = {
    "a program": lambda x, w: cz.ops.linear(x, w),
    "a norm": lambda x, w: cz.ops.norm(w, x[0]),
    "a loss": lambda x, w: cz.ops.linear_cross_entropy(x, w, TARGET),
    "what is kept": lambda x, w: cz.ops.linear(x, w),
}


@contextmanager
def freed(tensor):
    """Inside, its storage is empty; only inside, for nothing may print it then."""
    size = tensor.untyped_storage().size()
    tensor.untyped_storage().resize_(0)
    try:
        yield
    finally:
        tensor.untyped_storage().resize_(size)


@pytest.mark.parametrize("name", FREED)
def test_29_a_weight_without_memory_raises_with_advice(name):
    """As of a shard whose storage was freed: a kernel would read wherever its pointer leads."""
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    y = FREED[name](x, w) if name == "what is kept" else None
    with (
        freed(w),
        pytest.raises(BackEndError, match=r"no memory(.|\n)*write: .*forward of the module"),
    ):
        (FREED[name](x, w) if y is None else y).sum().backward()


class Sharded(torch.Tensor):
    """A tensor that says of itself what a DTensor does."""

    device_mesh = placements = ()


SHARDED = {
    "a program": lambda w: cz.ops.linear(X, w),
    "a loss": lambda w: cz.ops.linear_cross_entropy(X, w, TARGET),
    "a gradient": lambda w: cz.ops.accumulate_weight_gradient(w, X, torch.randn(4, 16)),
}


@pytest.mark.parametrize("call", SHARDED.values(), ids=SHARDED)
def test_29_a_sharded_tensor_raises_with_advice(call):
    with pytest.raises(ProgramError, match=r"is sharded(.|\n)*write: .*fully_shard\(layer\)"):
        call(W.as_subclass(Sharded))
