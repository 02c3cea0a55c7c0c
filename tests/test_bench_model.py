"""The suites of `cadenza bench` about whole models, at tiny sizes on a CPU."""

import json
import sys
from contextlib import nullcontext, suppress
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cadenza.tools.bench import hugging_face, model_accuracy, rivals
from cadenza.tools.bench.case import Bench, Case
from cadenza.tools.bench.measurement import Effort
from cadenza.tools.bench.model import MODELS, Training
from cadenza.tools.cli import main

pytest.importorskip("transformers", reason="models of transformers are measured")

CPU = torch.device("cpu")
SMALL = {"B": 2, "S": 40, "layers": 2, "D": 32, "F": 48, "H": 4, "KV": 2, "HD": 8, "V": 300}
SIZES = ",".join(f"{name}={size}" for name, size in SMALL.items())
NARROW = SIZES.replace("layers=2", "layers=1")
CHECKPOINTED = "8b-width-checkpointed"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    """Between two cases, all garbage of this process need not be collected."""
    monkeypatch.setattr("cadenza.tools.bench.contest._let_go", lambda: None)


def case(pattern="1b", **sizes):
    return Case("model", pattern, "small", {**SMALL, **sizes}, "bf16")


def bench(folder, suite, *more, sizes=SIZES):
    """Runs a suite at tiny sizes for a moment; its exit code."""
    arguments = ["bench", suite, "--size", sizes, "--device", "cpu", "--seconds", "0.001"]
    return main([*arguments, "--out", str(folder), *more])


def records(folder, suite):
    """What is on record of a suite, by pattern and variant."""
    found = json.loads((folder / f"{suite}.json").read_text())["records"]
    return {(one["pattern"], one["variant"]): one for one in found}


@pytest.fixture
def attended(monkeypatch):
    """What each call of PyTorch's attention is given."""
    calls, own = [], torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, **options):
        calls.append((options.get("attn_mask"), options.get("is_causal")))
        return own(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    return calls


# --- model ----------------------------------------------------------------------------------------


@pytest.fixture
def _steps_for_bytes(monkeypatch):
    """A meter of memory that counts the steps within, a MiB each."""
    steps, own = [], Training.step

    def step(self, loss):
        steps.append(self)
        return own(self, loss)

    class Meter:
        def __init__(self, device):
            self.before = len(steps)

        def bytes(self):
            return (len(steps) - self.before) * 2**20

    monkeypatch.setattr(Training, "step", step)
    monkeypatch.setattr("cadenza.tools.bench.contest.PeakMemory", Meter)


@pytest.mark.slow
@pytest.mark.usefixtures("_steps_for_bytes")
def test_steps_side_by_side(tmp_path, capsys):
    only = f"--only=1b,{CHECKPOINTED}"
    assert bench(tmp_path, "model", "--variants=ours,eager,lean", only, sizes=NARROW) == 0
    found = records(tmp_path, "model")
    assert {pattern for pattern, _ in found} == {"1b", CHECKPOINTED}
    assert len({one["run"] for one in found.values()}) == 1
    for (pattern, variant), one in found.items():
        weights = 2 * parameters(case(pattern, layers=1))
        assert (one["tokens"], one["held_bytes"]) == (80, 3 * weights)
        assert one["bytes"] == 10 * weights
        if variant == "lean":
            assert one["failed"] == "the suite model has no variant lean"
        else:
            assert one["us"] > 0
            assert one["peak_bytes"] == 2**20  # of one step, and all of it
    said = capsys.readouterr().out
    assert "tokens a second" in said
    assert "held besides GiB" in said


def parameters(made):
    sizes, tied = made.sizes, MODELS[made.pattern].tied
    columns = (2 * sizes["H"] + 2 * sizes["KV"]) * sizes["HD"]
    layer = sizes["D"] * (columns + 3 * sizes["F"] + 2)
    return sizes["layers"] * layer + (2 - tied) * sizes["V"] * sizes["D"] + sizes["D"]


@pytest.mark.parametrize(("pattern", "billions"), [("1b", 1.236), ("8b-width", 1.923)])
def test_models_have_the_sizes_of_their_names(pattern, billions):
    whole = Case("model", pattern, MODELS[pattern].name, MODELS[pattern].sizes, "bf16")
    made = hugging_face.built(whole, torch.device("meta"), tied=MODELS[pattern].tied)
    count = sum(weight.numel() for weight in made.parameters())
    assert count == parameters(whole)
    assert count / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize("variant", ["ours", "eager"])
def test_a_step_trains_the_one_model_that_all_variants_share(variant):
    made = Training(case(), CPU)
    before = [weight.detach().clone() for weight in made.model.parameters()]
    (step,) = made.calls(variant)
    step()
    moved = [
        not torch.equal(mine, old)
        for mine, old in zip(made.model.parameters(), before, strict=True)
    ]
    assert any(moved)
    assert all(weight.grad is None for weight in made.model.parameters())
    assert made.model.lm_head.weight is made.model.model.embed_tokens.weight


def test_variants_compute_the_same_loss_and_gradients():
    made = hugging_face.built(case(), CPU).double()
    tokens = torch.arange(80).view(2, 40) % 7
    found = []
    for make in (hugging_face.our_loss, hugging_face.stock_loss):
        loss = make(made)(tokens)
        found.append([loss, *torch.autograd.grad(loss, [*made.parameters()])])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-4, atol=1e-6)


def test_what_cz_accelerate_leaves_alone_is_no_figure():
    made = hugging_face.built(case(), CPU)
    made.model.layers[1].mlp.act_fn = torch.nn.Softplus()
    with pytest.raises(RuntimeError, match=r"replaces not all of it(.|\n)*Softplus"):
        hugging_face.our_loss(made)


@pytest.mark.parametrize("variant", ["ours", "eager"])
@pytest.mark.parametrize("pattern", ["1b", CHECKPOINTED])
def test_attention_is_causal_without_a_mask(variant, pattern, attended, monkeypatch):
    preferred = []
    monkeypatch.setattr(hugging_face, "fastest", lambda *_: ("cudnn", "flash"))
    monkeypatch.setattr(
        hugging_face, "preferring", lambda order: preferred.append(order) or nullcontext()
    )
    (step,) = Training(case(pattern), CPU).calls(variant)
    step()
    assert preferred == [("cudnn", "flash")] * len(attended)
    assert {mask for mask, _ in attended} == {None}
    assert {causal for _, causal in attended} == {True}
    # Backward runs every layer's forward again.
    assert len(attended) == (2 * 2 if pattern == CHECKPOINTED else 2)


def graph_of(loss, tokens):
    """The nodes of what torch.compile makes of a loss in one graph."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(loss, fullgraph=True, dynamic=False, backend=backend)(tokens)
    (graph,) = graphs
    inner = (one for one in graph.modules() if isinstance(one, torch.fx.GraphModule))
    return [node for one in inner for node in one.graph.nodes]


@pytest.mark.parametrize(
    ("variant", "pattern"),
    [
        ("compile", "1b"),
        *(
            pytest.param(variant, pattern, marks=pytest.mark.slow)
            for variant, pattern in [("compile", CHECKPOINTED), ("ours", "1b")]
        ),
    ],
)
@pytest.mark.slow
def test_compiled_attention_is_causal_without_a_mask(variant, pattern):
    kind = MODELS[pattern]
    made = hugging_face.built(case(pattern), CPU, checkpointed=kind.checkpointed)
    make = hugging_face.our_loss if variant == "ours" else hugging_face.stock_loss
    nodes = graph_of(make(made), torch.arange(80).view(2, 40) % 7)
    calls = [node for node in nodes if "scaled_dot_product_attention" in str(node.target)]
    given = [(node.kwargs.get("attn_mask"), node.kwargs.get("is_causal")) for node in calls]
    assert given == [(None, True)] * 2
    assert any("cadenza" in str(node.target) for node in nodes) == (variant == "ours")


def test_a_mask_is_refused():
    made = hugging_face.built(case(), CPU)
    tokens = torch.zeros(2, 40, dtype=torch.long)
    with pytest.raises(ValueError, match="attends under a mask"):
        made(input_ids=tokens, attention_mask=torch.ones(2, 1, 40, 40, dtype=torch.bool))


def test_the_work_is_that_of_the_products_and_of_causal_attention():
    made = Training(case(), CPU)
    (step,) = made.calls("eager")
    with FlopCounterMode(display=False) as counter:
        step()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    attention = 12 * 2 * 2 * 4 * (40 * 41 // 2) * 8
    assert made.work().flops == products + attention


def test_a_variant_that_fails_in_the_middle_leaves_no_gradients():
    made = Training(case(), CPU)
    own = hugging_face.stock_loss(made.model)

    made.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.step(own)
    assert all(weight.grad is None for weight in made.model.parameters())


# --- Liger-Kernel ---------------------------------------------------------------------------------


@pytest.fixture
def liger(monkeypatch):
    """A package of Liger-Kernel's interface: it counts, and negates what no loss depends on."""
    from transformers.models.llama import modeling_llama

    counts, own = {"rotated": 0, "normed": 0}, modeling_llama.apply_rotary_pos_emb

    def rotate(q, k, *tables, **options):
        counts["rotated"] += 1
        return own(q, k, *tables, **options)

    def apply(*, model):
        modeling_llama.apply_rotary_pos_emb = rotate
        norm = model.model.norm
        forward = type(norm).forward

        def normed(x):
            counts["normed"] += 1
            return forward(norm, x)

        norm.forward = normed

    package, inner = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    inner.apply_liger_kernel_to_llama = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
    monkeypatch.setattr(rivals, "need", lambda _: None)
    return counts


def test_liger_is_put_into_one_instance_and_its_own_steps(liger):
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    made = Training(case(CHECKPOINTED), CPU)
    (step,) = made.calls("liger")
    assert vars(modeling_llama) == before
    step()
    assert liger == {"rotated": 2 * 2, "normed": 1}  # in what backward recomputes, too
    for variant in ("ours", "eager"):
        made.calls(variant)[0]()
    assert liger == {"rotated": 2 * 2, "normed": 1}
    assert vars(modeling_llama) == before


def test_what_liger_replaced_is_put_back_where_it_fails(liger, monkeypatch):
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    made = Training(case(), CPU)
    made.model.model = torch.nn.Module()
    with suppress(AttributeError):
        made.calls("liger")
    assert vars(modeling_llama) == before


# --- model-accuracy -------------------------------------------------------------------------------


def test_errors_of_logits_and_of_each_gradient(tmp_path, capsys):
    assert bench(tmp_path, "model-accuracy", sizes=NARROW) == 0
    found = records(tmp_path, "model-accuracy")
    ours, eager = (found["llama", name]["errors"] for name in ("ours", "eager"))
    named = dict(hugging_face.built(case(layers=1), CPU).named_parameters())
    assert set(ours) == set(eager) == {"logits", *(f"d {name}" for name in named)}
    eps = torch.finfo(torch.bfloat16).eps
    for name, error in eager.items():
        assert 0.1 * eps < error < 20 * eps
        assert ours[name] < 1.5 * error
    said = capsys.readouterr().out
    assert "geometric mean" in said
    assert "ours ÷ eager" in said


def test_a_small_error_of_a_model_is_seen(monkeypatch):
    own = hugging_face.accelerated

    def planted(model, *, logits):
        made = own(model, logits=logits)
        down = made.model.layers[0].mlp.down_proj
        down.weight = torch.nn.Parameter(1.03 * down.weight.detach())
        return made

    monkeypatch.setattr(model_accuracy, "accelerated", planted)
    given = Bench(CPU, ("ours", "eager"), Effort(), print)
    ours, eager = model_accuracy.run(case(layers=1), given)
    ratios = [ours["errors"][name] / eager["errors"][name] for name in eager["errors"]]
    assert max(ratios) > 1.5


def test_variants_see_the_numbers_that_are_drawn():
    trials = model_accuracy.ModelTrials(case(layers=1), CPU)
    found = []
    trial = trials.trial("eager")
    for seed in range(2):
        tokens = trials.draw(model_accuracy.Draw(torch.bfloat16, CPU, seed), SMALL)
        exact, own = trials.oracle(tokens)["logits"], trial(tokens)["logits"]
        assert exact.dtype == torch.float64
        assert (own.double() - exact).norm() < 0.05 * exact.norm()
        found.append(exact)
    assert (found[0] - found[1]).norm() > found[0].norm()


def test_without_transformers_that_is_the_reason(tmp_path, monkeypatch):
    def missing(package):
        raise rivals.Unavailable(f"{package} is not installed")

    monkeypatch.setattr(rivals, "need", missing)
    assert bench(tmp_path, "model", "--only=1b", "--variants=ours,eager") == 1
    found = records(tmp_path, "model")
    assert {one["failed"] for one in found.values()} == {"transformers is not installed"}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["1b", CHECKPOINTED])
def test_compiled_steps(tmp_path, pattern):
    variants = "--variants=ours,ours-compile,compile"
    assert bench(tmp_path, "model", variants, f"--only={pattern}", sizes=NARROW) == 0
    assert all("us" in one for one in records(tmp_path, "model").values())
