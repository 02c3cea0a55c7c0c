"""Two processes on a CPU, by numbers of docs/reliability.md: the same steps as in one process.

Sharding takes a weight away outside of its module, and again after forward; a cache is shared.
"""

import os
import time

import pytest
import torch
import tuning_place
import two_processes
from two_processes import both, in_one_process

from cadenza.backends.triton.tuning import choices

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected():
    """What one process makes of all sequences."""
    return in_one_process()


def check(folder, name, expected):
    """Each rank has the parameters of one process, but for the order of sums."""
    for rank in range(two_processes.WORLD):
        found = torch.load(folder / f"{name}{rank}", weights_only=True)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, msg=key)


def test_22_steps_of_accumulation_on_two_ranks_equal_one_batch(expected, tmp_path):
    both(two_processes.replicated, tmp_path)
    check(tmp_path, "replicated", expected)


def test_30_weights_that_are_taken_away_after_forward_are_right_in_backward(expected, tmp_path):
    both(two_processes.sharded, tmp_path)
    check(tmp_path, "sharded", expected)


# --- one cache ------------------------------------------------------------------------------------


def slowly(calls):
    """Fewer stages, less time; long enough that two ranks would measure at once."""
    time.sleep(0.02)
    return tuning_place.stages(calls)


def tuned(rank, folder):
    """A first call's choice of kernels, all ranks at once; leaves how much was measured."""
    for name, answer in (("properties", tuning_place.Properties), ("name", "a GPU")):
        setattr(torch.cuda, f"get_device_{name}", lambda device, answer=answer: answer)
    torch.cuda.get_device_capability = lambda device: (9, 0)
    os.environ |= {"CADENZA_CACHE": str(folder), "CADENZA_TUNE": "first"}
    choices.WORKERS = tuning_place.Pretended(slowly)
    plan, text = tuning_place.plans("llama-mlp")[0]
    torch.distributed.barrier()
    choose = choices.choices(plan, text, tuning_place.settled(plan))
    found = [repr(choose(kernel)) for kernel in plan.kernels]
    torch.save((choices.WORKERS.measured, found), folder / f"tuned{rank}")


def test_36_of_several_ranks_one_measures_and_all_choose_alike(tmp_path):
    both(tuned, tmp_path)
    ranks = [torch.load(tmp_path / f"tuned{rank}") for rank in range(two_processes.WORLD)]
    measured, found = zip(*ranks, strict=True)
    assert sorted(measured) == [0, 2]
    assert found[0] == found[1]
    assert "None" not in found[0]
