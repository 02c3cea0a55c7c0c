"""A checkpoint: one safetensors file with weights, moments, losses and what made them.

Weights stand under their own names, so any Llama loads them. The header carries the settings, the
steps asked for, the digest of the text and one over all tensors: a file that loads is intact. That
of a whole model carries its config.json as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cadenza.tools.atomic import write_whole
from cadenza.tools.fault import Fault
from cadenza.tools.settings import Settings

FILE = "checkpoint.safetensors"
HEADER = "cadenza"


@dataclass(frozen=True)
class Checkpoint:
    """State of a run: its settings, the steps asked for, its text's digest, its tensors.

    `architecture` is the config.json of a whole model.
    """

    settings: Settings
    target: int
    text_digest: str
    tensors: dict[str, Tensor]
    architecture: dict[str, Any] | None = None


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write it to `folder` whole, in place of the one before; raises Fault where that fails."""
    # Clones: weights that share storage or lie transposed in it are no tensors for safetensors.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in checkpoint.tensors.items()
    }
    header = {
        "settings": dataclasses.asdict(checkpoint.settings),
        "target": checkpoint.target,
        "text_digest": checkpoint.text_digest,
        "digest": _digest(tensors),
    }
    if checkpoint.architecture is not None:
        header["architecture"] = checkpoint.architecture
    metadata = {HEADER: json.dumps(header, sort_keys=True)}
    write_whole(folder / FILE, lambda path: _write(tensors, path, metadata))


def load_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; raises Fault where there is none, or none that is intact."""
    path = folder / FILE
    if not path.is_file():
        raise Fault(
            f"{folder} holds no checkpoint to resume: leave --resume out to start a run, "
            "in another folder where this one holds a run's other files"
        )
    try:
        header, tensors = _read(path)
        settings = Settings(**header["settings"])
        target, digest, text_digest = (header[k] for k in ("target", "digest", "text_digest"))
    except OSError as error:
        raise Fault(f"{path} cannot be read ({error.strerror}): make it readable") from error
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise Fault(_damaged(path)) from error
    if digest != _digest(tensors):
        raise Fault(_damaged(path))
    return Checkpoint(settings, target, text_digest, tensors, header.get("architecture"))


def _write(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(0, str(error)) from error


def _read(path: Path) -> tuple[dict, dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {})[HEADER])
        names = file.keys()
        # Clones: a view of the mapped file would change under a writer, and keeps it open.
        return header, {name: file.get_tensor(name).clone() for name in names}


def _damaged(path: Path) -> str:
    return f"{path} is damaged, or no checkpoint of this version: start a new run, another --out"


def _digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()
