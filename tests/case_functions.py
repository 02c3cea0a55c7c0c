"""The cases of composed functions: activations, softmax and losses, norms, rotary embedding."""

import torch
import torch.nn.functional as F
from cases import case, normed_heads, rotated, rotated_pairs

from cadenza import lang as L

ACTIVATIONS = [
    case("relu", L.relu, F.relu),
    case("relu2", L.relu2, lambda x: F.relu(x).square()),
    case("silu", L.silu, F.silu),
    case("gelu", lambda x: L.gelu(x), F.gelu),
    case("gelu tanh", lambda x: L.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    case("softcap", lambda x: L.softcap(x, 1.5), lambda x: 1.5 * torch.tanh(x / 1.5)),
    case("swiglu", L.swiglu, lambda x: F.silu(x[:, :5]) * x[:, 5:], x="M 10"),
    case("geglu", lambda x: L.geglu(x), lambda x: F.gelu(x[:, :5]) * x[:, 5:], x="M 10"),
    case(
        "geglu tanh",
        lambda x: L.geglu(x, "tanh"),
        lambda x: F.gelu(x[:, :5], approximate="tanh") * x[:, 5:],
        x="M 10",
    ),
    case("reglu", L.reglu, lambda x: F.relu(x[:, :5]) * x[:, 5:], x="M 10"),
    case("sigmoid of halves", lambda x: L.split(x)[0] * L.sigmoid(L.split(x)[1]), F.glu, x="M 10"),
    case("softplus", lambda x: L.maximum(x, 0.0) + L.log(1.0 + L.exp(-L.abs(x))), F.softplus),
    case("mish", lambda x: x * L.tanh(L.log(1.0 + L.exp(x))), F.mish),
    case("leaky relu", lambda x: L.where(x > 0.0, x, 0.1 * x), lambda x: F.leaky_relu(x, 0.1)),
    case("elu", lambda x: L.where(x > 0.0, x, L.exp(x) - 1.0), F.elu),
    case(
        "hardtanh", lambda x: L.minimum(L.maximum(x, -0.7), 0.7), lambda x: F.hardtanh(x, -0.7, 0.7)
    ),
    case("softmax", lambda x: L.exp(x - L.logsumexp(x)), lambda x: F.softmax(x, 1)),
    case("softmax by hand", lambda x: L.exp(x) / L.row_sum(L.exp(x)), lambda x: F.softmax(x, 1)),
    case("log softmax", lambda x: x - L.logsumexp(x), lambda x: F.log_softmax(x, 1)),
    case(
        "cross entropy",
        lambda x, i: L.logsumexp(x, L.pick(x, i)),
        lambda x, i: F.cross_entropy(x, i[:, 0], reduction="none")[:, None],
        i="M 1 index 7",
    ),
    case(
        "cosine",
        lambda x, y: L.row_sum(x * y) * L.rsqrt(L.row_sum(x**2) * L.row_sum(y**2)),
        lambda x, y: F.cosine_similarity(x, y)[:, None],
    ),
]

NORMS = [
    case(
        "rms_norm",
        lambda x, w: L.rms_norm(x, w, 1e-3),
        lambda x, w: F.rms_norm(x, (7,), w[0], 1e-3),
        w="1 7",
    ),
    case(
        "rms_norm offset",
        lambda x, w: L.rms_norm(x, w, 1e-3, offset=1.0),
        lambda x, w: F.rms_norm(x, (7,), 1 + w[0], 1e-3),
        w="1 7",
    ),
    case(
        "rms_norm alone", lambda x: L.rms_norm(x, None), lambda x: F.rms_norm(x, (7,), None, 1e-6)
    ),
    case(
        "layer_norm",
        lambda x, w, b: L.layer_norm(x, w, b),
        lambda x, w, b: F.layer_norm(x, (7,), w[0], b[0]),
        w="1 7",
        b="1 7",
    ),
    case(
        "layer_norm no bias",
        lambda x, w: L.layer_norm(x, w, eps=1e-3),
        lambda x, w: F.layer_norm(x, (7,), w[0], eps=1e-3),
        w="1 7",
    ),
    case("layer_norm alone", lambda x: L.layer_norm(x, None), lambda x: F.layer_norm(x, (7,))),
    case(
        "qk_norm",
        lambda x, w: L.qk_norm(x, w, 5),
        lambda x, w: normed_heads(x, w, 5, 3, 1e-6),
        x="M 15",
        w="1 5",
    ),
    case(
        "qk_norm of two heads",
        lambda x, w: L.qk_norm(x, w, 5, heads=2, eps=1e-3),
        lambda x, w: normed_heads(x, w, 5, 2, 1e-3),
        x="M 15",
        w="1 5",
    ),
    case(
        "qk_norm weights of all",
        lambda x, w: L.qk_norm(x, w, 5, heads=2),
        lambda x, w: normed_heads(x, w, 5, 2, 1e-6),
        x="M 15",
        w="1 10",
    ),
    case(
        "rope",
        lambda x, cos, sin: L.rope(x, cos, sin, 6),
        lambda x, cos, sin: rotated(x, cos, sin, 6, 3),
        x="M 18",
        cos="M 3",
        sin="M 3",
    ),
    case(
        "rope of two heads",
        lambda x, cos, sin: L.rope(x, cos, sin, 6, heads=2),
        lambda x, cos, sin: rotated(x, cos, sin, 6, 2),
        x="M 18",
        cos="M 3",
        sin="M 3",
    ),
    case(
        "rope of some columns",
        lambda x, cos, sin: L.rope(x, cos, sin, 7, rotary_dim=4),
        lambda x, cos, sin: rotated(x, cos, sin, 7, 3),
        x="M 21",
        cos="M 2",
        sin="M 2",
    ),
    case(
        "rope of some columns of two heads",
        lambda x, cos, sin: L.rope(x, cos, sin, 7, heads=2, rotary_dim=4),
        lambda x, cos, sin: rotated(x, cos, sin, 7, 2),
        x="M 21",
        cos="M 2",
        sin="M 2",
    ),
    case(
        "rope of a half of two heads",
        lambda x, cos, sin: L.rope(x, cos, sin, 8, heads=2, rotary_dim=4),
        lambda x, cos, sin: rotated(x, cos, sin, 8, 2),
        x="M 24",
        cos="M 2",
        sin="M 2",
    ),
    case(
        "rope interleaved of a half",
        lambda x, cos, sin: L.rope(x, cos, sin, 8, rotary_dim=4, interleaved=True),
        lambda x, cos, sin: rotated_pairs(x, cos, sin, 8, 3),
        x="M 24",
        cos="M 2",
        sin="M 2",
    ),
    case(
        "rope interleaved",
        lambda x, cos, sin: L.rope(x, cos, sin, 6, interleaved=True),
        lambda x, cos, sin: rotated_pairs(x, cos, sin, 6, 3),
        x="M 18",
        cos="M 3",
        sin="M 3",
    ),
    case(
        "rope interleaved of some columns",
        lambda x, cos, sin: L.rope(x, cos, sin, 7, heads=2, rotary_dim=4, interleaved=True),
        lambda x, cos, sin: rotated_pairs(x, cos, sin, 7, 2),
        x="M 21",
        cos="M 2",
        sin="M 2",
    ),
]

FUNCTIONS = [*ACTIVATIONS, *NORMS]
