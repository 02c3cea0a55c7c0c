"""What is audited: a decoder by its sizes, or a model and a batch that a function returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

import cadenza
from cadenza.tools.audit.configs import decoder_at, decoder_of
from cadenza.tools.audit.decoder import Decoder
from cadenza.tools.audit.fakes import default_dtype, faked, is_faking, made
from cadenza.tools.audit.parts import Model, layers_of
from cadenza.tools.audit.recognise import Unrecognised, replaced
from cadenza.tools.audit.sizes import SIZES
from cadenza.tools.audit.stock import StockDecoder
from cadenza.tools.audit.twin import TwinDecoder
from cadenza.tools.blame import is_ours
from cadenza.tools.fault import Fault
from cadenza.tools.target import LARGEST, load_module

Tensor = torch.Tensor
DTYPE = torch.bfloat16
SEQUENCE = 4096


class Subject(Protocol):
    """A model before and after Cadenza; where it is made, on fake tensors or a device, is open."""

    name: str

    def before(self) -> Model:
        """The stock model."""

    def after(self) -> Model | str:
        """The model by Cadenza, or why there is none."""

    def about(self) -> list[str]:
        """What was assumed of the model."""

    def cut(self, layers: int) -> Subject:
        """The same with fewer layers. Raises Fault where that can't be done."""

    def whole(self) -> Subject:
        """The same with attention to all earlier tokens, as the models here compute it."""


@dataclass(frozen=True)
class DecoderSubject:
    """A decoder of known sizes, on random tokens [batch, sequence]."""

    decoder: Decoder
    batch: int
    sequence: int

    @property
    def name(self) -> str:
        """What the command called it."""
        return self.decoder.name

    def _model(self, make: type[StockDecoder] | type[TwinDecoder]) -> Model:
        with default_dtype(DTYPE):
            module = make(self.decoder, self.sequence)
        tokens = torch.randint(self.decoder.vocabulary, (self.batch, self.sequence))
        return Model(module, (tokens, tokens.clone()), {})

    def before(self) -> Model:
        """The decoder in stock modules."""
        return self._model(StockDecoder)

    def after(self) -> Model | str:
        """The decoder of `cz.nn.DecoderLayer`."""
        return self._model(TwinDecoder)

    def about(self) -> list[str]:
        """What was assumed of the model."""
        return [
            f"a step of {self.batch} sequences of {self.sequence} tokens, in bf16, without "
            "dropout, checkpointing and communication; parameters, gradients and both moments of a "
            "fused AdamW in bf16",
            "before: norms, rotary embedding and the loss by single operations, as Hugging Face's "
            "models have them; eager launches each by itself",
            "after: cz.nn.DecoderLayer and the loss of linear logits by chunks, the rest as "
            "compiled; attention skips what a causal mask or a window hides, before and after",
        ]

    def cut(self, layers: int) -> DecoderSubject:
        """The decoder of its first layers."""
        if not 1 <= layers <= self.decoder.layers:
            raise Fault(f"--layers {layers}: {self.name} has 1 to {self.decoder.layers}")
        return DecoderSubject(self.decoder.of_layers(layers), self.batch, self.sequence)

    def whole(self) -> DecoderSubject:
        """The decoder without windows."""
        decoder = replace(self.decoder, windows=(None,) * self.decoder.layers)
        return DecoderSubject(decoder, self.batch, self.sequence)


@dataclass(frozen=True)
class FunctionSubject:
    """What a function returns: a module, and a batch for one call of it."""

    name: str
    function: Callable[[], Any]

    def before(self) -> Model:
        """The model as it is."""
        try:
            inspect.signature(self.function).bind()  # its own words, whoever calls it
            found = made(self.function)
        except Exception as error:  # whatever an author's function does
            if is_ours(error):
                raise
            raise Fault(f"{self.name} fails: {type(error).__name__}: {error}") from None
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], nn.Module):
            raise Fault(f"{self.name} must return a module and a batch: return module, batch")
        return faked(Model(found[0], *_arguments(found[1])))

    def after(self) -> Model | str:
        """The model by `cz.accelerate`, or with its layers by `cz.nn.DecoderLayer`."""
        model = self.before()
        if accelerated(model.module):
            return model
        try:
            return _with_our_layers(model)
        except Unrecognised as error:
            return f"Cadenza recognises no layer of {type(model.module).__name__}: {error}"

    def about(self) -> list[str]:
        """What was assumed of the model."""
        return [
            f"a step of {self.name}, forward, backward and a fused AdamW, in its own dtypes; "
            "RMSNorm of torch counts as single operations where it is not compiled",
            "after: layers by cz.nn.DecoderLayer where they have the names of Hugging Face's "
            "models, the rest unchanged and compiled; attention is unchanged",
        ]

    def cut(self, layers: int) -> FunctionSubject:
        """Never: the function says how many."""
        raise Fault(f"--layers is for sizes and configurations: let {self.name} return fewer")

    def whole(self) -> FunctionSubject:
        """Itself."""
        return self


def find_subject(text: str, batch: int, sequence: int | None) -> Subject:
    """The subject that a command names. Raises Fault where there is none."""
    for option, number in (("batch", batch), ("sequence", sequence)):
        if number is not None and not 1 <= number <= LARGEST:
            more = "1 or more" if number < 1 else f"at most {LARGEST}"
            raise Fault(f"--{option} {number}: choose {more}")
    if text.lower() in SIZES:
        return _of_decoder(decoder_of(SIZES[text.lower()], text.lower()), batch, sequence)
    place, _, name = text.rpartition(":")
    if place and name.isidentifier():
        function = getattr(load_module(place), name, None)
        if not callable(function):
            raise Fault(f"{place} has no function {name!r}")
        return FunctionSubject(text, function)
    if Path(text).exists():
        return _of_decoder(decoder_at(Path(text)), batch, sequence)
    raise Fault(
        f"unknown target {text!r}: one of {', '.join(SIZES)}, a config.json or its folder, "
        "FILE.py:function or module:function"
    )


def _of_decoder(decoder: Decoder, batch: int, sequence: int | None) -> DecoderSubject:
    most = decoder.positions
    if most is not None and sequence is not None and sequence > most:
        raise Fault(f"--sequence {sequence}: {decoder.name} has {most} positions: choose {most}")
    return DecoderSubject(decoder, batch, sequence or min(SEQUENCE, most or SEQUENCE))


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the arguments of a call: a dict by name, a tuple in order, else one argument."""
    if isinstance(batch, dict):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def accelerated(module: nn.Module) -> bool:
    """Whether `cz.accelerate`, where there is one, has replaced a part of a module."""
    accelerate = getattr(cadenza, "accelerate", None)
    try:
        report = accelerate(module) if accelerate else None
    except Exception:  # on fake tensors it finds that numbers are missing
        if not is_faking():
            raise
        return False
    return bool(getattr(report, "replaced", ()))


def _with_our_layers(model: Model) -> Model:
    """The model with Cadenza's layers in the place of its own."""
    calls = model.calls()
    if not calls:
        raise Unrecognised("it has no list of layers that are alike")
    layers = layers_of(model.module)
    holder = next(m for m in model.module.modules() if list(m.children()) == layers)
    for place, layer in enumerate(layers):
        if layer in calls:
            holder[place] = replaced(layer, calls[layer][0])  # type: ignore[operator]  # a list
    return model


def on(model: Model, device: torch.device) -> Model:
    """The model and its batch on a device."""
    args, kwargs = tree_map(
        lambda v: v.to(device) if isinstance(v, Tensor) else v, (model.args, model.kwargs)
    )
    return Model(model.module.to(device), args, kwargs)
