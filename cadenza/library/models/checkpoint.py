"""Checkpoints as Hugging Face publishes them: config.json and safetensors, one file or several.

Names, shapes and dtypes are read from the files' headers and checked before any weight is; then one
file at a time goes to its place. Nothing that is pickled is ever opened. What is written stands in
its folder whole, or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cadenza.library.models.decoder import Decoder
from cadenza.library.models.decoder_config import DecoderConfig
from cadenza.library.models.hugging_face import CheckpointError, config_of, fields_of
from cadenza.library.nn.joint import put_together_all

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SHARD_BYTES = 5 * 10**9
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMED = 5  # tensors that one message names of each kind
Place = torch.device | str | None


class Stored(NamedTuple):
    """A tensor as a file's header has it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load(
    folder: str | os.PathLike[str], *, device: Place = None, dtype: torch.dtype | None = None
) -> Decoder:
    """The model in a folder that Hugging Face's tools wrote: config.json and safetensors.

    On `device` (torch's default) and in `dtype` (as stored). Files are mapped one after another and
    copied tensor by tensor. Raises CheckpointError, a ValueError, naming the cure: for a model that
    is not supported, for tensors that are missing, unexpected or of another shape, for damaged
    files, and for a folder without safetensors.
    """
    config = read_config(folder)
    return load_weights(Decoder, config, folder, device=device, dtype=dtype)


def read_config(folder: str | os.PathLike[str]) -> DecoderConfig:
    """The sizes that config.json in a folder says. Raises CheckpointError."""
    if not isinstance(folder, str | os.PathLike):
        raise CheckpointError(f"{folder!r} is no folder: give the path of a checkpoint's folder")
    path = Path(folder, CONFIG)
    if path.parent.is_file():
        raise CheckpointError(f"{folder} is a file: give the folder that it is in")
    fields = _read_json(path)
    try:
        return config_of(fields)
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}: {error}") from error


def load_weights(
    kind: type[Decoder],
    config: DecoderConfig,
    folder: str | os.PathLike[str],
    *,
    device: Place = None,
    dtype: torch.dtype | None = None,
) -> Decoder:
    """A model of that kind and those sizes, with a folder's weights. Raises as `load` does."""
    _check_asked(device, dtype)
    with torch.device("meta"):
        model = kind(config)
    folder = Path(folder)
    stored = _stored(_files(folder))
    _check(folder, model, config, stored)
    place = torch.get_default_device() if device is None else device
    for file in sorted({one.file for one in stored.values()}):
        names = [n for n, one in stored.items() if one.file == file]
        names = [n for n in names if n != HEAD or not config.tied]
        model.load_state_dict(_read(file, names, place, dtype), strict=False, assign=True)
    model.tie()
    put_together_all(model)
    if config.tied and HEAD in stored:
        _check_tied(folder, stored)
    model.saves_head = HEAD in stored
    return model


# --- reading --------------------------------------------------------------------------------------


def _check_asked(device: Place, dtype: torch.dtype | None) -> None:
    """Raises CheckpointError for a dtype of no weights, or a device that isn't here."""
    if dtype is not None and dtype not in DTYPES.values():
        names = ", ".join(map(str, DTYPES.values()))
        raise CheckpointError(f"dtype={dtype!r} is none of weights: choose one of {names}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0]
        raise CheckpointError(f"device={device!r} is not here ({said}): choose 'cpu'") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} holds no {path.name}: name the folder of a checkpoint"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no fields: copy it again")
    return content


def _files(folder: Path) -> list[Path]:
    """The files of weights: the single one, or those that the index names."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = [path.name for kind in PICKLED for path in sorted(folder.glob(kind))]
        found = f", only {pickled[0]}, which is pickled and could run code" if pickled else ""
        raise CheckpointError(
            f"{folder} holds no {SINGLE} and no {INDEX}{found}: name a folder of safetensors"
        )
    shards = _read_json(folder / INDEX).get("weight_map")
    names = set(shards.values()) if isinstance(shards, dict) else set()
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise CheckpointError(f"{folder / INDEX} names no files beside itself: copy it again")
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise CheckpointError(f"{folder} lacks {_listed(missing)} of its index: copy it again")
    return [folder / name for name in sorted(names)]


def _stored(files: list[Path]) -> dict[str, Stored]:
    """What the headers of the files say."""
    found: dict[str, Stored] = {}
    for file in files:
        for name, one in _header(file).items():
            if name in found:
                raise CheckpointError(
                    f"{name} stands in {found[name].file} and in {file.name}: keep one of them"
                )
            found[name] = one
    return found


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            slices = {name: opened.get_slice(name) for name in names}
            return {
                name: Stored(file, tuple(one.get_shape()), one.get_dtype())
                for name, one in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged, or no safetensors: copy it again") from error


def _read(file: Path, names: Iterable[str], device: Place, dtype: Any) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        # Copies: a view of the mapped file would change under a writer, and keeps it open.
        return {n: opened.get_tensor(n).to(device, dtype, copy=True) for n in names}


def _check(
    folder: Path, model: nn.Module, config: DecoderConfig, stored: Mapping[str, Stored]
) -> None:
    """Raise CheckpointError unless each tensor of the model is there, and no other."""
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    optional = {HEAD} if config.tied else set()
    shared = expected.keys() & stored.keys()
    problems = {
        "missing": sorted(expected.keys() - stored.keys() - optional),
        "unexpected": sorted(stored.keys() - expected.keys()),
        "of another shape": [
            f"{n} {list(stored[n].shape)} instead of {list(expected[n])}"
            for n in sorted(shared)
            if stored[n].shape != expected[n]
        ],
        "of no floating-point dtype": sorted(n for n in shared if stored[n].dtype not in DTYPES),
    }
    found = [f"{kind}: {_listed(names)}" for kind, names in problems.items() if names]
    if found:
        raise CheckpointError(
            f"{folder} doesn't hold the weights that its {CONFIG} describes; {'; '.join(found)}: "
            "take both from one checkpoint"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _check_tied(folder: Path, stored: Mapping[str, Stored]) -> None:
    head, embedding = (
        _read(stored[name].file, [name], "cpu", None)[name] for name in (HEAD, EMBEDDING)
    )
    if not torch.equal(head, embedding):
        raise CheckpointError(
            f"{folder}: {HEAD} differs from {EMBEDDING}, which tie_word_embeddings makes one: "
            f"set it to false in {CONFIG}"
        )


# --- writing --------------------------------------------------------------------------------------


def save(model: Decoder, folder: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model to a new or an empty folder, for Hugging Face's tools and for `load`.

    Weights keep names and dtypes; where they take more than `shard_bytes` they are split, in their
    order, over files of at most that (a tensor is never split), with an index. What `load` read is
    written back unchanged: each tensor's bytes, name and dtype, and the fields of config.json.
    The folder is there whole or not at all. Raises CheckpointError for a folder that holds files,
    and where writing fails.
    """
    if not isinstance(getattr(model, "config", None), DecoderConfig):
        raise CheckpointError(
            f"a {type(model).__name__} has no sizes that a config.json says: save a "
            "cz.models.Decoder, or torch.save the state_dict"
        )
    if not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise CheckpointError(
            f"shard_bytes={shard_bytes!r} is no number of bytes: write shard_bytes=5 * 10**9"
        )
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is no empty folder: choose a new one")
    fields_of(model.config)  # what can't be said there is refused before anything is written
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        _write(model, part, shard_bytes)
        _finish(part)
        os.replace(part, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} cannot be written ({error}): free space, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(model: Decoder, folder: Path, shard_bytes: int) -> None:
    weights = {
        name: weight.detach()
        for name, weight in model.state_dict().items()
        if name != HEAD or model.saves_head
    }
    shards = _split(weights, shard_bytes)
    names = [
        SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for file, shard in zip(names, shards, strict=True):
        # Clones: one storage under two names is no tensor for safetensors.
        tensors = {n: weights[n].cpu().contiguous() for n in shard}
        if HEAD in tensors and model.config.tied:
            tensors[HEAD] = tensors[HEAD].clone()
        save_file(tensors, folder / file, {"format": "pt"})
    if len(shards) > 1:
        place = {n: file for file, shard in zip(names, shards, strict=True) for n in shard}
        total = sum(weight.nbytes for weight in weights.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": place})
    _write_json(folder / CONFIG, _with_dtype(fields_of(model.config), weights))


def _split(weights: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names in their order, as many together as fit; what fits nowhere is alone, at once.

    Hugging Face's tools split the same way, so a model that they wrote keeps its files.
    """
    shards: list[list[str]] = []
    shard: list[str] = []
    size = 0
    for name, weight in weights.items():
        if weight.nbytes > shard_bytes:
            shards.append([name])
            continue
        if size + weight.nbytes > shard_bytes:
            shards.append(shard)
            shard, size = [], 0
        shard.append(name)
        size += weight.nbytes
    return [*shards, shard] if shard else shards


def _with_dtype(fields: dict[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields with the weights' dtype: transformers casts what it loads to it."""
    dtype = str(weights[EMBEDDING].dtype).removeprefix("torch.")
    return fields | {"dtype" if "dtype" in fields else "torch_dtype": dtype}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _finish(folder: Path) -> None:
    """Put a folder's files on the disk before it gets its name, to be read by whom the user lets.

    safetensors lets nobody else read what it writes.
    """
    mode = (folder / CONFIG).stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
