"""Hugging Face's Llama with random weights, and its loss as each variant computes it.

Variants have modules of their own over the same parameters, so that many fit a GPU's memory beside
one optimizer. All attend by the same function: PyTorch's causal attention on the kernel that was
measured to be fastest, never under a mask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.integrations.hf import accelerate
from cadenza.library.attention_choice import chosen
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_kernels import Order, preferring, unexpanded
from cadenza.tools.bench import rivals
from cadenza.tools.bench.case import Case

Loss = Callable[[Tensor], Tensor]  # the mean loss of tokens [B, S], each predicted by those before
CAUSAL = "cadenza_bench_causal"  # under which transformers finds the attention of all variants
MASKED = "this release of transformers attends under a mask where the batch is plain causal"
# What a size of a case is in the configuration.
CONFIGURED = {
    "V": "vocab_size", "D": "hidden_size", "F": "intermediate_size", "layers": "num_hidden_layers",
    "H": "num_attention_heads", "KV": "num_key_value_heads", "HD": "head_dim",
    "S": "max_position_embeddings",
}  # fmt: skip


def built(
    case: Case, device: torch.device, *, tied: bool = False, checkpointed: bool = False
) -> nn.Module:
    """Hugging Face's own Llama of a case's sizes, in training; the same weights at every call.

    `tied` gives the head the embedding's weight, `checkpointed` recomputes layers in backward.
    Raises Unavailable where transformers is not installed.
    """
    rivals.need("transformers")
    from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # A name that transformers makes no mask for: for its own "sdpa" it makes one when compiled.
    order = fastest(case, device)
    AttentionInterface.register(CAUSAL, _never_masked(ALL_ATTENTION_FUNCTIONS["sdpa"], order))
    sizes = {name: case.sizes[size] for size, name in CONFIGURED.items()}
    config = LlamaConfig(**sizes, rms_norm_eps=1e-5, use_cache=False, tie_word_embeddings=tied)
    torch.manual_seed(case.seed)
    with _default(case.torch_dtype), device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=CAUSAL)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained: nn.Module = model.train()
    return trained


def fastest(case: Case, device: torch.device) -> Order:
    """PyTorch's kernels for a case's attention, the fastest first; empty where that is its own.

    Those that serve compiled variants as well. Settled before anything is compiled, where it could
    not be measured.
    """
    sizes = case.sizes
    like = torch.empty(sizes["B"], sizes["S"], dtype=case.torch_dtype, device=device)
    return unexpanded(chosen(like, Heads(sizes["H"], sizes["KV"], sizes["HD"])))


def _never_masked(attend: Callable[..., Any], order: Order) -> Callable[..., Any]:
    def causal(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        if attention_mask is not None:
            raise ValueError(MASKED)
        with preferring(order):
            return attend(module, query, key, value, None, **options)

    return causal


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """New parameters in this dtype. A cast later would round the rotary frequencies as well."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def twin(model: nn.Module) -> nn.Module:
    """Modules like a model's over its own parameters and buffers."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def accelerated(model: nn.Module, *, logits: bool | str) -> nn.Module:
    """A twin under `cz.accelerate`. Raises RuntimeError where anything is left to stock code."""
    own = twin(model)
    report = accelerate(own, logits=logits)
    if report.left or not report.replaced:
        raise RuntimeError(f"cz.accelerate replaces not all of it: {report}")
    return own


def loss_of(model: nn.Module) -> Loss:
    """A model's own loss of tokens that are their labels, too."""

    def loss(tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return loss


def our_loss(model: nn.Module) -> Loss:
    """That of an accelerated twin, which makes no logits beside it in training."""
    return loss_of(accelerated(model, logits="evaluation"))


def stock_loss(model: nn.Module) -> Loss:
    """That of a twin as transformers has it."""
    return loss_of(twin(model))
