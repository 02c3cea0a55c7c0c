"""`cadenza train` on a GPU against the same training on a CPU, loss by loss.

A difference is measured as `train --compare` does it, relative to the other loss of that step, and
in bfloat16 beside the drift of a stock twin from a stock twin whose weights were moved by one unit
in the last place, both on the CPU.
"""

import pytest
from calls import launches
from plans import watched
from small_runs import metrics, train
from template_choice import forget_programs

from cadenza.tools.contender import OURS, PERTURBED, STOCK, trainer_of
from cadenza.tools.settings import Settings
from cadenza.tools.verdict import DRIFT_RATIO, LIMITS, relative

pytestmark = pytest.mark.gpu
STEPS = 40
SIZES = {"width": 64, "layers": 2, "feed_forward": 96, "context": 32, "batch": 4}


def losses(part, dtype, device):
    """The losses of a training, step by step."""
    trainer = trainer_of(part, Settings(**SIZES, dtype=dtype, device=device))
    return [trainer.train_step() for _ in range(STEPS)]


def largest_difference(first, second):
    """The largest relative difference of two trainings' losses."""
    return max(relative(a, b) for a, b in zip(first, second, strict=True))


def say(capsys, text):
    """Prints a figure, passing or not."""
    with capsys.disabled():
        print(f"\n{text}", end="")


def test_training_in_float32_follows_the_cpu(place, capsys):
    with launches() as made:
        found = losses(OURS, "float32", str(place.device))
    assert len(made), "nothing ran by Triton"
    drift = largest_difference(found, losses(OURS, "float32", "cpu"))
    limit, _ = LIMITS["float32"]
    say(capsys, f"float32 on a GPU from a CPU: {drift:.2e}, at most {limit:.0e}")
    assert drift <= limit


def test_training_in_bfloat16_drifts_no_more_than_one_unit_in_the_last_place_does(place, capsys):
    forget_programs()
    with launches() as made, watched() as products:
        found = losses(OURS, "bfloat16", str(place.device))
    assert len(made) > STEPS, "nothing ran by Triton"
    assert products, "no product ran by Triton"
    drift = largest_difference(found, losses(OURS, "bfloat16", "cpu"))
    yardstick = largest_difference(*(losses(p, "bfloat16", "cpu") for p in (PERTURBED, STOCK)))
    say(capsys, f"bfloat16 on a GPU from a CPU: {drift:.2e}, of perturbed stock {yardstick:.2e}")
    assert drift <= DRIFT_RATIO * yardstick
    assert found[-1] < found[0] - 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("short_samples")
def test_the_command_trains_and_resumes_on_a_gpu(dtype, place, tmp_path):
    options = ["--device", "cuda", "--dtype", dtype]
    assert train(tmp_path / "whole", "--steps", 12, *options) == 0
    assert train(tmp_path / "parts", "--steps", 6, *options) == 0
    assert train(tmp_path / "parts", "--steps", 12, "--resume") == 0
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert whole["settings"]["device"] == "cuda"
    assert len(whole["training"]) == 12
    # torch's own attention may sum in another order from run to run.
    close = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    assert parts["training"] == pytest.approx(whole["training"], rel=close)
