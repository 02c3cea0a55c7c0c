"""A GPU that is pretended for tests of tuning, and plans whose kernels compete on it."""

import torch
from planned import large_call

from cadenza.backends.triton.target import Target
from cadenza.backends.triton.tuning import choices, contests
from cadenza.core.plan_text import PairText

HOPPER = Target.named("sm_90")


class Properties:
    """What of a device's properties counts."""

    multi_processor_count = 132


def pretend_a_gpu(monkeypatch, cache):
    """Another device's properties, an empty cache, nothing decided."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("CADENZA_CACHE", str(cache))
    monkeypatch.setenv("CADENZA_TUNE", "first")
    monkeypatch.setattr(choices, "_decided", {})


def settled(plan, rows=16384, target=HOPPER, turned=()):
    """A plan's setting: inputs without numbers, some of them laid out by columns."""
    inputs = {}
    for node in plan.graph.inputs:
        shape = [rows if d == "M" else int(d) for d in node.type[:2]]
        dtype = getattr(torch, node.attributes["dtype"])
        made = torch.empty(shape, dtype=dtype, device="meta")
        if node.attributes["name"] in turned:
            made = torch.empty(shape[::-1], dtype=dtype, device="meta").T
        inputs[node] = made
    return contests.Setting(target, torch.device("cuda", 0), contests.rounded(rows), rows, inputs)


def plans(name, dtype="bfloat16"):
    """The plans of a built-in block at large sizes, with their text."""
    pair = large_call(name, dtype).pair()
    text = PairText(pair)
    return [(plan, text) for plan in (pair.forward_plan, pair.backward_plan) if plan is not None]
