"""`cadenza audit` and `cadenza doctor` beside a GPU: real steps are profiled and sorted."""

import json

import pytest
import torch

from cadenza.tools.audit.options import AuditOptions
from cadenza.tools.audit.run import audit
from cadenza.tools.cli import main

pytestmark = pytest.mark.gpu
CONFIG = {
    "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1024,
}  # fmt: skip


@pytest.mark.slow
def test_steps_are_profiled_and_sorted(tmp_path, place):
    place.allows(torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    options = AuditOptions(batch=4, sequence=512, layers=2, steps=3, measure=True)
    report = audit(str(tmp_path), options)
    assert [one["variant"] for one in report.measured] == ["eager", "compiled", "cadenza"]
    for one in report.measured:
        assert "failed" not in one, one["failed"]
        classes = one["measured"]["classes"]
        assert {"products", "attention", "memory", "optimizer"} <= set(classes), one["kernels"]
        # Kernels of a step run one after another: together they take no longer than it does.
        assert 0 < sum(classes.values()) < 1.2 * one["quartiles"][2]
        assert classes.get("other", 0.0) < 0.05 * sum(classes.values()), one["kernels"]
    ours = {one["name"] for one in report.measured[2]["kernels"]}
    assert any(name.startswith("cadenza_") for name in ours), ours


def test_a_machine_with_a_gpu_is_found_fit(capsys, place):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["name"] == torch.cuda.get_device_name(0)
    assert next(one for one in found["backends"] if one["name"] == "triton")["usable"]
