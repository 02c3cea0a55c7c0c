"""`cz.accelerate` and `cz.revert`: a model's modules, one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from cadenza.integrations.hf.causal import StackPlan, stack_forward
from cadenza.integrations.hf.head import HEAD, has_head, head_forward, model_forward
from cadenza.integrations.hf.head_trial import head_plan
from cadenza.integrations.hf.layer import layer_forward
from cadenza.integrations.hf.leaves import norm_kind
from cadenza.integrations.hf.norm import norm_forward
from cadenza.integrations.hf.plan import Plan, blocked, unusable, usable, warn_once
from cadenza.integrations.hf.recognise import (
    Unknown,
    Wrapped,
    is_plain_module,
    parameters_of,
    plan_of,
)
from cadenza.integrations.hf.replace import (
    PLAN,
    accelerate_module,
    is_accelerated,
    restore_module,
)
from cadenza.integrations.hf.report import Entry, Report
from cadenza.integrations.hf.standin import forget_functions
from cadenza.integrations.hf.trial import agrees
from cadenza.integrations.hf.weights import (
    Sharing,
    layer_groups,
    part_storage,
    share_storage,
    with_storages,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
DOES = {
    "queries": "norm + QKV + rotary",
    "output": "attention output",
    "feed_forward": "feed-forward",
}


def accelerate(model: nn.Module, *, logits: bool | str = True) -> Report:
    """Puts Cadenza's programs into a Hugging Face model, in place; returns what was done.

    Recognised by what they are made of and what they compute, and tried beforehand: decoder layers
    as in Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi-3, OLMo 2 and GPT-2, the norm behind
    them, and the head with its loss. Anything else stays as it is, and so does what something
    wraps, watches, quantises or shards; the report says why, and of the latter one warning, too.
    Parameters keep their names, shapes and identity; weights that one product takes move into one
    storage. Calls of few tokens, and calls that ask for attention weights, take the model's own
    path.

    `logits` says when a model that is given labels returns its logits, too, which costs a product
    and their memory: True always, False never, "evaluation" unless it is in training. Without
    labels it always does.

    Calling it again looks at the model anew. Raises ValueError for another `logits`, and TypeError
    for what is no module. `revert` undoes it.
    """
    _check_module("cz.accelerate", model)
    if not isinstance(logits, int | str) or logits not in LOGITS:
        raise ValueError(f"logits={logits!r}: choose True, False or 'evaluation'")
    plans = _restored(model)
    report = _replaced(model, logits)
    layers = accelerated_layers(model)
    part_storage(model, plans, layers)
    share_storage(layers)
    warn_once(reason for entry in report.entries for reason in entry.warned)
    return report


def _check_module(called: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{called} of a {type(model).__name__}: give a torch.nn.Module")


def _replaced(model: nn.Module, logits: bool | str) -> Report:
    """What is done to a model whose modules are all stock."""
    forget_functions()
    tried: dict[Any, bool] = {}
    entries = [_layer(path, layer, tried) for path, layer in decoder_layers(model)]
    for path in sorted({entry.path.rpartition(".")[0] for entry in entries if entry.replaced}):
        entries += _stack(path, model)
    heads = [(path, module) for path, module in model.named_modules() if has_head(module)]
    entries += [_head(path, module, logits) for path, module in heads]
    return Report(tuple(entries), (Sharing(accelerated_layers(model)),))


def decoder_layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that stand in lists, with their paths: what may be a layer."""
    for name, child in module.named_children():
        own = f"{path}.{name}" if path else name
        if isinstance(module, CONTAINERS):
            yield own, child
        else:
            yield from decoder_layers(child, own)


def _layer(path: str, layer: nn.Module, tried: dict[Any, bool]) -> Entry:
    kind = type(layer).__name__
    try:
        plan = _tried(layer, tried)
    except Wrapped as wrapped:
        return Entry(path, kind, (), wrapped.found, warned=wrapped.found)
    except Unknown as reason:
        return Entry(path, kind, (), (str(reason),))
    parts = usable(layer, plan)
    if parts:
        accelerate_module(layer, with_storages(layer, plan), layer_forward, layer_groups)
    left = tuple(f"{at} {reason}" for at, reason in blocked(layer, plan).items())
    does = {**DOES, "queries": DOES["queries"] if plan.form.rotary else "norm + QKV"}
    replaced = tuple(does for part, does in does.items() if part in parts)
    return Entry(path, kind, replaced, left, warned=left)


def _tried(layer: nn.Module, tried: dict[Any, bool]) -> Plan:
    """The plan of a layer that computes what it says. Raises Unknown for another one."""
    if "forward" in layer.__dict__:
        raise Unknown("has a forward of its own")
    with _followed():
        plan = plan_of(layer)
        kind = type(layer), plan
        if kind not in tried:
            tried[kind] = agrees(layer, plan)
    if not tried[kind]:
        raise Unknown("its code computes something else than its parts say")
    return plan


@contextlib.contextmanager
def _followed() -> Iterator[None]:
    """Whatever foreign code raises while it is tried makes a module unknown, and stays there."""
    try:
        yield
    except Unknown:
        raise
    except Exception as error:
        raise Unknown(f"its code can't be followed: {type(error).__name__}: {error}") from error


def _stack(path: str, model: nn.Module) -> Iterator[Entry]:
    """What holds a list of accelerated layers: its mask, and the norms beside the list."""
    above, _, name = path.rpartition(".")
    stack, layers = model.get_submodule(above), model.get_submodule(path)
    known = isinstance(layers, nn.ModuleList) and hasattr(stack, "config")
    if known and "forward" not in stack.__dict__:
        kind, mask = type(stack).__name__, "mask of plain causal batches"
        if all(map(is_accelerated, layers)):
            accelerate_module(stack, StackPlan(name, parameters_of(stack)), stack_forward)
            yield Entry(above, kind, (mask,))
        else:
            yield Entry(above, kind, (), (f"{mask}: some of its layers are left alone",))
    for own, child in stack.named_children():
        if "Norm" in type(child).__name__:
            yield from _norm(f"{above}.{own}" if above else own, child)


def _norm(path: str, module: nn.Module) -> Iterator[Entry]:
    """The entry of a norm, none for one that is not known."""
    name = type(module).__name__
    try:
        with _followed():
            known = norm_kind(module)
    except Unknown as unknown:
        yield Entry(path, name, (), (str(unknown),))
        return
    reason = unusable(module, type(module))
    if known is not None and reason is None:
        accelerate_module(module, known, norm_forward)
        yield Entry(path, name, ("norm",))
    elif reason is not None:
        yield _in_the_way(path, name, reason) if known else Entry(path, name, (), (reason,))


def _in_the_way(path: str, kind: str, reason: str) -> Entry:
    """The entry of a module that is left alone as it is now, which is worth a warning."""
    return Entry(path, kind, (), (reason,), (f"{path.rpartition('.')[2]} {reason}",))


def _head(path: str, model: Any, logits: bool | str) -> Entry:
    """The head of a model, and the loss that it computes."""
    own, kind = f"{path}.{HEAD}" if path else HEAD, type(model).__name__
    head = model.get_submodule(HEAD)
    if "forward" in model.__dict__:
        return Entry(own, kind, (), ("has a forward of its own",))
    reason = unusable(head, type(head))
    if reason is not None:
        return _in_the_way(own, kind, reason)
    try:
        with _followed():
            plan = head_plan(model, logits)
    except Unknown as unknown:
        left = (str(unknown),)
        return Entry(own, kind, (), left, () if is_plain_module(head) else left)
    accelerate_module(model, plan, model_forward)
    accelerate_module(head, plan, head_forward)
    return Entry(own, kind, ("loss of labels" + LOGITS[logits],))


LOGITS = {True: ", beside logits", False: ", no logits", "evaluation": ", no logits in training"}


def accelerated_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model that have a plan."""
    found = (module for module in model.modules() if is_accelerated(module))
    return [module for module in found if isinstance(module.__dict__[PLAN], Plan)]


def revert(model: nn.Module) -> None:
    """Puts every module of a model back as it was before `accelerate`, bit for bit.

    Parameters keep the numbers that they have now, each in a storage of its own. A model that
    `accelerate` has not touched stays as it is. Raises TypeError for what is no module.
    """
    _check_module("cz.revert", model)
    part_storage(model, _restored(model), ())


def _restored(model: nn.Module) -> list[Plan]:
    """Puts every module's class back; the plans of the layers among them."""
    plans = [layer.__dict__[PLAN] for layer in accelerated_layers(model)]
    for module in model.modules():
        if is_accelerated(module):
            restore_module(module)
    return plans
