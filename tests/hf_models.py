"""Small random models of Hugging Face's families, their untouched twins, and what both compute.

Two layers, width 64, a vocabulary of 128; heads together are wider than the model where a family
has that, and norms and biases do something.
"""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the integration with transformers")

CLASSES, WIDTH, LAYERS = 128, 64, 2
TOKENS = {"vocab_size": CLASSES, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    **TOKENS, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
WIDE = {"head_dim": 24}
GPT2 = {
    **TOKENS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 512,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
# The configuration of each family, and what it differs in.
FAMILIES = {
    "llama": ("LlamaConfig", {**SIZES, **WIDE}),
    "mistral": ("MistralConfig", {**SIZES, **WIDE, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, **WIDE}),
    "gemma2": ("Gemma2Config", {**SIZES, **WIDE, "sliding_window": 24}),
    # Every second layer looks at all tokens, and has the rotary table of those.
    "gemma3": (
        "Gemma3TextConfig", {**SIZES, **WIDE, "sliding_window": 24, "sliding_window_pattern": 2}
    ),
    "phi3": ("Phi3Config", SIZES),
    "olmo2": ("Olmo2Config", SIZES),
    "gpt2": ("GPT2Config", GPT2),
}  # fmt: skip
# What makes a model as wide as a GPU's kernels take whole tiles of.
WIDER = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 640}
each_family = pytest.mark.parametrize("family", FAMILIES)
# The same, of which only Llama is tried in the quick tier.
llama_and_slow_others = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "llama" else pytest.mark.slow) for name in FAMILIES],
)


def small(family="llama", dtype=torch.float32, **changes):
    """A model of a family, in training, with the same random weights at every call."""
    torch.manual_seed(5)
    name, sizes = FAMILIES[family]
    config = getattr(transformers, name)(**sizes | changes)
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data.add_(0.3 * torch.randn_like(weight))
        else:
            weight.data.mul_(4)
    return model.to(dtype).train()


def wider(family):
    """The changes of a family's configuration that make it as wide as WIDER."""
    if family == "gpt2":
        return {"n_embd": WIDER["hidden_size"], "vocab_size": WIDER["vocab_size"]}
    named = FAMILIES[family][1].keys()
    return {name: size for name, size in WIDER.items() if name in named}


def pair(family="llama", dtype=torch.float32, **changes):
    """A model, and its twin that stays untouched."""
    model = small(family, dtype, **changes)
    return model, copy.deepcopy(model)


def batch(rows=2, length=40, device="cpu", seed=7):
    """Token ids, and labels of which a few don't count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, CLASSES, (rows, length), generator=generator)
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def outcome(model, **given):
    """The loss, the logits where there are any, and every gradient by name."""
    model.zero_grad(set_to_none=True)
    found = model(**given)
    found.loss.backward()
    values = {} if found.logits is None else {"logits": found.logits.detach()}
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return {"loss": found.loss.detach(), **values, **gradients}


def outcome_with_losses(model, batches):
    """The outcome of the first batch, and the losses of all: that of one is right by luck."""
    found = outcome(model, **batches[0])
    with torch.no_grad():
        losses = [found["loss"], *(model(**given).loss for given in batches[1:])]
    return {**found, "loss": torch.stack(losses)}


def assert_near(found, expected, bound=3e-6):
    """Every value within `bound` of the other, by the Frobenius norm."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error, size = float((found[name] - value).norm()), float(value.norm())
        assert error <= bound * size + 1e-12, f"{name}: {error / size}"


def assert_as_good(ours, stock, exact, dtype):
    """Every value errs at most twice as much as the stock model's, plus one unit of `dtype`."""
    for name, value in exact.items():
        assert ours[name].dtype == stock[name].dtype, name
        errors = [float((found[name].double() - value).norm()) for found in (ours, stock)]
        unit = torch.finfo(dtype).eps * float(value.norm())
        assert errors[0] <= 2 * errors[1] + unit, (name, errors)


def layers_of(model):
    """The decoder layers of a model."""
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))


def runs_programs(model, **given):
    """Whether programs run in a call of the model."""
    names = []

    class Heard(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Heard(), torch.no_grad():
        model(**given)
    return any(name.startswith("cadenza") for name in names)
