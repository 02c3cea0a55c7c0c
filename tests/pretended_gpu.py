"""A GPU on which attention is timed, pretended: its name, state and kernels, and their times."""

import torch

from cadenza.library import attention_choice
from cadenza.library.attention_choice import order_of
from cadenza.library.attention_heads import Heads
from cadenza.library.attention_kernels import EXPANDED, KERNELS, OWN, STOCK
from cadenza.library.attention_race import Call

GPU = torch.device("cuda", 0)
HEADS = Heads(4, 2, 16)
CALL = Call(GPU, torch.bfloat16, HEADS, 2, 300, True)
TIMES = {OWN: 10.0, "flash": 10.1, "cudnn": 5.0, "efficient": 8.0, EXPANDED: "it does not serve"}


class Watch:
    """Pretends to time kernels, and remembers of which calls."""

    def __init__(self, times):
        self.times, self.calls = times, []

    def __call__(self, call, how):
        self.calls.append((call, how))
        return dict(self.times)


def pretend_gpu(monkeypatch, folder):
    """An empty cache in a folder, nothing decided; the watch of a GPU that cuDNN is fastest on."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(attention_choice, "prepare", lambda device: None)
    monkeypatch.setenv("CADENZA_CACHE", str(folder))
    monkeypatch.setenv("CADENZA_TUNE", "first")
    another_process(monkeypatch)
    watched = Watch(TIMES)
    monkeypatch.setattr(attention_choice, "times_of", watched)
    return watched


def another_process(monkeypatch):
    """Forgets what this process has decided."""
    for name in ("_decided", "_entries", "_planned"):
        monkeypatch.setattr(attention_choice, name, {})


def chosen_here(x, heads):
    """What is chosen for x, as if it were on the GPU."""
    backward = not torch.is_inference_mode_enabled()
    return order_of(Call(GPU, torch.bfloat16, heads, x.shape[0], x.shape[1], backward))


def pretend_kernels(monkeypatch, without=()):
    """Kernels that serve a CPU, but those named; which ones ran, and on how many heads of keys."""
    ran = []

    def kernel(name, stock):
        def operator(query, key, value, scale):
            ran.append((name if key.shape[1] == query.shape[1] else f"{name}, shared", query.dtype))
            grouped = query.shape[1] != key.shape[1]
            return STOCK(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)

        return stock._replace(serves=lambda asked: name not in without, operator=operator)

    for name, stock in list(KERNELS.items()):
        monkeypatch.setitem(KERNELS, name, kernel(name, stock))
    return ran
