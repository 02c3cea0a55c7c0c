"""Programs under torch.compile's default back end, inductor, and its caches on disk.

Slow, because every graph goes through a C++ compiler. The caches outlive a process, and with it
the program that a graph was made from: an edited program must not meet a graph of its old form.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from citizens import CASES, K, gradients, same, tensor, values

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_are_those_of_eager_mode(case):
    torch._dynamo.reset()
    compiled = torch.compile(case.call, fullgraph=True)
    for rows in (5, 7, 12):
        operands = case.operands((rows,))
        found, expected = compiled(operands), case.call(operands)
        assert same(values(found), values(expected))
        assert same(gradients(found, operands), gradients(expected, operands))


def test_a_program_between_compiled_operations():
    torch._dynamo.reset()
    case = CASES["epilogue"]

    def function(operands):
        x, w, rstd = operands.values()
        y = case.call({"x": x.sin(), "w": w * 2.0, "rstd": rstd.exp()})
        return torch.nn.functional.layer_norm(y, y.shape[-1:]).tanh()

    compiled = torch.compile(function, fullgraph=True)
    for rows in (5, 7):
        operands = case.operands((rows,), dtype=torch.float64)
        found, expected = compiled(operands), function(operands)
        assert torch.allclose(found, expected, rtol=1e-12)
        for mine, other in zip(
            gradients(found, operands).values(), gradients(expected, operands).values(), strict=True
        ):
            assert torch.allclose(mine, other, rtol=1e-9, atol=1e-12)


def test_a_training_step_with_an_optimizer():
    torch._dynamo.reset()
    weights = [tensor(2 * K, K), tensor(K, K)]
    batches = [torch.randn(rows, K, dtype=torch.float64) for rows in (5, 6, 7, 8)]

    def loss(x, first, second):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        y = CASES["epilogue"].call({"x": x, "w": first, "rstd": rstd})
        return (y @ second - x).square().mean()

    def train(function):
        own = [w.detach().double().requires_grad_() for w in weights]
        optimizer = torch.optim.AdamW(own, lr=1e-2)
        losses = []
        for batch in batches:
            losses.append(function(batch, *own))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).detach()

    assert torch.allclose(train(torch.compile(loss, fullgraph=True)), train(loss), rtol=1e-9)


# --- caches on disk -------------------------------------------------------------------------------

HELPER = """
from cadenza import lang as L

def activate(x):
    return {expression}
"""
SCRIPT = """
import torch, helper
from cadenza import epilogue
from torch._dynamo.utils import counters

@epilogue
def activated(acc):
    return helper.activate(acc)

torch.manual_seed(0)
x, w = (torch.randn(n, 8, requires_grad=True) for n in (4, 12))
function = torch.compile(lambda x, w: activated(x, w).sin(), fullgraph=True)
for results in zip(
    torch.autograd.grad(function(x, w).sum(), [x, w]),
    torch.autograd.grad(activated.plain(x, w).sin().sum(), [x, w]),
):
    assert torch.allclose(*results, atol=1e-5)
print(dict(counters["aot_autograd"]).get("autograd_cache_hit", 0))
"""


def test_caches_serve_the_same_program_and_no_other(tmp_path):
    def hits(expression):
        (tmp_path / "helper.py").write_text(HELPER.format(expression=expression))
        done = subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
    }
    assert hits("L.silu(x)") == 0
    assert hits("L.silu(x)") == 1
    assert hits("L.tanh(x) * L.row_sum(x)") == 0  # saves one value more
