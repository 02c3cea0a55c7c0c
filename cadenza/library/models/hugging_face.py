"""config.json, as Hugging Face's models have it, to the sizes of a decoder and back.

What a field asks and `Decoder` doesn't do raises: nothing that changes a model's values is passed
over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza.core.errors import CadenzaError
from cadenza.library.models.decoder_config import FAMILIES, DecoderConfig
from cadenza.library.rotary import NAMES as ROTARY_NAMES
from cadenza.library.rotary import Rotary

CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "context": "max_position_embeddings",
}
# The value of a field without which, or with which, a model is one that `Decoder` is.
ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "quantization_config": None,
}
# Where a configuration that leaves head_dim out differs from width / heads.
HEAD_DIM = {"qwen3": 128}
FULL_ATTENTION = "full_attention"


class CheckpointError(CadenzaError, ValueError):
    """A checkpoint can't be read or written; the text is one line and names the cure."""


def config_of(fields: Mapping[str, Any]) -> DecoderConfig:
    """The sizes that a config.json says. Raises CheckpointError for a model that isn't supported.

    The family is recognised by `model_type`, or by the class in `architectures`.
    """
    family = _family(fields)
    _check_plain(fields, family)
    sizes = {own: _required(fields, name) for own, name in SIZES.items()}
    heads = sizes["heads"]
    head_dim = fields.get("head_dim") or HEAD_DIM.get(family) or sizes["width"] // heads
    try:
        config = DecoderConfig(
            family=family, **sizes, head_dim=head_dim,
            key_value_heads=fields.get("num_key_value_heads") or heads,
            rotary=Rotary.of({**fields, "head_dim": head_dim}),
            eps=float(fields.get("rms_norm_eps", 1e-6)),
            tied=bool(fields.get("tie_word_embeddings", False)), published=dict(fields),
        )  # fmt: skip
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json: {error}") from error
    _check_whole(config)
    return config


def _check_whole(config: DecoderConfig) -> None:
    """Of these families transformers rotates whole heads, whatever a config.json says."""
    if config.rotary.columns != config.head_dim:
        raise CheckpointError(
            f"config.json: rotary embedding of {config.rotary.columns} columns in heads of "
            f"{config.head_dim}, where a {config.family} of Hugging Face rotates whole heads: take "
            f"Rotary({config.head_dim}, ...), or torch.save the state_dict of such a model"
        )


def _family(fields: Mapping[str, Any]) -> str:
    by_class = {name: family for family, name in CLASSES.items()}
    classes = fields.get("architectures") or [None]
    family = fields.get("model_type") or by_class.get(classes[0])
    if family not in FAMILIES:
        found = family or classes[0]
        raise CheckpointError(
            f"config.json is that of a model of type {found!r}: choose a checkpoint of type "
            f"{' or '.join(FAMILIES)}, or load it with transformers"
        )
    return family


def _required(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise CheckpointError(f"config.json has no {name}: take the one published with the weights")
    return fields[name]


def _check_plain(fields: Mapping[str, Any], family: str) -> None:
    unlike = [n for n, only in ONLY.items() if fields.get(n) not in (only, None)]
    if any(kind != FULL_ATTENTION for kind in fields.get("layer_types") or ()):
        unlike.append("layer_types")
    if unlike:
        found = ", ".join(f"{name} {fields[name]!r:.60}" for name in unlike)
        raise CheckpointError(
            f"config.json asks for {found}, which cz.models has not: choose a plain {family} "
            "checkpoint, or load it with transformers"
        )


def fields_of(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of those sizes; the published one where it says the same.

    Raises CheckpointError for heads that are rotated in part.
    """
    _check_whole(config)
    if config.published is not None and config_of(config.published) == config:
        return dict(config.published)
    return {
        "architectures": [CLASSES[config.family]],
        "model_type": config.family,
        **{name: getattr(config, own) for own, name in SIZES.items()},
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": config.eps,
        **_rotary_fields(config),
        "tie_word_embeddings": config.tied,
        "use_cache": True,
    }


def _rotary_fields(config: DecoderConfig) -> dict[str, Any]:
    rotary, fields = config.rotary, {"rope_theta": config.rotary.base, "rope_scaling": None}
    if rotary.scaling != "default":
        names = ROTARY_NAMES if rotary.scaling == "llama3" else {"factor": ROTARY_NAMES["factor"]}
        numbers = {name: getattr(rotary, own) for name, (own, _) in names.items()}
        fields["rope_scaling"] = {"rope_type": rotary.scaling, **numbers}
    return fields
