"""What `cadenza bench` can be asked. Importing this file loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

RESULTS = "benchmarks/results"
ONLY = "patterns, sizes or pattern/size to measure, of the suite's (several by commas)"
SIZE = "sizes by name, M=4096,N=4096: one case a pattern, of these"
VARIANTS = "what to compare: ours,compile,eager (default: all that the suite has)"
SECONDS = "time to measure for each variant of a case, compilation apart"
TEXT = "text that model-loss learns, a file; Python's own documentation if left out"
MERGE = "a folder whose results are taken over into --out (may be repeated)"


@dataclass(frozen=True)
class Options:
    """Options of `bench` that have a value; lists may be repeated, a text may hold several."""

    only: list[str] | None = field(default=None, metadata={"help": ONLY})
    size: list[str] | None = field(default=None, metadata={"help": SIZE})
    variants: list[str] | None = field(default=None, metadata={"help": VARIANTS})
    shard: str | None = field(default=None, metadata={"help": "every Nth case from the Ith: I/N"})
    seconds: float = field(default=1.0, metadata={"help": SECONDS})
    dtype: str | None = field(default=None, metadata={"help": "bf16 or fp16 (default: suite's)"})
    device: str | None = field(default=None, metadata={"help": "cuda or cpu (default: what is)"})
    out: str = field(default=RESULTS, metadata={"help": "folder of results"})
    text: str | None = field(default=None, metadata={"help": TEXT})
    merge: list[str] | None = field(default=None, metadata={"help": MERGE})


def split(texts: list[str] | None) -> list[str]:
    """The parts of texts that are separated by commas."""
    return [part.strip() for text in texts or () for part in text.split(",") if part.strip()]
