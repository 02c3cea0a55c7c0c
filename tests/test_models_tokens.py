"""Tokens of a text: bytes, or those of a tokenizer.json, and what a run does with them."""

import shutil
import sys

import pytest
import torch
from small_runs import metrics, refusal
from tiny_models import tiny, tiny_config

import cadenza as cz
from cadenza.tools import tokens
from cadenza.tools.cli import main
from cadenza.tools.corpus import read_corpus
from cadenza.tools.fault import Fault
from cadenza.tools.generate import generate
from cadenza.tools.runs import fresh_settings
from cadenza.tools.tokens import BYTES, Subwords, tokenizer_named

pytestmark = pytest.mark.usefixtures("short_samples")
OPTIONS = ["--device", "cpu", "--context", "16", "--batch", "4", "--steps", "2"]
LINES = [f"The {n}th line of {n * n} words, ünïcödé too.{' ' * (n % 3)}" for n in range(300)]
TEXT = "\n".join(LINES[:150]) + "\n\n  \n" + "\n\n".join(LINES[150:]) + "\n   last"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A byte-level tokenizer.json of 300 tokens, learnt from the text."""
    parts = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    own = parts.Tokenizer(parts.models.BPE())
    own.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = parts.decoders.ByteLevel()
    alphabet = parts.pre_tokenizers.ByteLevel.alphabet()
    trainer = parts.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    own.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("tokens") / "tokenizer.json"
    own.save(str(path))
    return path


@pytest.fixture
def start(file, tmp_path):
    """A checkpoint with its tokenizer, and a text to learn."""
    cz.models.save(tiny(), tmp_path / "start")
    shutil.copyfile(file, tmp_path / "start" / "tokenizer.json")
    (tmp_path / "text").write_text(TEXT * 3)
    return tmp_path / "start"


def test_bytes_are_tokens():
    assert BYTES.encode(b"a\xff").tolist() == [97, 255]
    assert BYTES.encode(b"").tolist() == []
    assert BYTES.decode([97, 255]) == b"a\xff"
    assert tokenizer_named("bytes") is BYTES


def test_subwords_go_there_and_back(file):
    found = tokenizer_named(str(file))
    encoded = found.encode(TEXT.encode())
    assert encoded.dtype == torch.int32
    assert found.decode(encoded.tolist()) == TEXT.encode()
    assert len(encoded) < len(TEXT.encode()) / 1.2
    assert found.vocabulary == 300
    assert encoded.max() < 300
    assert 0 not in encoded, "no token marks an end"
    assert found.encode(b"").tolist() == []


@pytest.mark.parametrize("piece", [1, 50, 3000])
def test_pieces_change_no_token(file, monkeypatch, piece):
    whole = Subwords(file).encode(TEXT.encode())
    monkeypatch.setattr(tokens, "PIECE", piece)
    monkeypatch.setattr(tokens, "TOGETHER", 3)
    assert torch.equal(Subwords(file).encode(TEXT.encode()), whole)
    pieces = list(tokens._pieces(TEXT))
    assert "".join(pieces) == TEXT
    assert len(pieces) > 1
    assert all(one.endswith("\n") for one in pieces[:-1])
    assert not any(one[0].isspace() for one in pieces)


def test_a_corpus_of_subwords_is_told_by_its_tokens(file, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    corpus = read_corpus(str(tmp_path / "text"), 16, Subwords(file))
    everything = torch.cat([corpus.training, corpus.held_out])
    assert torch.equal(everything, Subwords(file).encode(TEXT.encode()))
    assert len(corpus.held_out) == len(everything) // 10
    batch = corpus.batch(0, 0, 4, 16)
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64
    assert corpus.digest != read_corpus(str(tmp_path / "text"), 16).digest
    with pytest.raises(Fault, match="tokens and a context of 4000 needs 40010: choose a longer"):
        read_corpus(str(tmp_path / "text"), 4000, Subwords(file))


class Constant(torch.nn.Module):
    """Prefers ever higher tokens."""

    def __init__(self, vocabulary):
        super().__init__()
        self.logits = torch.nn.Parameter(100.0 * torch.arange(vocabulary))
        self.config = tiny_config()

    def forward(self, tokens):
        """Logits `[1, S, V]`, the same at every position."""
        return self.logits.expand(1, tokens.shape[1], -1)


def test_no_token_is_drawn_that_the_tokenizer_lacks(file):
    assert generate(Constant(400), b"x", 3, seed=0) == b"x\xff\xff\xff"
    found = Subwords(file)
    last = found.decode([299])
    assert generate(Constant(400), b"The ", 2, seed=0, tokenizer=found) == b"The " + 2 * last


def test_a_run_takes_the_tokenizer_of_its_checkpoint_and_hands_it_on(start, tmp_path, capsys):
    options = ["--init", str(start), *OPTIONS, "--text", str(tmp_path / "text")]
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 0
    said = capsys.readouterr().out
    assert " tokens to train on, " in said
    assert metrics(tmp_path / "run")["settings"]["tokenizer"] == str(start / "tokenizer.json")
    exported = tmp_path / "run" / "model" / "tokenizer.json"
    assert exported.read_bytes() == (start / "tokenizer.json").read_bytes()
    sample = (tmp_path / "run" / "sample.txt").read_text()
    assert sample.startswith("The ")
    moved = (start / "tokenizer.json").rename(tmp_path / "moved.json")
    again = ["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "3"]
    line = refusal(capsys, tmp_path, again)
    assert "tokenizer.json is not a file: name a tokenizer.json, or bytes" in line
    assert main([*again, "--tokenizer", str(moved)]) == 0
    line = refusal(capsys, tmp_path, [*again, "--tokenizer", "bytes"])
    assert "differs from the text that the checkpoint was trained on" in line


def test_bytes_may_be_asked_for_in_its_place(start, tmp_path, monkeypatch):
    assert fresh_settings({"init": str(start), "tokenizer": "bytes"}).tokenizer == "bytes"
    monkeypatch.chdir(start)
    given = {"init": str(start), "tokenizer": "tokenizer.json"}
    assert fresh_settings(given).tokenizer == str(start / "tokenizer.json")


def test_more_tokens_than_the_model_knows(file, tmp_path, capsys):
    cz.models.save(tiny(tiny_config(vocabulary=299)), tmp_path / "start")
    (tmp_path / "text").write_text(TEXT * 3)
    options = ["--init", tmp_path / "start", *OPTIONS, "--text", tmp_path / "text"]
    line = refusal(capsys, tmp_path, ["train", *options, "--tokenizer", file])
    assert "the tokenizer has 300 tokens, the model knows 299: name the --tokenizer of" in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not a file: name a tokenizer.json, or bytes"),
        ("{}", "is no tokenizer.json of Hugging Face ("),
        ("no json", "is no tokenizer.json of Hugging Face ("),
    ],
)
@pytest.mark.usefixtures("file")
def test_a_tokenizer_that_is_none(start, tmp_path, capsys, content, said):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    line = refusal(capsys, tmp_path, ["train", "--init", start, *OPTIONS, "--tokenizer", path])
    assert f"--tokenizer {path} {said}" in line


def test_a_text_that_is_no_utf_8(start, tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"abc\xff" * 1000)
    options = ["--init", start, *OPTIONS, "--text", tmp_path / "text"]
    line = refusal(capsys, tmp_path, ["train", *options])
    assert "the text is no UTF-8 at byte 3, and" in line
    assert "name another --text, or --tokenizer bytes" in line


def test_without_the_package_a_run_says_what_to_install(tmp_path, monkeypatch, capsys):
    cz.models.save(tiny(), tmp_path / "start")
    (tmp_path / "start" / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    line = refusal(capsys, tmp_path, ["train", "--init", tmp_path / "start", *OPTIONS])
    assert (
        "needs the package tokenizers: install it (pip install tokenizers), or choose --to" in line
    )
    options = [*OPTIONS, "--tokenizer", "bytes", "--out", str(tmp_path / "run")]
    assert main(["train", "--init", str(tmp_path / "start"), *options]) == 0
