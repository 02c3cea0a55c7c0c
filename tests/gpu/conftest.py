"""Tests marked `gpu`: what they run on, and why they are skipped where they can't run.

They need a GPU that Triton compiles for. Without one, `TRITON_INTERPRET=1 pytest -m gpu` runs those
marked `interpreted` on a CPU, at tiny sizes, so that the tests themselves can be tried.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from calls import Place
from template_choice import NOT_HOPPER, PINGPONG, PLAIN, Template, forget_programs

from cadenza.backends import reference
from cadenza.backends.triton.target import Target

NO_GPU = "needs a GPU of CUDA; TRITON_INTERPRET=1 pytest -m gpu interprets some of these on a CPU"
ONLY_GPU = "needs a GPU of CUDA: Triton's interpreter has nothing of what is tested"
INTERPRETED = "TRITON_INTERPRET=1 is set beside a GPU: unset it, then run pytest -m gpu by itself"


def why_not(item: pytest.Item, asked: bool) -> str:
    """Why a test can't run here; `asked` is whether tests marked gpu were asked for by name."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if torch.cuda.is_available():
        return INTERPRETED if interpreting else ""
    if interpreting and asked:
        return "" if item.get_closest_marker("interpreted") else ONLY_GPU
    return NO_GPU


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what can't run here, for a reason."""
    asked = "gpu" in config.getoption("markexpr")
    for item in items:
        if item.get_closest_marker("gpu"):
            reason = why_not(item, asked)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def whole_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference back end takes all rows at once: by small tiles a GPU would crawl."""
    monkeypatch.setattr(reference, "TILE", None)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Where a test runs. What it left on the GPU is given back, so that many can share one."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("CADENZA_BACKEND", "triton")
        yield Place(torch.device("cpu"), interpreted=True)
        return
    yield Place(torch.device("cuda", 0), interpreted=False)
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:  # nothing more can run on a GPU in this process
        pytest.exit(f"a kernel failed on the GPU in {request.node.nodeid}: {error}", returncode=3)


@pytest.fixture(params=[PLAIN, PINGPONG])
def template(
    request: pytest.FixtureRequest, place: Place, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Template]:
    """The template by which a test's products run, the plain one by default.

    A test of another fails at its end if there were products for it and none of its kernels ran.
    """
    chosen = Template(request.param)
    if not chosen.cuts:
        yield chosen
        return
    if place.interpreted or Target.of(place.device).name != "sm_90":
        pytest.skip(NOT_HOPPER)
    forget_programs()
    chosen.install(monkeypatch)
    yield chosen
    forget_programs()
    chosen.check()
