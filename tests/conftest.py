"""What every test runs under: one seed, one thread a worker, and the number of random examples.

Property tests take their number of examples from the profile: 500, 100 in the quick tier, or 5000
with `--long`. A test that needs fewer says so itself, with `@settings`, and is then not lengthened
by `--long`.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and inherited by the processes that tests start: several workers with
# a thread for every core each would only wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every program of every test, and of the processes that tests start, runs by small, ragged tiles.
os.environ.setdefault("CADENZA_REFERENCE_TILE", "5")

# Kernels run by defaults: what is measured differs from one run to the next.
os.environ.setdefault("CADENZA_TUNE", "off")

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings
from small_runs import SAMPLE_BYTES, train

# Before Triton is imported: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


class TorchRandom:
    """torch's generator as hypothesis wants it, so that an example replays with its numbers."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# hypothesis holds it by a weak reference only.
TORCH_RANDOM = TorchRandom()
register_random(TORCH_RANDOM)

# No deadline: the first example of a test pays for imports and caches, and machines are shared.
# Every value is given, because under `CI` hypothesis would otherwise draw the same examples in
# every run.
COMMON = settings(
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("cadenza", parent=COMMON, max_examples=500)
settings.register_profile("cadenza-long", parent=COMMON, max_examples=5000)
settings.register_profile("cadenza-quick", parent=COMMON, max_examples=100)
QUICK = "not slow and not gpu"  # what `make quick` selects


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--long` and `--shard`."""
    parser.addoption("--long", action="store_true", help="5000 random examples a property, not 500")
    parser.addoption("--shard", metavar="I/N", help="every Nth of the selected tests, from the Ith")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the profile, unless `--hypothesis-profile` did."""
    if config.getoption("--hypothesis-profile"):
        return
    quick = "-quick" if config.getoption("markexpr") == QUICK else ""
    settings.load_profile(f"cadenza{'-long' if config.getoption('--long') else quick}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of a shard: by order, among those that `-m` and `-k` have left."""
    if not config.getoption("--shard"):
        return
    found = re.fullmatch(r"(\d+)/(\d+)", config.getoption("--shard"))
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError("--shard is I/N, from 1/N to N/N")
    first, step = int(found[1]) - 1, int(found[2])
    kept = items[first::step]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same torch seed, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def short_samples() -> Iterator[None]:
    """Runs of `cadenza train` in this process write a few bytes of text at their end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*SAMPLE_BYTES)
        yield


@pytest.fixture(scope="module")
def finished(short_samples: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 10 steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(folder, "--steps", 10) == 0
    return folder
