"""Real steps on a GPU: how long they take, and the time of their kernels by class of work."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch

from cadenza.tools.audit.counting import CLASSES
from cadenza.tools.audit.fakes import fake
from cadenza.tools.audit.parts import Model, Part
from cadenza.tools.audit.prediction import CADENZA, EAGER, Prediction
from cadenza.tools.audit.profile import Kernel, profiled
from cadenza.tools.audit.report import milliseconds
from cadenza.tools.audit.subject import DecoderSubject, Subject, on
from cadenza.tools.audit.trace import differentiable
from cadenza.tools.bench.machine import device_name

Tensor = torch.Tensor
WARM = 3  # steps before any is counted
USED = 0.85  # share of the memory that may be filled
STATES = 4  # a parameter, its gradient and two moments


def measure(
    subject: Subject, prediction: Prediction, variants: list[str], steps: int
) -> list[dict[str, Any]]:
    """What each variant of a subject took, beside what was predicted for it."""
    device = torch.device("cuda", torch.cuda.current_device())
    layers = subject.decoder.layers if isinstance(subject, DecoderSubject) else None
    found = []
    for variant in variants:
        record: dict[str, Any] = {
            "variant": variant, "device": device_name(device), "layers": layers,
        }  # fmt: skip
        if variant in prediction.missing:  # there is nothing to stand beside
            found.append({**record, "failed": f"not predicted: {prediction.missing[variant]}"})
            continue
        try:
            record |= _measured(subject, variant, steps, device)
        except Exception as error:  # noqa: BLE001  # whatever fails is that variant's result
            lines = str(error).strip().splitlines() or [""]
            record = {**record, "failed": f"{type(error).__name__}: {lines[0]}"}
        else:
            share = prediction.step(variant, prediction.precisions[0])
            record["predicted"] = {"ms": 1e3 * share.total, "classes": milliseconds(share)}
        finally:
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
        found.append(record)
    return found


def _measured(subject: Subject, variant: str, steps: int, device: torch.device) -> dict[str, Any]:
    with device:
        model = subject.after() if variant == CADENZA else subject.before()
    if isinstance(model, str):
        raise RuntimeError(model)
    step = step_of(on(model, device), compiled=variant != EAGER)
    for _ in range(WARM):
        step()
    times = sorted(_timed(step) for _ in range(max(steps, 2)))
    kernels = profiled(lambda: [step() for _ in range(steps)] and None)
    lower, middle, upper = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "quartiles": [lower, middle, upper],
        "measured": {"ms": middle, "classes": by_class(kernels, steps)},
        "kernels": longest(kernels, steps),
    }


def step_of(model: Model, compiled: bool) -> Callable[[], None]:
    """A training step of a model: forward, backward, and AdamW by PyTorch's fused kernel."""
    weights = [weight for weight in model.module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
    call = torch.compile(model.module) if compiled else model.module

    def step() -> None:
        outputs = differentiable(call(*model.args, **model.kwargs))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _timed(step: Callable[[], None]) -> float:
    """Milliseconds of a step."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def by_class(kernels: list[Kernel], steps: int) -> dict[str, float]:
    """Milliseconds a step, by class of work."""
    found = dict.fromkeys(CLASSES, 0.0)
    for kernel in kernels:
        found[kernel.kind] += 1e3 * kernel.seconds / steps
    return {name: time for name, time in found.items() if time}


def longest(kernels: list[Kernel], steps: int, most: int = 40) -> list[dict[str, Any]]:
    """The kernels that take most of a step, by name and class."""
    times: dict[tuple[str, str], float] = {}
    for kernel in kernels:
        key = kernel.name, kernel.kind
        times[key] = times.get(key, 0.0) + 1e3 * kernel.seconds / steps
    ordered = sorted(times.items(), key=lambda one: -one[1])[:most]
    return [{"name": name, "class": kind, "ms": time} for (name, kind), time in ordered]


# --- how many layers fit --------------------------------------------------------------------------


def that_fits(subject: Subject, memory: int) -> Subject:
    """The subject with as many layers as fit in so many bytes, at least one."""
    if not isinstance(subject, DecoderSubject):
        return subject
    with fake():
        parts = subject.cut(1).before().parts()
        layer, rest = held(parts[0]), held(parts[-1])
    fitting = int((USED * memory - 2 * rest) // layer)  # logits and their gradients live twice
    return subject.cut(max(1, min(fitting, subject.decoder.layers)))


def held(part: Part) -> int:
    """Bytes that a part keeps through a step: its parameters' states, and what backward needs."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), part.context():
        part.module(*part.args, **part.kwargs)
    weights = {w.untyped_storage()._cdata for w in part.weights.values()}
    states = STATES * sum(w.numel() * w.element_size() for w in part.weights.values())
    return states + sum(size for storage, size in saved.items() if storage not in weights)
