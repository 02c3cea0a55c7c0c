"""Where weights of one product lie after all that moves, copies, replaces or wraps them."""

import copy
import io
import pickle

import pytest
import torch
from joint_weights import WIDTH, Copies, apart, given, joint, layer, step, together
from tiny_models import each_family, tiny, tiny_config, tokens_and_targets
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import WORLD, WithLoss, batch, both

import cadenza as cz
from cadenza.library.models.sizes import build
from cadenza.library.weights import put_together

MOVES = {
    "nothing": lambda module: module,
    "to": lambda module: module.to(torch.bfloat16),
    "half and back": lambda module: module.half().float(),
    "to where it is": lambda module: module.to("cpu"),
    "meta": lambda module: module.to("meta").to_empty(device="cpu"),
    "deep copy": copy.deepcopy,
    "part copied": lambda module: copy.deepcopy(module.mlp),
    "load": lambda module: loaded(module, layer("qwen2")),
    "file": lambda module: reread(module),
    "share_memory": lambda module: module.share_memory(),
    "in place": lambda module: module.requires_grad_(False).requires_grad_(True).train().eval(),
}


def loaded(module, other):
    module.load_state_dict(other.state_dict(), strict=True)
    return module


def reread(module):
    """A module after torch.save, which keeps one storage of several weights once."""
    file = io.BytesIO()
    torch.save(module, file)
    numbers = sum(weight.nbytes for weight in module.parameters())
    assert len(file.getvalue()) < numbers + 40000
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("name", MOVES)
def test_weights_lie_together_after(name):
    module = layer("qwen2")
    before, state = list(module.parameters()), copy.deepcopy(module.state_dict())
    moved = MOVES[name](module)
    assert together(moved)
    found = moved.state_dict()
    if name in ("to where it is", "share_memory", "in place", "file", "deep copy", "nothing"):
        assert list(found) == list(state)
        assert all(torch.equal(found[key], state[key]) for key in state)
    if moved is module and name != "meta":
        assert all(a is b for a, b in zip(moved.parameters(), before, strict=True))
    assert {t.untyped_storage().nbytes() for g in joint(moved) for t in g} == {
        sum(t.nbytes for t in group) for group in joint(moved)
    }


def test_weights_made_without_memory_lie_together_once_they_have_some():
    with torch.device("meta"):
        module = layer()
    assert not together(module)
    assert together(module.to_empty(device="cpu"))


@each_family
def test_models_lie_together_when_built_and_loaded(family, tmp_path):
    config = tiny_config(family)
    assert together(build(cz.models.Decoder, config, dtype=torch.bfloat16))
    model = tiny(config)
    cz.models.save(model, tmp_path / "model", shard_bytes=20000)
    read = cz.models.load(tmp_path / "model")
    assert together(read)
    assert read.lm_head.weight is read.model.embed_tokens.weight
    tokens, targets = tokens_and_targets()
    assert torch.equal(read(tokens, targets), model(tokens, targets))


def test_weights_that_a_state_dict_replaced_are_its_own_until_they_move():
    module, state = layer(), apart(layer()).state_dict()
    module.load_state_dict(state, assign=True)
    assert not together(module)
    assert not together(module.to("cpu"))
    for key, value in module.state_dict().items():
        assert value.data_ptr() == state[key].data_ptr(), key
    assert together(module.to(torch.float64))


def test_pickle_gives_each_weight_the_whole_storage_until_the_module_is_copied():
    """Where torch.save writes a storage once; so the documentation says."""
    module = layer("qwen2")
    read = pickle.loads(pickle.dumps(module))
    assert not together(read)
    assert [t.untyped_storage().nbytes() for group in joint(read) for t in group] == [
        sum(t.nbytes for t in group) for group in joint(read) for _ in group
    ]
    copied = copy.deepcopy(read)
    assert together(copied)
    for group in joint(copied):
        assert group[0].untyped_storage().nbytes() == sum(t.nbytes for t in group)
    for key, value in module.state_dict().items():
        assert torch.equal(read.state_dict()[key], value), key
        assert torch.equal(copied.state_dict()[key], value), key


def test_tied_weights_stay_tied():
    first, second = cz.nn.FeedForward(8, 12), cz.nn.FeedForward(8, 12)
    second.gate_proj.weight = first.gate_proj.weight
    both_of_them = nn.ModuleList([first, second]).double()
    assert together(first)
    assert not together(second)
    assert second.gate_proj.weight is first.gate_proj.weight
    copied = copy.deepcopy(both_of_them)
    assert copied[1].gate_proj.weight is copied[0].gate_proj.weight
    assert together(copied[0])
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(copied[1](x), second(x))


def test_a_deep_copy_has_memory_of_its_own():
    module = layer()
    copied, expected = copy.deepcopy(module), copy.deepcopy(module.state_dict())
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    for key, value in module.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_a_deep_copy_of_a_compiled_module_computes_with_its_own_weights():
    module, x = cz.nn.FeedForward(WIDTH, 40), torch.randn(3, WIDTH)
    module.compile(backend="eager")
    expected = module(x)
    copied = copy.deepcopy(module)
    assert torch.equal(copied(x), expected)
    with torch.no_grad():
        copied.down_proj.weight.zero_()
    assert not copied(x).any()
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: b.double(),
        lambda a, b: b.to("meta"),
        lambda a, b: b.expand(4, 8),
        lambda a, b: torch.zeros(9, 8)[:3],
        lambda a, b: b.clone().share_memory_(),
        lambda a, b: torch.zeros(3, 9),
        lambda a, b: torch.zeros(0, 8),
        lambda a, b: a,
    ],
    ids=["dtype", "device", "expanded", "part", "shared", "width", "empty", "itself"],
)
def test_weights_that_may_not_move_stay(change):
    a = torch.randn(3, 8)
    b = change(a, torch.randn(1, 8))
    places = a.data_ptr(), b.data_ptr()
    put_together([a, b])
    assert (a.data_ptr(), b.data_ptr()) == places


def test_weights_that_a_parametrisation_computes_are_joined_by_a_copy():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    module, x = cz.nn.FeedForward(8, 12), torch.randn(3, 8)
    expected = cz.nn.FeedForward(8, 12)
    expected.load_state_dict(module.state_dict())
    expected.up_proj.weight.data.mul_(2)
    nn.utils.parametrize.register_parametrization(module.up_proj, "weight", Doubled())
    assert torch.equal(module(x), expected(x))
    assert torch.equal(module.double()(x.double()), expected.double()(x.double()))


# --- torch.compile, two processes -----------------------------------------------------------------


@pytest.mark.slow
def test_compiled_as_one_graph_it_is_the_same_and_moves_with_its_weights():
    module, inputs = layer(), given()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for change in (lambda m: m, apart, lambda m: m.double().float()):
        change(module)
        expected, found = [], []
        for one, into in ((module, expected), (compiled, found)):
            module.zero_grad()
            into += [step(one, *inputs), *(weight.grad.clone() for weight in module.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def replicated(rank, folder):
    """A step under DistributedDataParallel: what is copied, and whether weights stay together."""
    model = WithLoss()
    wrapped, tokens = DistributedDataParallel(model), batch(0).chunk(WORLD)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Copies(width=24, rows=12) as copies:
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(tokens, torch.tensor(64)).backward()
            optimizer.step()
    layers = model.llama.model.layers
    torch.save((together(layers), cats(copies)), folder / f"replicated{rank}")


def cats(copies):
    """Shapes of what is joined: DDP itself copies gradients, each by itself, into its buckets."""
    sizes = ((4 + 2 * 2) * 6, 2 * 40)
    return [shape for shape in copies.found if shape[0] in sizes]


@pytest.mark.slow
def test_under_ddp_weights_stay_together(tmp_path):
    both(replicated, tmp_path)
    for rank in range(WORLD):
        assert torch.load(tmp_path / f"replicated{rank}") == (True, [])


def sharded(rank, folder):
    """Of a step under fully_shard: shapes of all that is kept for backward, and how many bytes of
    layers' weights are among it between forward and backward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh, kept = WithLoss(), init_device_mesh("cpu", (WORLD,)), []
    layers = model.llama.model.layers
    own = {tuple(weight.shape) for weight in layers.parameters() if weight.dim() == 2}
    for one in (*layers, model):
        fully_shard(one, mesh=mesh, reshard_after_forward=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = model(batch(0).chunk(WORLD)[rank], torch.tensor(64))
    weights = [t for t in kept if tuple(t.shape) in own]
    held = sum(t.untyped_storage().nbytes() for t in weights)
    loss.backward()
    torch.distributed.barrier()  # nobody leaves while another one's gradients are on their way
    torch.save(({tuple(t.shape) for t in kept}, len(weights), held), folder / f"sharded{rank}")


@pytest.mark.slow
def test_under_fully_shard_backward_holds_no_weight_that_was_sharded_again(tmp_path):
    both(sharded, tmp_path)
    for rank in range(WORLD):
        shapes, weights, held = torch.load(tmp_path / f"sharded{rank}")
        assert shapes.isdisjoint({((4 + 2 * 2) * 6, 24), (2 * 40, 24)})
        assert weights >= 2 * 7
        assert held == 0
