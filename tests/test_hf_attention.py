"""Which calls of a model's own attention prefer the kernel that was chosen for them."""

import threading

import pytest
import torch
from hf_models import assert_near, batch, each_family, outcome, pair
from pretended_gpu import CALL, chosen_here, pretend_gpu, pretend_kernels

import cadenza as cz
from cadenza.integrations.hf import causal
from cadenza.library.attention_choice import known, order_of
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_kernels import EXPANDED


@pytest.fixture
def ran(monkeypatch):
    """The kernels that ran, which are chosen: none of them is PyTorch's own choice."""
    monkeypatch.setattr(causal, "chosen", lambda x, heads: ("efficient", EXPANDED, "flash"))
    return pretend_kernels(monkeypatch)


def names(ran):
    return [name for name, _ in ran]


def accelerated(family="llama", **options):
    """An accelerated model and its twin."""
    model, twin = pair(family, **options)
    cz.accelerate(model)
    return model, twin


@each_family
@pytest.mark.slow
def test_a_plain_batch_runs_on_what_was_chosen(family, ran):
    model, twin = accelerated(family)
    found, preferred = outcome(model, **batch(4, 20)), names(ran)
    ran.clear()
    assert_near(found, outcome(twin, **batch(4, 20)))
    calls = 2 if model.config._attn_implementation == "sdpa" else 0
    assert calls or family == "gemma2"
    assert len(preferred) == calls
    assert {*preferred} <= {"efficient", EXPANDED}, "keys have as many heads by now"
    assert not ran, "the twin is touched"


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_parts_that_are_left_alone_change_nothing_of_it(family, ran):
    model, _ = accelerated(family)
    for layer in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        attention = layer.attn if family == "gpt2" else layer.self_attn
        projection = attention.c_attn if family == "gpt2" else next(attention.children())
        projection.register_forward_hook(lambda module, given, found: None)
    with pytest.warns(UserWarning, match="has hooks"):
        cz.accelerate(model)
    outcome(model, **batch(4, 20))
    assert len(ran) == 2


def test_hooks_of_the_output_projection_run_as_they_would_without(ran):
    """Nothing of the process is held or changed while they do."""
    model, _ = accelerated()
    heard, before = [], torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)

    def hook(module, given, found):
        heard.append(torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True))
        waits = threading.Thread(target=lambda: outcome(other, **batch(4, 20)))
        waits.start()
        waits.join(30)
        heard.append(waits.is_alive())

    other, _ = accelerated()
    model.model.layers[0].self_attn.o_proj.register_forward_hook(hook)
    outcome(model, **batch(4, 20))
    assert heard == [before, False]
    assert len(ran) == 2 + 2


def test_a_model_without_any_part_of_attention_replaced(ran):
    model, twin = accelerated()
    for each in (model, twin):
        for layer in each.model.layers:
            for name in ("q_proj", "o_proj"):
                getattr(layer.self_attn, name).register_forward_hook(lambda m, given, found: found)
    assert_near(outcome(model, **batch(4, 20)), outcome(twin, **batch(4, 20)))
    assert len(ran) == 2


def test_a_batch_with_a_mask_is_left_to_pytorch(ran):
    model, _ = accelerated()
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0
    outcome(model, **batch(), attention_mask=mask)
    assert not ran


def test_a_window_shorter_than_the_batch_is_left_to_pytorch(ran):
    model, _ = accelerated("mistral")
    outcome(model, **batch())
    assert not ran


@pytest.mark.parametrize(
    ("family", "rate"), [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")]
)
def test_dropout_is_left_to_pytorch_in_training(family, rate, ran):
    model, _ = accelerated(family, **{rate: 0.1})
    outcome(model, **batch())
    assert not ran
    outcome(model.eval(), **batch())
    assert len(ran) == 2


def test_another_implementation_is_left_alone(ran, monkeypatch):
    monkeypatch.setattr(causal, "chosen", None)
    model, twin = accelerated(attn_implementation="eager")
    assert_near(outcome(model, **batch()), outcome(twin, **batch()))
    assert not ran


def test_sizes_are_those_of_the_model(monkeypatch):
    heard = []
    monkeypatch.setattr(causal, "chosen", lambda x, heads: heard.append((x.shape[:2], heads)) or ())
    outcome(accelerated()[0], **batch(3, 30))
    assert heard == [((3, 30), Heads(4, 2, 24))] * 2


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_checkpointed_layers_run_again_on_the_same_kernel(reentrant, ran, monkeypatch, tmp_path):
    watch = pretend_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(causal, "chosen", chosen_here)
    model, _ = accelerated()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    outcome(model, **batch())
    assert [name.partition(",")[0] for name in names(ran)] == ["cudnn"] * 4
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
