"""Trying a layer before it is accelerated: its own code and ours, on the same small numbers.

The layer's code runs as it stands, over stand-ins for its projections and norms whose weights are
random and narrow. Heads keep their size, so nothing of the real weights is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.integrations.hf.leaves import close, drawn
from cadenza.integrations.hf.plan import PARTS, Plan
from cadenza.integrations.hf.run import Run
from cadenza.integrations.hf.standin import StandIn
from cadenza.integrations.hf.weights import Projection

WIDTH, HIDDEN, TOKENS = 8, 6, 5


def agrees(layer: nn.Module, plan: Plan) -> bool:
    """Whether a layer's own code computes what the plan says. Raises what its code raises."""
    trial = _Trial(layer, plan)
    x = drawn(1, TOKENS, WIDTH, seed=10, scale=0.05)
    given = _arguments(layer, plan)
    with torch.no_grad():
        expected = _first(trial.stand_in(x, **given))
        run = Run(trial.stand_in, plan, frozenset(PARTS), trial, _plain)
        return close(_first(run(x, **given)), expected)


def _plain(program: Any, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = program.plain(*args, **kwargs)
    return result


def _first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


class _Projection:
    """A projection over weights of its own."""

    training = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Trial:
    """A layer's stand-in over small weights, and those weights as programs take them."""

    def __init__(self, layer: nn.Module, plan: Plan) -> None:
        self.plan, self.layer, self.made = plan, layer, {}
        form = plan.form
        for path, (rows, columns) in self._shapes().items():
            self.made[path] = self._projection(path, rows, columns)
        for path in (*(path for path in form.norms if path), *plan.head_norms):
            self.made[path] = self._norm(path)
        self.stand_in = self._layer()

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each projection."""
        form, plan = self.plan.form, self.plan
        sizes = [n * plan.head_dim for n in (plan.heads, plan.key_value_heads)]
        rows = [sizes[0], sizes[1], sizes[1]]
        rows = [sum(rows)] if len(form.projections) == 1 else rows
        gated = plan.activation in ("swiglu", "geglu", "geglu_tanh", "reglu")
        up = [HIDDEN * (2 if gated and len(form.up) == 1 else 1)] * len(form.up)
        found = dict(zip((*form.projections, *form.up), (*rows, *up), strict=True))
        shapes = {path: (rows, WIDTH) for path, rows in found.items()}
        return shapes | {form.output: (WIDTH, sizes[0]), form.down: (WIDTH, HIDDEN)}

    def _projection(self, path: str, rows: int, columns: int) -> _Projection:
        seed = 20 + len(self.made)
        bias = 0.5 * drawn(rows, seed=seed + 20) if self._has_bias(path) else None
        return _Projection(drawn(rows, columns, seed=seed, scale=columns**-0.5), bias)

    def _has_bias(self, path: str) -> bool:
        module: Any = self.layer.get_submodule(path)
        return getattr(module, "bias", None) is not None

    def _norm(self, path: str) -> StandIn:
        module: Any = self.layer.get_submodule(path)
        width = module.weight.shape[0] if path in self.plan.head_norms else WIDTH
        seed = 60 + 2 * len(self.made)
        bias = 0.5 * drawn(width, seed=seed + 1) if self._has_bias(path) else None
        weight = 1.0 + 0.5 * drawn(width, seed=seed)
        return StandIn(module, weight=weight, bias=bias, normalized_shape=(width,))

    def _layer(self) -> StandIn:
        form, layer = self.plan.form, self.layer
        attention, mlp = layer.get_submodule(form.attention), layer.get_submodule(form.feed_forward)
        config = getattr(attention, "config", None)
        eager = {} if config is None else {"config": StandIn(config, _attn_implementation="eager")}
        inside = {
            form.attention: StandIn(attention, training=False, **eager),
            form.feed_forward: StandIn(mlp, training=False),
        }
        outer = StandIn(layer, training=False, **inside)
        dropouts = dict.fromkeys((*form.dropouts, *form.other), nn.Dropout(0.0))
        for path, made in {**self.made, **dropouts}.items():
            owner, _, name = path.rpartition(".")
            (inside[owner] if owner else outer).__dict__[name] = made
        return outer

    def projection(self, *paths: str) -> Projection:
        """As in `Weights`."""
        made = [self.made[path] for path in paths]
        biases = [one.bias for one in made if one.bias is not None]
        return torch.cat([one.weight for one in made]), torch.cat(biases) if biases else None

    def norm(self, path: str) -> tuple[Tensor, Tensor | None]:
        """As in `Weights`."""
        return self.made[path].weight, self.made[path].bias


def _arguments(layer: nn.Module, plan: Plan) -> dict[str, Any]:
    """What a layer's code may ask for besides the stream, by the names that it is known to use."""
    positions = torch.arange(TOKENS)[None]
    angles = drawn(1, TOKENS, plan.head_dim // 2, seed=11)
    tables = tuple(torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    known = {
        "position_embeddings": tables,
        "position_embeddings_global": tables,
        "position_embeddings_local": tables,
        "position_ids": positions,
        "cache_position": positions[0],
    }
    function: Callable[..., Any] = layer.forward
    asked = inspect.signature(function).parameters
    return {name: value for name, value in known.items() if name in asked and plan.form.rotary}
