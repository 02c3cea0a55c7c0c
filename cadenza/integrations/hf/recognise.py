"""Which modules are decoder layers that programs can do, and why others are not.

A layer is recognised by its structure (the names, types and shapes of all its parts), and then
tried: its own code and ours run on the same small numbers, and must agree. A release of
transformers that changes what a layer computes makes it unknown, never wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from cadenza.integrations.hf.forms import FORMS, Form
from cadenza.integrations.hf.leaves import activation_name, norm_kind
from cadenza.integrations.hf.plan import NormKind, Plan
from cadenza.integrations.hf.standin import forward_without_rotary, stock_class

CONV = ("transformers.pytorch_utils", "Conv1D")
UNTOLD = "which doesn't tell its sizes (out_features, or a base_layer)"


class Unknown(Exception):
    """Why a module is left alone."""


class Wrapped(Unknown):
    """By path, what stands in the place of projections and doesn't tell their sizes."""

    def __init__(self, found: dict[str, str]) -> None:
        self.found = tuple(f"{path} is a {kind}" for path, kind in found.items())
        super().__init__("; ".join(self.found))


def plan_of(layer: nn.Module) -> Plan:
    """The plan of a decoder layer. Raises Unknown, with the reason, for any other module."""
    form = _form(layer)
    _check_sizes(layer, form)
    norms = [layer.get_submodule(path) for path in form.norms if path]
    heads = _head_norms(layer, form)
    kind = _one_kind([*norms, *(layer.get_submodule(path) for path in heads)])
    head_dim, queries, pairs = _heads(layer, form)
    return Plan(
        form=form,
        head_dim=head_dim,
        heads=queries,
        key_value_heads=pairs,
        norm=kind,
        activation=_activation(layer, form),
        head_norms=heads,
        attend=_attend(layer, form),
        parameters=parameters_of(layer),
        types=_types(layer, form, heads),
    )


def _form(layer: nn.Module) -> Form:
    paths = {path for path, _ in layer.named_modules() if path}
    for form in FORMS:
        projections = {*form.projections, form.output, *form.up, form.down}
        inner = tuple(f"{path}." for path in (*projections, form.activation))
        known = form.parts() | form.optional()
        if form.parts() <= paths and all(p in known or p.startswith(inner) for p in paths):
            _check_parameters(layer, form)
            return form
    raise Unknown(f"its parts are those of no layer that is known: {_listed(layer)}")


def _listed(layer: nn.Module) -> str:
    names = [path for path, module in layer.named_modules() if path and not [*module.children()]]
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def _check_parameters(layer: nn.Module, form: Form) -> None:
    for path in ("", form.attention, form.feed_forward):
        own = [*layer.get_submodule(path)._parameters]
        if own:
            raise Unknown(f"{path or 'the layer'} has parameters of its own: {', '.join(own)}")


def _check_sizes(layer: nn.Module, form: Form) -> None:
    found = {}
    for path in (*form.projections, form.output, *form.up, form.down):
        kind = type(module := layer.get_submodule(path))
        if not any(hasattr(base(module), name) for name in ("nf", "out_features")):
            found[path] = f"{kind.__module__}.{kind.__qualname__}, {UNTOLD}"
    if found:
        raise Wrapped(found)


def _head_norms(layer: nn.Module, form: Form) -> tuple[str, ...]:
    attention = layer.get_submodule(form.attention)
    found = [path for path in form.head_norms if hasattr(attention, path.rpartition(".")[2])]
    if len(found) not in (0, len(form.head_norms)):
        raise Unknown(f"of its norms of heads it has {', '.join(found)} alone")
    return tuple(found)


def _one_kind(norms: Iterable[nn.Module]) -> NormKind:
    kinds = {norm_kind(module): type(module).__name__ for module in norms}
    if None in kinds:
        raise Unknown(f"its norm {kinds[None]} is none that is known")
    if len(kinds) > 1:
        raise Unknown(f"its norms differ: {', '.join(map(str, kinds))}")
    return next(iter(kinds))


def _heads(layer: Any, form: Form) -> tuple[int, int, int]:
    """Columns of a head, and the numbers of query heads and of key heads."""
    head_dim = layer.get_submodule(form.attention).head_dim
    rows = [rows_of(layer.get_submodule(path)) for path in form.projections]
    columns = columns_of(layer.get_submodule(form.output))
    heads, pairs = columns // head_dim, (sum(rows) - columns) // (2 * head_dim)
    apart = [heads * head_dim, pairs * head_dim, pairs * head_dim]
    if rows not in (apart, [sum(apart)]) or pairs < 1 or heads % pairs:
        raise Unknown(f"heads of {head_dim} columns don't fit projections of {rows} rows")
    return head_dim, heads, pairs


def base(module: Any) -> Any:
    """What a wrapper of a projection wraps, which has its sizes: LoRA's base_layer."""
    return getattr(module, "base_layer", module)


def rows_of(module: Any) -> int:
    """The outputs of a projection."""
    module = base(module)
    return int(module.nf if hasattr(module, "nf") else module.out_features)


def columns_of(module: Any) -> int:
    """The inputs of a projection."""
    module = base(module)
    return int(module.nx if hasattr(module, "nx") else module.in_features)


def _activation(layer: nn.Module, form: Form) -> str:
    module = layer.get_submodule(form.activation)
    rows = sum(rows_of(layer.get_submodule(path)) for path in form.up)
    gated = rows == 2 * columns_of(layer.get_submodule(form.down))
    name = activation_name(module, gated)
    if name is None:
        raise Unknown(f"its activation {type(module).__name__} is none that is known")
    return name


def _attend(layer: nn.Module, form: Form) -> Any:
    attention = layer.get_submodule(form.attention)
    if not form.rotary:
        return stock_class(attention).forward
    found = forward_without_rotary(attention)
    if found is None:
        raise Unknown(f"{type(attention).__name__} rotates in another way than by one function")
    return found


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments that a module's forward takes, in order."""
    return tuple(inspect.signature(stock_class(module).forward).parameters)[1:]


def _types(layer: nn.Module, form: Form, heads: tuple[str, ...]) -> tuple[tuple[str, type], ...]:
    """The types of the parts whose work programs may do; others have none."""
    linear = (*form.projections, form.output, *form.up, form.down)
    plain = [(path, layer.get_submodule(path)) for path in (*linear, *form.dropouts)]
    found = [(path, type(module)) for path, module in plain if is_plain_module(module)]
    norms = (path for path in form.norms if path)
    tried = (form.attention, form.feed_forward, form.activation, *norms, *heads)
    return *found, *((path, type(layer.get_submodule(path))) for path in tried)


def is_plain_module(module: nn.Module) -> bool:
    """Whether a module is a projection, or a dropout, that nothing wraps."""
    kind = type(module)
    return kind in (nn.Linear, nn.Dropout) or (kind.__module__, kind.__qualname__) == CONV
