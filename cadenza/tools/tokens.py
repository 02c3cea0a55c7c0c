"""What turns text into tokens and back: bytes as they are, or a tokenizer.json of Hugging Face.

The package `tokenizers` is optional, since bytes need none. It is the definition of that file: its
regular expressions, merges and normalisers written again would be another tokenizer now and then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cadenza.tools.fault import Fault
from cadenza.tools.settings import BYTEWISE

PIECE = 2**20  # characters
TOGETHER = 16  # pieces


class Tokenizer(Protocol):
    """Text, as bytes, to tokens and back; `vocabulary` is above every token, `unit` names one."""

    unit: str
    vocabulary: int

    def encode(self, text: bytes) -> Tensor:
        """The tokens of a text, whole numbers `[length]`; raises Fault where it has none."""

    def decode(self, tokens: list[int]) -> bytes:
        """The text of tokens."""


class Bytes:
    """Each byte is a token."""

    unit, vocabulary = "byte", 256

    def encode(self, text: bytes) -> Tensor:
        """The bytes, uint8 `[length]`."""
        if not text:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def decode(self, tokens: list[int]) -> bytes:
        """The bytes themselves."""
        return bytes(tokens)


class Subwords:
    """The tokens of a tokenizer.json.

    A long text is cut into pieces behind lines' ends that no blank stands before or after: no token
    of today's byte-level tokenizers reaches over such a place, nor depends on what follows it.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        self.path, self.own = path, _read(path)
        self.vocabulary = 1 + max(self.own.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: bytes) -> Tensor:
        """The tokens of a text in UTF-8, int32 `[length]`, without any that mark its ends."""
        try:
            pieces = _pieces(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise Fault(
                f"the text is no UTF-8 at byte {error.start}, and {self.path} needs it: "
                f"name another --text, or --tokenizer {BYTEWISE}"
            ) from error
        found = [torch.empty(0, dtype=torch.int32)]
        while group := list(islice(pieces, TOGETHER)):
            encodings = self.own.encode_batch(group, add_special_tokens=False)
            found += [torch.tensor(one.ids, dtype=torch.int32) for one in encodings]
        return torch.cat(found)

    def decode(self, tokens: list[int]) -> bytes:
        """The text, in UTF-8."""
        return str(self.own.decode(tokens)).encode()


BYTES = Bytes()


def tokenizer_named(name: str) -> Tokenizer:
    """Bytes for "bytes", else the tokenizer in that file. Raises Fault where there is none."""
    return BYTES if name == BYTEWISE else Subwords(Path(name))


def _read(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Own
    except ImportError as error:
        raise Fault(
            f"{path} needs the package tokenizers: install it (pip install tokenizers), "
            f"or choose --tokenizer {BYTEWISE}"
        ) from error
    if not path.is_file():
        raise Fault(f"--tokenizer {path} is not a file: name a tokenizer.json, or {BYTEWISE}")
    try:
        return Own.from_file(str(path))
    except Exception as error:
        raise Fault(
            f"--tokenizer {path} is no tokenizer.json of Hugging Face ({error}): name one, or "
            f"{BYTEWISE}"
        ) from error


def _pieces(text: str) -> Iterator[str]:
    """The text in parts of about a million characters, each up to a line's end."""
    start, line_end = 0, re.compile(r"(?<=\S)\n(?=\S)")
    while start < len(text):
        found = line_end.search(text, start + PIECE)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end
