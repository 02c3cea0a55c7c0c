"""Whole models for `cadenza train`: the settings that their names stand for, and how one is made.

A whole model is a published size, or what a checkpoint of Hugging Face holds. Its options have
other defaults than the small model's: those of a step on one GPU, with float32 weights under
autocast. AdamW moves a weight by about the learning rate, which bfloat16 weights would round away.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cadenza.library.models import LLAMA3, QWEN3, CheckpointError, Decoder, StockDecoder
from cadenza.library.models import checkpoint as published
from cadenza.library.models import sizes as sized
from cadenza.library.models.decoder_config import DecoderConfig
from cadenza.library.models.hugging_face import config_of, fields_of
from cadenza.tools.fault import Fault
from cadenza.tools.settings import (
    BYTEWISE,
    OWN_SIZES,
    SMALL,
    WHOLE,
    WHOLE_DEFAULTS,
    Settings,
    flag,
)

KINDS: dict[str, type[nn.Module]] = {"cadenza": Decoder, "stock": StockDecoder}
TOKENIZER = "tokenizer.json"


def named_sizes() -> dict[str, DecoderConfig]:
    """The sizes by the names that `--model` takes."""
    families = {"llama3": LLAMA3, "qwen3": QWEN3}
    return {
        f"{family}-{size.lower()}": config
        for family, sizes in families.items()
        for size, config in sizes.items()
    }


def is_whole(given: dict[str, Any]) -> bool:
    """Whether options ask for a whole model. Raises Fault for a small one from a checkpoint."""
    model = given.get("model")
    if model == SMALL and given.get("init") is not None:
        raise Fault(f"--init holds a whole model, not the {SMALL} one: leave --model out")
    return given.get("init") is not None or model not in (None, SMALL)


def whole_settings(given: dict[str, Any]) -> Settings:
    """Settings of a whole model from the options given. Raises Fault, naming the cure."""
    if own := [flag(name) for name in OWN_SIZES if name in given]:
        raise Fault(f"a whole model has sizes of its own: leave out {', '.join(own)}")
    name, config = _chosen(given.get("model"), given.get("init"))
    sizes = {one: getattr(config, one) for one in OWN_SIZES}
    settings = Settings(**{**_defaults(given, config), **given, "model": name, **sizes})
    if settings.context > config.context:
        raise Fault(f"a context of {settings.context} is above {name}'s: choose {config.context}")
    return settings


def _chosen(model: str | None, init: str | None) -> tuple[str, DecoderConfig]:
    """A model's name and its sizes; that of a checkpoint has its size's name, else its family's."""
    sizes = named_sizes()
    if model is not None and model not in sizes:
        raise Fault(f"unknown model {model!r}: choose one of {SMALL}, {', '.join(WHOLE)}")
    if init is None:
        assert model is not None
        return model, sizes[model]
    config = _of_checkpoint(init)
    if model is not None and config != sizes[model]:
        raise Fault(f"--init {init} holds another model than {model}: leave --model out")
    known = [name for name, one in sizes.items() if one == config]
    return (known or [config.family])[0], config


def _of_checkpoint(folder: str) -> DecoderConfig:
    try:
        return published.read_config(folder)
    except CheckpointError as error:
        raise Fault(f"--init: {error}") from error


def _defaults(given: dict[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """What options are that were not given."""
    precision = "full" if given.get("dtype", "float32") != "float32" else "mixed"
    return WHOLE_DEFAULTS | {
        "context": min(WHOLE_DEFAULTS["context"], config.context),
        "tokenizer": _tokenizer(given.get("init")),
        "precision": precision,
    }


def _tokenizer(init: str | None) -> str:
    path = Path(init or "", TOKENIZER)
    return str(path) if init is not None and path.is_file() else BYTEWISE


def build_whole(kind: str, settings: Settings, device: torch.device) -> nn.Module:
    """A model of that kind in KINDS: from `init`, else with weights that the seed decides.

    Drawn weights are those of any other kind and device: in float32, on the CPU.
    """
    place = {"device": device, "dtype": getattr(torch, settings.dtype)}
    if settings.init is None:
        config = named_sizes()[settings.model]
        return sized.build(KINDS[kind], config, **place, drawn_on="cpu")
    config = _of_checkpoint(settings.init)
    try:
        return published.load_weights(KINDS[kind], config, settings.init, **place)
    except CheckpointError as error:
        raise Fault(f"--init: {error}") from error


def unfilled(architecture: dict[str, Any], settings: Settings, device: torch.device) -> nn.Module:
    """Our model of that config.json, its weights yet to be restored."""
    dtype = getattr(torch, settings.dtype)
    return sized.empty(Decoder, config_of(architecture), device=device, dtype=dtype)


def architecture_of(model: nn.Module) -> dict[str, Any] | None:
    """The config.json of a whole model, None for the small one."""
    return fields_of(model.config) if isinstance(model, Decoder) else None


def _keep_others(old: Path, new: Path) -> None:
    """Takes along what somebody has put beside a model: whatever no model is written as."""
    for path in old.iterdir() if old.is_dir() else ():
        ours = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if not ours and not (new / path.name).exists():
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, new / path.name)


def export(model: nn.Module, folder: Path, tokenizer: str) -> None:
    """Write a whole model to a folder as Hugging Face has it, in place of the one it held before.

    Its tokenizer.json goes with it, and files that somebody else has put there stay. Raises Fault,
    with the old folder in place, where that fails.
    """
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    # Whatever the first checkpoint held, so that a resumed run writes what an unbroken one does.
    model.saves_head = not model.config.tied
    try:
        published.save(model, new)
        if tokenizer != BYTEWISE:
            shutil.copyfile(tokenizer, new / TOKENIZER)
        _keep_others(folder, new)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    except (CheckpointError, OSError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise Fault(f"{folder} cannot be written ({error}): free space, then --resume") from error
