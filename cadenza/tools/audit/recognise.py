"""Layers of a model of one's own that `cz.nn.DecoderLayer` can stand in for, by their names.

A layer is recognised by modules called as in Hugging Face's models: self_attn with q_proj, k_proj,
v_proj and o_proj, mlp with up_proj, down_proj and perhaps gate_proj, and norms whose names say
where they stand. Sizes are read from the weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cadenza.library.nn import DecoderLayer
from cadenza.library.nn.architecture import ARCHITECTURES, PLACEMENTS, Architecture
from cadenza.tools.audit.fakes import default_dtype
from cadenza.tools.audit.parts import Call

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Unrecognised(Exception):
    """A layer is none that Cadenza has; the text says why."""


class Replaced(nn.Module):
    """Cadenza's layer, called and answering as the layer that it stands in for."""

    def __init__(self, layer: DecoderLayer, call: Call) -> None:
        super().__init__()
        self.layer, self.result = layer, call.result
        stream = _stream(call)
        half = layer.self_attn.head_dim // 2
        shape = (*stream.shape[:2], half)
        self.register_buffer("cos", torch.empty(shape, dtype=stream.dtype))
        self.register_buffer("sin", torch.empty(shape, dtype=stream.dtype))
        self.register_buffer("squares", torch.empty(*stream.shape[:2], 1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stream = _stream(Call(args, kwargs, None))
        found, _ = self.layer(stream, self.squares, self.cos, self.sin)

        def answer(value: Any) -> Any:
            same = isinstance(value, Tensor) and value.shape == stream.shape
            return found if same else value

        return tree_map(answer, self.result)


def _stream(call: Call) -> Tensor:
    values = (*call.args, *call.kwargs.values())
    found = next((v for v in values if isinstance(v, Tensor) and v.dim() == 3), None)
    if found is None:
        raise Unrecognised("its layers take no stream [batch, sequence, width]")
    return found


def replaced(layer: nn.Module, call: Call) -> Replaced:
    """Cadenza's layer in the place of this one. Raises Unrecognised, saying why not."""
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    sizes = {name: _linear(attention, name).weight.shape for name in PROJECTIONS}
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or sizes["q_proj"][0] % head_dim:
        raise Unrecognised(f"{type(attention).__name__} has no head_dim")
    gated = hasattr(mlp, "gate_proj")
    with default_dtype(_linear(mlp, "down_proj").weight.dtype):
        made = DecoderLayer(
            sizes["q_proj"][1],
            sizes["q_proj"][0] // head_dim,
            sizes["k_proj"][0] // head_dim,
            _linear(mlp, "up_proj").weight.shape[0],
            architecture=_architecture(layer, attention, mlp, gated),
            head_dim=head_dim,
        )
    return Replaced(made, call)


def _architecture(
    layer: nn.Module, attention: nn.Module, mlp: nn.Module, gated: bool
) -> Architecture:
    """The make of a layer; an activation is taken for SiLU, which costs what others do."""
    norms = {name for name, _ in layer.named_children() if name.endswith("layernorm")}
    placement = next((p for p, names in PLACEMENTS.items() if set(names) == norms), None)
    if placement is None:
        raise Unrecognised(f"{type(layer).__name__} has norms {', '.join(sorted(norms)) or 'none'}")
    kind = "layer" if isinstance(_child(layer, sorted(norms)[0]), nn.LayerNorm) else "rms"
    return replace(
        ARCHITECTURES["llama"],
        norm=kind,
        norm_bias=kind == "layer",
        placement=placement,
        activation="swiglu" if gated else "silu",
        qkv_bias=_linear(attention, "q_proj").bias is not None,
        output_bias=_linear(attention, "o_proj").bias is not None,
        feed_forward_bias=_linear(mlp, "down_proj").bias is not None,
        qk_norm=_qk_norm(attention),
    )


def _qk_norm(attention: nn.Module) -> str | None:
    norm = getattr(attention, "q_norm", None)
    if norm is None:
        return None
    wide = _linear(attention, "q_proj").weight.shape[0]
    return "row" if norm.weight.numel() == wide else "head"


def _child(module: nn.Module, name: str) -> nn.Module:
    found = getattr(module, name, None)
    if not isinstance(found, nn.Module):
        raise Unrecognised(f"{type(module).__name__} has no {name}")
    return found


def _linear(module: nn.Module, name: str) -> nn.Linear:
    found = _child(module, name)
    if type(found) is not nn.Linear:
        raise Unrecognised(f"{name} is a {type(found).__name__}, no torch.nn.Linear")
    return found
