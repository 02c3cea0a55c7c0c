"""Configurations as Hugging Face's models have them, read as JSON: the sizes of a decoder.

A configuration may leave out what its family has a default for. Raises Fault, naming the field, for
one that is missing or makes no sense, and for a family that is not known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.library.nn.architecture import ARCHITECTURES, Architecture
from cadenza.tools.audit.decoder import ACTIVATIONS, Decoder
from cadenza.tools.fault import Fault

Config = Mapping[str, Any]
GPT2 = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
GEMMA = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256}
GEMMA3 = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
QKV_BIAS = ("qwen2",)  # families whose bias is never one of the output projection
NONE_MEANS_NONE = ("sliding_window", "final_logit_softcapping")


class Family(NamedTuple):
    """A family's architecture, other names of its fields, and defaults of those left out."""

    architecture: str
    names: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}


FAMILIES = {
    "llama": Family("llama"),
    "mistral": Family("mistral", {}, {"sliding_window": 4096, "head_dim": None}),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", {}, {"head_dim": 128}),
    "gemma": Family("gemma", {}, GEMMA),
    "gemma2": Family(
        "gemma2", {}, {**GEMMA, "sliding_window": 4096, "final_logit_softcapping": 30.0}
    ),
    "gemma3_text": Family("gemma3", {}, {**GEMMA, **GEMMA3, "sliding_window": 4096}),
    "phi3": Family("phi3"),
    "olmo2": Family("olmo2"),
    "gpt2": Family(
        "gpt2", GPT2, {"hidden_act": "gelu_new", "tie_word_embeddings": True, "n_positions": 1024}
    ),
}


def decoder_at(path: Path) -> Decoder:
    """The decoder of a config.json, or of a directory that has one."""
    place = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise Fault(f"{place} cannot be read ({error.strerror}): name a config.json") from None
    except ValueError as error:
        raise Fault(f"{place} is no JSON ({error}): name a config.json") from None
    if not isinstance(config, dict):
        raise Fault(f"{place} holds no configuration: it must be an object with model_type")
    return decoder_of(config, str(path))


def decoder_of(config: Config, name: str) -> Decoder:
    """The decoder of a configuration."""
    kind = config.get("model_type")
    inner = config.get("text_config")
    if kind not in FAMILIES and isinstance(inner, dict) and inner.get("model_type") in FAMILIES:
        config, kind = inner, inner["model_type"]
    if kind not in FAMILIES:
        raise Fault(f"{name}: unknown model_type {kind!r}: one of {', '.join(FAMILIES)}")
    return _Reader(config, str(kind), name).decoder()


class _Reader:
    """Reads the fields of one configuration."""

    def __init__(self, config: Config, kind: str, name: str) -> None:
        self.config, self.kind, self.name = config, kind, name
        self.family = FAMILIES[kind]

    def get(self, field: str, default: Any = None) -> Any:
        """A field, else the family's default of it, else this one."""
        known = self.family.names.get(field, field)
        found = self.config.get(known)
        if found is None and not (known in self.config and field in NONE_MEANS_NONE):
            return self.family.defaults.get(field, default)
        return found

    def count(self, field: str, default: int | None = None) -> int:
        """A whole number from 1 on."""
        found, called = self.get(field, default), self.family.names.get(field, field)
        if found is None:
            raise Fault(f"{self.name}: the configuration of a {self.kind} lacks {called}: add it")
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise Fault(f"{self.name}: {called} is {found!r}: it must be a whole number from 1 on")
        return found

    def number(self, field: str, default: float | None) -> float | None:
        """A number above 0, or the default."""
        found, called = self.get(field, default), self.family.names.get(field, field)
        if found is None or (isinstance(found, int | float) and found > 0):
            return None if found is None else float(found)
        raise Fault(f"{self.name}: {called} is {found!r}: it must be a number above 0")

    def decoder(self) -> Decoder:
        """All of it."""
        width, heads = self.count("hidden_size"), self.count("num_attention_heads")
        head_dim = self.count("head_dim", max(1, width // heads))
        key_value_heads = self.count("num_key_value_heads", heads)
        if heads % key_value_heads:
            raise Fault(
                f"{self.name}: num_attention_heads {heads} must be a multiple of "
                f"num_key_value_heads {key_value_heads}"
            )
        learned = self.kind == "gpt2"
        return Decoder(
            name=self.name, architecture=self.architecture(), vocabulary=self.count("vocab_size"),
            width=width, heads=heads, key_value_heads=key_value_heads, head_dim=head_dim,
            feed_forward=self.count("intermediate_size", 4 * width if learned else None),
            windows=self.windows(), activation=self.activation(),
            rotary=0 if learned else self.rotary(head_dim),
            positions=self.count("n_positions") if learned else None,
            tied=bool(self.get("tie_word_embeddings", False)),
            eps=self.number("rms_norm_eps", 1e-5) or 1e-5, joined=self.kind in ("phi3", "gpt2"),
            softcap=self.number("final_logit_softcapping", None),
            scaled=self.kind.startswith("gemma"),
        )  # fmt: skip

    def architecture(self) -> Architecture:
        """How layers are built: the family's, with the biases and the activation asked for."""
        make = ARCHITECTURES[self.family.architecture]
        plain, gated = ACTIVATIONS[self.activation()]
        biased, wide = bool(self.get("attention_bias")), bool(self.get("mlp_bias"))
        return replace(
            make,
            activation=plain if self.kind == "gpt2" else gated,
            qkv_bias=make.qkv_bias or biased,
            output_bias=make.output_bias or (biased and self.kind not in QKV_BIAS),
            feed_forward_bias=make.feed_forward_bias or wide,
        )

    def activation(self) -> str:
        """A configuration's word for an activation that is known."""
        word = self.get("hidden_activation") or self.get("hidden_act", "silu")
        if word not in ACTIVATIONS:
            raise Fault(
                f"{self.name}: unknown activation {word!r}: one of {', '.join(ACTIVATIONS)}"
            )
        return str(word)

    def rotary(self, head_dim: int) -> int:
        """How many columns of a head rotate."""
        rope = self.get("rope_parameters")
        inner = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
        part = inner or self.number("partial_rotary_factor", 1.0) or 1.0
        columns = int(head_dim * part)
        if columns < 2 or columns % 2:
            raise Fault(
                f"{self.name}: {columns} columns of each head rotate: choose an even number"
            )
        return columns

    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window."""
        layers = self.count("num_hidden_layers")
        window, kinds = self.get("sliding_window"), self.get("layer_types")
        if window is None or (self.kind.startswith("qwen") and not self.get("use_sliding_window")):
            return (None,) * layers
        window = self.count("sliding_window")
        if isinstance(kinds, list) and len(kinds) == layers:
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        return tuple(None if self._sees_all(layer) else window for layer in range(layers))

    def _sees_all(self, layer: int) -> bool:
        """Whether a layer has no window, by its number, where the configuration names no kinds."""
        if self.kind == "gemma2":
            return layer % 2 == 1
        if self.kind == "gemma3_text":
            return (layer + 1) % self.count("sliding_window_pattern", 6) == 0
        if self.kind.startswith("qwen"):
            return bool(self.get("max_window_layers")) and layer < self.count("max_window_layers")
        return False
