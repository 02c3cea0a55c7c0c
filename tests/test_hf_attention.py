"""Which calls of a model's own attention prefer the kernel that was chosen for them."""

import pytest
import torch
import torch.nn.functional as F
from hf_models import assert_near, batch, each_family, outcome, pair
from pretended_gpu import CALL, chosen_here, pretend_gpu
from torch.nn.attention import SDPBackend

import cadenza as cz
from cadenza.integrations.hf import causal
from cadenza.library.attention_choice import known, order_of
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_race import EXPANDED

CHOSEN, OTHERWISE = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION


@pytest.fixture
def asked(monkeypatch):
    """The kernel that came first in each call of PyTorch's function; another one is chosen."""
    heard, stock = [], F.scaled_dot_product_attention

    def watched(*args, **named):
        heard.append(torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)[0])
        return stock(*args, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(causal, "chosen", lambda x, heads: (EXPANDED, "efficient"))
    return heard


def accelerated(family="llama", **options):
    """An accelerated model and its twin."""
    model, twin = pair(family, **options)
    cz.accelerate(model)
    return model, twin


@each_family
def test_a_plain_batch_runs_on_what_was_chosen(family, asked):
    model, twin = accelerated(family)
    found = outcome(model, **batch(4, 20))
    preferred, asked[:] = list(asked), []
    assert_near(found, outcome(twin, **batch(4, 20)))
    calls = 2 if model.config._attn_implementation == "sdpa" else 0
    assert calls or family == "gemma2"
    assert preferred == [CHOSEN] * calls
    assert asked == [OTHERWISE] * calls, "the twin is not touched"


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_parts_that_are_left_alone_change_nothing_of_it(family, asked):
    model, _ = accelerated(family)
    for layer in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        attention = layer.attn if family == "gpt2" else layer.self_attn
        projection = attention.c_attn if family == "gpt2" else next(attention.children())
        projection.register_forward_hook(lambda module, given, found: None)
    with pytest.warns(UserWarning, match="has hooks"):
        cz.accelerate(model)
    outcome(model, **batch(4, 20))
    assert asked == [CHOSEN] * 2


def test_a_batch_with_a_mask_is_left_to_pytorch(asked):
    model, _ = accelerated()
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0
    outcome(model, **batch(), attention_mask=mask)
    assert asked == [OTHERWISE] * 2


def test_a_window_shorter_than_the_batch_is_left_to_pytorch(asked):
    model, _ = accelerated("mistral")
    outcome(model, **batch())
    assert asked == [OTHERWISE] * 2


@pytest.mark.parametrize(
    ("family", "rate"), [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")]
)
def test_dropout_is_left_to_pytorch_in_training(family, rate, asked):
    model, _ = accelerated(family, **{rate: 0.1})
    outcome(model, **batch())
    outcome(model.eval(), **batch())
    assert asked == [OTHERWISE] * 2 + [CHOSEN] * 2


def test_another_implementation_is_left_alone(asked, monkeypatch):
    monkeypatch.setattr(causal, "chosen", None)
    model, twin = accelerated(attn_implementation="eager")
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    assert not asked


def test_sizes_are_those_of_the_model(monkeypatch):
    heard = []
    monkeypatch.setattr(causal, "chosen", lambda x, heads: heard.append((x.shape[:2], heads)) or ())
    outcome(accelerated()[0], **batch(3, 30))
    assert heard == [((3, 30), Heads(4, 2, 24))] * 2


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_checkpointed_layers_run_again_on_the_same_kernel(reentrant, asked, monkeypatch, tmp_path):
    watch = pretend_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(causal, "chosen", chosen_here)
    model, _ = accelerated()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    outcome(model, **batch())
    assert asked == [SDPBackend.CUDNN_ATTENTION] * 4
    assert len(watch.calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_compiled_in_one_graph_with_what_is_known(family, monkeypatch, tmp_path):
    pretend_gpu(monkeypatch, tmp_path)
    model, twin = accelerated(family)
    sizes = []

    def chosen(x, heads):
        sizes.append(heads)
        return known(CALL.device, CALL.dtype, *heads)

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def compiled():
        torch._dynamo.reset()
        graphs.clear()
        with torch.no_grad():
            found = torch.compile(model, fullgraph=True, backend=backend)(**batch(4, 20))
        [graph] = graphs
        return found.loss, [n.args[0] for n in graph.graph.nodes if "from_string" in str(n.target)]

    monkeypatch.setattr(causal, "chosen", chosen)
    first, named = compiled()
    assert not named
    order_of(CALL._replace(heads=sizes[0]))
    again, named = compiled()
    assert named[0] == "CUDNN_ATTENTION"
    with torch.no_grad():
        torch.testing.assert_close(first, twin(**batch(4, 20)).loss)
    torch.testing.assert_close(again, first)
