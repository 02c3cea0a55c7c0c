"""Arguments of linear_cross_entropy and of its module: a superset of torch's, what doesn't fit
raises with the cure, and what the module keeps."""

import copy
import inspect
import re

import pytest
import torch
from loss_options import EVERYTHING, assert_equal, each_form, example, oracle
from torch import nn
from torch.nn import functional as F

import cadenza as cz
from cadenza.core.errors import ProgramError

linear_cross_entropy = cz.ops.linear_cross_entropy
LinearCrossEntropy = cz.nn.LinearCrossEntropy


def test_every_argument_of_torch_is_one_with_its_default():
    own = inspect.signature(linear_cross_entropy).parameters
    for name, parameter in inspect.signature(F.cross_entropy).parameters.items():
        if name != "input":
            assert own[name].default == parameter.default


WRONG = {
    "reduction": ({"reduction": "average"}, "reduction='average'", "reduction='mean'"),
    "chunk": ({"chunk": 0}, "chunk=0", "chunk=None"),
    "deprecated": ({"size_average": True}, "size_average=True", "'sum' or 'none'"),
    "deprecated too": ({"reduce": False}, "reduce=False", "'sum' or 'none'"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing=1.5", "[0, 1]"),
    "smoothing by tensor": ({"label_smoothing": torch.ones(())}, "tensor(1.)", "[0, 1]"),
    "z-loss": ({"z_loss": -1e-4}, "z_loss=-0.0001", "z_loss=1e-4"),
    "cap of nothing": ({"softcap": 0.0}, "softcap=0.0", "softcap=None"),
    "no index": ({"ignore_index": None}, "ignore_index=None", "ignore_index=-100"),
    "bias": ({"bias": torch.ones(8)}, "bias [8]", "bias [V]"),
    "classes": ({"weight": torch.ones(8)}, "weight [8]", "weight of shape [9]"),
    "tokens": (
        {"token_weights": torch.ones(12)},
        "token_weights [12]",
        "token_weights of shape [13]",
    ),
    "trained": ({"weight": torch.ones(9).requires_grad_()}, "requires a gradient", "detach()"),
    "items": ({"num_items_in_batch": torch.ones(1)}, "a Tensor [1]", "tensor.sum()"),
    "fewer than no items": ({"num_items_in_batch": -3}, "num_items_in_batch=-3", "0 or more"),
    "items by name": ({"num_items_in_batch": "7"}, "a str", "a number"),
    "items and sum": ({"num_items_in_batch": 7, "reduction": "sum"}, "'sum'", "reduction='mean'"),
    "device": ({"bias": torch.ones(9, device="meta")}, "bias on meta", "bias.to(x.device)"),
}


@each_form
@pytest.mark.parametrize(("options", "found", "cure"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_raises_with_the_cure(options, found, cure, lean):
    with pytest.raises(ProgramError, match=re.escape(found)) as raised:
        linear_cross_entropy(**example({}).operands, **options, lean=lean)
    assert cure in str(raised.value)


TARGETS = {
    "numbers": (lambda target: target.float(), "target of torch.float32, [13]", "target.long()"),
    "probabilities": (
        lambda target: torch.rand(13, 9),
        "probabilities",
        "F.cross_entropy(F.linear",
    ),
    "int32": (lambda target: target.int(), "target of torch.int32", "target.long()"),
    "another shape": (lambda target: target[1:], "target [12]", "target [...]"),
    "one target less": (lambda target: target[1:], "target [12]", "x[..., :-1, :]"),
    "flat": (lambda target: target[:, None], "target [13, 1]", "target.view(13)"),
}


@pytest.mark.parametrize(("change", "found", "cure"), TARGETS.values(), ids=TARGETS)
def test_targets_that_do_not_fit_raise_with_the_cure(change, found, cure):
    x, w, target = example({}).operands.values()
    with pytest.raises(ProgramError, match=re.escape(found)) as raised:
        linear_cross_entropy(x, w, change(target))
    assert cure in str(raised.value)


def test_operands_that_do_not_fit_raise():
    x, w, target = example({}).operands.values()
    with pytest.raises(ProgramError, match=r"w \[9, 4\]"):
        linear_cross_entropy(x, w[:, :4], target)
    with pytest.raises(ProgramError, match="one dtype"):
        linear_cross_entropy(x, w.float(), target)
    with pytest.raises(TypeError, match="unexpected keyword argument 'accumulate'"):
        linear_cross_entropy(x, w, target, accumulate=True)


def test_weights_of_any_real_dtype():
    """Whole numbers and truth values too: a mask of tokens is a weight of 0 or 1."""
    x, w, target = example({}).operands.values()
    mask = torch.arange(13) % 3 > 0
    masked = linear_cross_entropy(x, w, target, token_weights=mask, weight=torch.ones(9).half())
    torch.testing.assert_close(masked, F.cross_entropy(F.linear(x[mask], w), target[mask]))


# --- the module -----------------------------------------------------------------------------------


@each_form
def test_the_module_has_the_options_of_the_function(lean):
    case = example(EVERYTHING)
    x, w, target, bias, weight, token_weights = case.operands.values()
    module = LinearCrossEntropy(
        5, 9, bias=True, class_weight=weight, dtype=torch.float64, lean=lean, **case.options
    )
    module.load_state_dict({"weight": w, "bias": bias})
    given = {"x": x, "token_weights": token_weights}
    given = {name: value.clone().requires_grad_() for name, value in given.items()}
    loss = module(given["x"], target, token_weights=given["token_weights"])
    trained = [given["x"], module.weight, module.bias, given["token_weights"]]
    upstream = torch.randn((), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    gradients = torch.autograd.grad(loss, trained, upstream)
    assert_equal([loss, *gradients], case.run(oracle))


def test_the_module_divides_by_the_number_of_items():
    module = LinearCrossEntropy(5, 9)
    x, target = torch.randn(2, 3, 5), torch.randint(0, 9, (2, 3))
    total = LinearCrossEntropy(5, 9, reduction="sum")
    total.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x, target, num_items_in_batch=4), total(x, target) / 4)


def test_the_state_dict_of_the_module_is_that_of_a_linear_layer():
    for bias in (False, True):
        head = nn.Linear(5, 9, bias=bias)
        module = LinearCrossEntropy(5, 9, bias=bias, class_weight=torch.ones(9))
        module.load_state_dict(head.state_dict())
        head.load_state_dict(module.state_dict())
        assert torch.equal(module.weight, head.weight)
    module.to(torch.bfloat16)
    assert module.class_weight.dtype == module.bias.dtype == torch.bfloat16


def test_the_module_can_be_tied_and_copied():
    embedding = nn.Embedding(9, 5)
    module = LinearCrossEntropy(5, 9, softcap=30.0)
    module.weight = embedding.weight
    tokens = torch.randint(0, 9, (2, 6))
    module(embedding(tokens), tokens).backward()
    assert len({*module.parameters(), *embedding.parameters()}) == 1
    assert embedding.weight.grad.abs().sum() > 0
    both = copy.deepcopy(nn.ModuleList([embedding, module]))
    assert both[0].weight is both[1].weight


def test_the_module_says_what_it_is():
    module = LinearCrossEntropy(5, 9, label_smoothing=0.1)
    assert repr(module) == "LinearCrossEntropy(5, 9, bias=False, label_smoothing=0.1)"


@pytest.mark.parametrize(
    ("name", "cure"), [("weight", "class_weight="), ("accumulate", "an argument of the call")]
)
def test_an_option_that_the_module_lacks_raises(name, cure):
    with pytest.raises(ProgramError, match=f"no option '{name}'") as raised:
        LinearCrossEntropy(5, 9, **{name: 1})
    assert cure in str(raised.value)
