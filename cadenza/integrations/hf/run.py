"""One call of a recognised layer: its own code, with stand-ins for what programs do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from cadenza.integrations.hf.causal import fastest_kernel
from cadenza.integrations.hf.plan import Plan
from cadenza.integrations.hf.standin import StandIn, stock_class
from cadenza.integrations.hf.stream import Done, FeedForward, Normed, Output, Stream
from cadenza.integrations.hf.weights import Weights
from cadenza.library import programs

Parts = frozenset[str]


class Run:
    """A layer's call: which parts programs do, where their weights come from, how they are called.

    `call` takes a program and its arguments; a layer is tried out with `Program.plain`.
    """

    def __init__(
        self,
        layer: Any,
        plan: Plan,
        parts: Parts,
        weights: Weights,
        call: Callable[..., Tensor] | None = None,
    ) -> None:
        self.layer, self.plan, self.parts, self.weights = layer, plan, parts, weights
        self.call = _called if call is None else call

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward returns, streams made tensors."""
        stock = stock_class(stands_for(self.layer))
        found = stock.forward(self.stand_in(), Stream(hidden_states), *args, **kwargs)
        if isinstance(found, tuple):
            return tuple(item.tensor if isinstance(item, Stream) else item for item in found)
        return found.tensor

    def stand_in(self) -> StandIn:
        """The layer with places that write down what is asked of its parts."""
        form = self.plan.form
        places: dict[str, Any] = {
            form.attention: _Attention(self.module(form.attention), run=self),
            form.feed_forward: _Mlp(self.module(form.feed_forward), run=self),
        }
        places |= {path: _Norm(self, path) for path in form.norms if path}
        places |= {path: _Dropout(path) for path in form.dropouts if "." not in path}
        return StandIn(self.layer, **places)

    def module(self, path: str) -> Any:
        """The submodule at a path."""
        module = self.layer
        for name in path.split("."):
            module = getattr(module, name)
        return module

    def dropout(self, place: int) -> float:
        """The probability of attention's dropout (0) or the feed-forward's (1) in this call."""
        module = self.module(self.plan.form.dropouts[place])
        return float(module.p) if module.training else 0.0

    def numbers(self) -> dict[str, Any]:
        """The constants of the layer's norms."""
        return {"norm_offset": self.plan.norm.offset, "eps": self.plan.norm.eps}

    def stem(self, path: str | None) -> dict[str, Any]:
        """What a program takes of the norm it begins with."""
        if path is None:
            return {}
        weight, bias = self.weights.norm(path)
        return {"norm": self.plan.norm.kind, "norm_weight": weight, "norm_bias": bias}

    def heads(self, source: Stream | Normed, tables: Any) -> Tensor:
        """Queries, keys and values `[..., N]` of a stream, normed and rotated."""
        plan, x = self.plan, _tensor(source)
        w, bias = self.weights.projection(*plan.form.projections)
        norms = (self.weights.norm(path)[0] for path in plan.head_norms)
        turned = {} if tables is None else rotary_tables(*tables, x)
        return self.call(
            programs.qkv_projection, x, w, bias, head_dim=plan.head_dim, heads=plan.heads,
            key_value_heads=plan.key_value_heads, **turned,
            **dict(zip(("q_norm", "k_norm"), norms, strict=False)), **self.numbers(),
            **self.stem(source.path if isinstance(source, Normed) else None),
        )  # fmt: skip


def stands_for(layer: Any) -> nn.Module:
    """The module itself, behind its stand-in."""
    return layer.stands_for if isinstance(layer, StandIn) else layer


def _called(program: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return program(*args, **kwargs)


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Normed):
        return value.stream.tensor
    return value.tensor if isinstance(value, Stream) else value


# What was made of tables, as long as they live: all layers of a call share them.
_TABLES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def rotary_tables(cos: Tensor, sin: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Tables `[..., R]` for every row of x, of Hugging Face's `[1 or B, S, 2R]`: halves twice."""
    shape = (*x.shape[:-1], cos.shape[-1] // 2)
    if torch.compiler.is_compiling():
        return {"cos": _half(cos, shape), "sin": _half(sin, shape)}
    known: Any = _TABLES.get(cos)
    if known is None or known[0] is not sin or known[1]["cos"].shape != shape:
        known = sin, {"cos": _half(cos, shape), "sin": _half(sin, shape)}
        _TABLES[cos] = known
    return dict(known[1])


def _half(table: Tensor, shape: tuple[int, ...]) -> Tensor:
    return table[..., : shape[-1]].expand(shape).contiguous()


class _Norm:
    """The place of a norm: a stream's is left to the program that follows."""

    def __init__(self, run: Run, path: str) -> None:
        self.run, self.path = run, path

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Stream):
            return value.under(self.path)
        before = self.path == self.run.plan.form.before_attention
        if ("queries" if before else "feed_forward") in self.run.parts:
            return Normed(value, self.path)
        return self.run.module(self.path)(value.tensor)


class _Dropout:
    """The place of a dropout of a branch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, branch: Any) -> Any:
        return branch.dropped(self.path)


class _Mlp(StandIn):
    """The place of the feed-forward."""

    def __call__(self, value: Any) -> Any:
        run = self.run
        if "feed_forward" in run.parts:
            return FeedForward(run, value)
        return Done(run, self.stands_for(_tensor(value)))


class _Attention(StandIn):
    """The place of attention: its own code, between programs."""

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        run, x = self.run, _tensor(hidden_states)
        attend = self._attend(hidden_states, kwargs)
        with fastest_kernel(self.stands_for, run.plan, x, kwargs):
            found = attend(x, *args, **kwargs)
        return Output(run, found[0]) if "output" in run.parts else Done(run, found[0]), *found[1:]

    def _attend(self, hidden_states: Any, given: Mapping[str, Any]) -> Callable[..., Any]:
        """The attention's own code, on what programs leave to it."""
        run, own = self.run, self.stands_for
        if "queries" in run.parts:
            tables = given["position_embeddings"] if run.plan.form.rotary else None
            core = StandIn(own, **self._queries(hidden_states, tables), **self._output())
            return functools.partial(run.plan.attend, core)
        if "output" in run.parts:
            core = StandIn(own, **self._output())
            return functools.partial(stock_class(stands_for(own)).forward, core)
        return own

    def _queries(self, source: Stream | Normed, tables: Any) -> dict[str, Any]:
        """What stands for the projections: they are done."""
        plan, qkv = self.run.plan, self.run.heads(source, tables)
        names = [path.rpartition(".")[2] for path in plan.form.projections]
        if len(names) == 1:
            return {names[0]: _Given(qkv)}
        sizes = [plan.heads, plan.key_value_heads, plan.key_value_heads]
        apart = torch.split(qkv, [size * plan.head_dim for size in sizes], dim=-1)
        if qkv.shape[1] == 1:  # as a cache has its tokens: of gaps in memory torch joins slowly
            apart = (apart[0], *(part.contiguous() for part in apart[1:]))
        found = {name: _Given(part) for name, part in zip(names, apart, strict=True)}
        return found | {path.rpartition(".")[2]: _same for path in plan.head_norms}

    def _output(self) -> dict[str, Any]:
        """What stands for the output projection and what is behind it: they are done later."""
        form = self.run.plan.form
        if "output" not in self.run.parts:
            return {}
        inside = form.dropouts[:1] if form.drops_inside(0) else ()
        return {path.rpartition(".")[2]: _same for path in (form.output, *inside)}


class _Given:
    """A projection whose result is there already."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self, x: Any) -> Tensor:
        return self.value


def _same(x: Any) -> Any:
    return x
