"""What is known of a decoder layer once it is recognised, and which of its parts are usable now.

A plan holds names and numbers, no module and no tensor: a layer can be copied, moved, wrapped and
given new weights, and its plan stays true.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from cadenza.integrations.hf.forms import Form
from cadenza.library.weights import is_plain

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Whose hooks stay on a model once it was asked for attention or hidden states.
RECORDERS = "transformers.utils.output_capturing"


EPS = ("variance_epsilon", "eps", "epsilon")  # a norm's attribute, by one of these names


class NormKind(NamedTuple):
    """A norm as programs know it: "rms" or "layer", the number added to its weights, eps."""

    kind: str
    offset: float
    eps: float


@dataclass(frozen=True)
class Plan:
    """A layer of one form: its sizes, its norms, its activation, and the types of its parts.

    `attend` is the attention's own forward of heads that are rotated already; `parameters` are the
    names of the layer's arguments in order; `types` are the types of its parts by path: what else
    stands there now, or nothing, is left alone. `wanted` has them by the part that they are needed
    for. `storages` are the sizes of the weights in each storage that several of them share.
    """

    wanted: ClassVar[dict[str, tuple[tuple[str, type | None], ...]]]
    norms: ClassVar[frozenset[str]]

    form: Form
    head_dim: int
    heads: int
    key_value_heads: int
    norm: NormKind
    activation: str
    head_norms: tuple[str, ...]
    attend: Callable[..., Any] | None
    parameters: tuple[str, ...]
    types: tuple[tuple[str, type], ...]
    storages: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        known = dict(self.types)
        wanted = {
            part: tuple((path, known.get(path)) for path in paths)
            for part, paths in _paths(self.form, self.head_norms).items()
        }
        object.__setattr__(self, "wanted", wanted)
        object.__setattr__(self, "norms", frozenset((*self.form.norms, *self.head_norms)))

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by name."""
        return named(self.parameters, args, kwargs)


def named(
    parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name."""
    return {**dict(zip(parameters, args, strict=False)), **kwargs}


def _paths(form: Form, head_norms: tuple[str, ...]) -> dict[str, list[str]]:
    """The paths of the modules that each part does the work of, or takes from within."""
    paths = {
        "queries": (form.attention, form.before_attention, *form.projections, *head_norms),
        "output": (form.attention, form.after_attention, form.output, *form.dropouts[:1]),
        "feed_forward": (
            form.feed_forward, form.before_feed_forward, *form.up, form.activation, form.down,
            form.after_feed_forward, *form.dropouts[1:],
        ),
    }  # fmt: skip
    return {part: [path for path in found if path] for part, found in paths.items()}


PARTS = ("queries", "output", "feed_forward")


def usable(layer: nn.Module, plan: Plan) -> frozenset[str]:
    """The parts of a layer that a program may do the work of, as its modules are now."""
    return frozenset(part for part in PARTS if not blocked(layer, plan, part))


def blocked(layer: nn.Module, plan: Plan, *parts: str) -> dict[str, str]:
    """Why parts of a layer are left alone, by the path of the module that stands in the way."""
    found: dict[str, str] = {}
    for part in parts or PARTS:
        for path, kind in plan.wanted[part]:
            module = module_at(layer, path)
            reason = unusable(module, kind)
            if reason is None and path in plan.norms and not has_eps(module, plan.norm.eps):
                reason = f"has another eps than the {plan.norm.eps} that was found"
            # Of what went with the module that it was in, that one says enough.
            if reason is not None and not (reason is GONE and _owner(path) in found):
                found[path] = reason
        found |= {} if found else _biased(layer, _SEVERAL[part](plan.form))
    return found


# Of each part the projections that one product makes.
_SEVERAL: dict[str, Callable[[Form], tuple[str, ...]]] = {
    "queries": lambda form: form.projections,
    "output": lambda form: (),
    "feed_forward": lambda form: form.up,
}


def _biased(layer: nn.Module, paths: Sequence[str]) -> dict[str, str]:
    """What stands in the way of one product for several projections: a bias of some alone."""
    biases = [module_at(layer, path)._parameters.get("bias") is not None for path in paths]
    if all(biases) or not any(biases):
        return {}
    return {paths[biases.index(True)]: "has a bias, which others of its product have not"}


def has_eps(norm: Any, eps: float) -> bool:
    """Whether a norm has this eps, by whichever name."""
    own = norm.__dict__
    found = [own[name] for name in EPS if name in own]
    return eps in (found or [getattr(norm, name, None) for name in EPS])


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def module_at(module: Any, path: str) -> Any:
    """The submodule at a path, None where there is none; faster than `get_submodule`."""
    for name in path.split("."):
        module = None if module is None else module._modules.get(name)
    return module


GONE = "is not there"


def unusable(module: nn.Module | None, known: type | None) -> str | None:
    """Why nothing else may do this module's work, None if it may.

    It is there, does what its class says, and nobody watches: no hooks, no other forward, its known
    class, and its parameters are plain tensors of floating point.
    """
    if module is None:
        return GONE
    kind = type(module)
    if kind is not known:
        return f"is a {kind.__module__}.{kind.__qualname__}"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if is_hooked(module):
        return "has hooks"
    for name, parameter in module._parameters.items():
        if parameter is not None and not is_plain(parameter):
            shard = ": accelerate before it is sharded" if is_shard(parameter) else ""
            return f"has a {name} that is a {type(parameter).__name__} of {parameter.dtype}{shard}"
    return None


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody watches a module's calls."""
    for name in HOOKS:
        hooks = getattr(module, name)
        if hooks and not all(map(_is_idle, hooks.values())):
            return True
    return False


def _is_idle(hook: Any) -> bool:
    """Whether a hook is one by which a model records attention, and that is not asked for."""
    if getattr(hook, "__module__", None) != RECORDERS:
        return False
    recorded = getattr(sys.modules[RECORDERS], "_active_collector", None)
    wanted = recorded.get() if recorded is not None else {"attentions": ()}
    return not any("attentions" in name for name in wanted or ())


def is_shard(parameter: Tensor) -> bool:
    """Whether a parameter is spread over several devices."""
    return hasattr(parameter, "device_mesh")


def is_given(value: Any) -> bool:
    """Whether an argument, which may be a tensor, asks for something."""
    return value is not None and value is not False


_TOLD: set[str] = set()


def warn_once(reasons: Iterable[str]) -> None:
    """One warning for all reasons, of those that this process has not heard yet."""
    new = sorted({*reasons} - _TOLD)
    _TOLD.update(new)
    if new:
        warnings.warn(
            f"cz.accelerate leaves to the model's own code: {'; '.join(new)}", stacklevel=3
        )
