"""The cases of single operations: elementwise, over columns, reductions and products."""

import torch
import torch.nn.functional as F
from cases import case, declared, join_by_index, kept, largest_of_columns, picked, split_by_index
from philox import uniform

from cadenza import lang as L

ELEMENTWISE = [
    case("neg", lambda x: -x, torch.neg),
    case("pos", lambda x: x**1, lambda x: x.clone()),
    case("square", lambda x: x**2, torch.square),
    case("cube", lambda x: x**3, lambda x: x * x * x),
    case("inverse square", lambda x: x**-2, lambda x: 1 / (x * x), x="M 7 apart"),
    case("power 0", lambda x: x * x**0, lambda x: x.clone()),
    case("abs", lambda x: L.abs(x) + 0.5 * abs(x), lambda x: 1.5 * torch.abs(x)),
    case("exp", L.exp, torch.exp),
    case("log", L.log, torch.log, x="M 7 positive"),
    case("sqrt", L.sqrt, torch.sqrt, x="M 7 positive"),
    case("rsqrt", L.rsqrt, lambda x: x.pow(-0.5), x="M 7 positive"),
    case("sigmoid", L.sigmoid, lambda x: 1 / (1 + torch.exp(-x))),
    case("tanh", L.tanh, lambda x: 1 - 2 / (1 + torch.exp(2 * x))),
    case("erf", L.erf, torch.special.erf),
    case("maximum", lambda x, y: L.maximum(x, y), lambda x, y: torch.where(x > y, x, y)),
    case("minimum", lambda x, y: L.minimum(x, y), lambda x, y: torch.where(x < y, x, y)),
    case("add", lambda x, y: x + y, torch.add),
    case("sub", lambda x, y: x - y, torch.sub),
    case("mul", lambda x, y: x * y, torch.mul),
    case("div", lambda x, y: x / y, torch.div, y="M 7 apart"),
    case(
        "where less",
        lambda x, y: L.where(x < y, x, 3.0 * y),
        lambda x, y: torch.where(x.lt(y), x, 3 * y),
    ),
    case(
        "where greater",
        lambda x, y: L.where(x > y, x, 2.0),
        lambda x, y: torch.where(x.gt(y), x, 2.0),
    ),
    case(
        "where at most",
        lambda x, y: L.where(x <= y, 0.3, y),
        lambda x, y: torch.where(x.le(y), 0.3, y),
    ),
    case(
        "where at least",
        lambda x, y: L.where(x >= y, x, -y),
        lambda x, y: torch.where(x.ge(y), x, -y),
    ),
    case(
        "where equal",
        lambda x, i: L.where(i == 2, x, 3.0 * x),
        lambda x, i: torch.where(i.eq(2), x, 3 * x),
        i="M 1 index 4",
    ),
    case(
        "where other",
        lambda x, i: L.where(i != 2, x, 3.0 * x),
        lambda x, i: torch.where(i.ne(2), x, 3 * x),
        i="M 1 index 4",
    ),
    case(
        "where mask",
        lambda x, m: L.where(m, x, 0.0),
        lambda x, m: x.masked_fill(~m, 0.0),
        m="M 7 mask",
    ),
    case(
        "where constants",
        lambda x: L.where(x > 0.0, 0.1, 0.7) * x,
        lambda x: torch.where(x > 0, 0.1 * x, 0.7 * x),
    ),
    case(
        "and",
        lambda x, y: L.where((x < y) & (x > -0.5), x, y),
        lambda x, y: torch.where(torch.logical_and(x < y, x > -0.5), x, y),
    ),
    case(
        "or",
        lambda x, y: L.where((x < y) | (x > 0.5), x, y),
        lambda x, y: torch.where(torch.logical_or(x < y, x > 0.5), x, y),
    ),
    case(
        "not",
        lambda x, y: L.where(~(x < y), x, y),
        lambda x, y: torch.where(torch.logical_not(x < y), x, y),
    ),
    case("mask times x", lambda x, y: (x < y) * x, lambda x, y: torch.where(x < y, x, 0.0)),
    case("cast", lambda x: L.cast(L.tanh(x), "float64") * 2.0, lambda x: 2 * torch.tanh(x)),
    case("name", lambda x: L.name(x * 2.0, "double") + 1.0, lambda x: 2 * x + 1),
]

COLUMNS = [
    case("split", lambda x: L.split(x), lambda x: (x[:, :5], x[:, 5:]), x="M 10"),
    case("split of a column each", lambda x: L.split(x), lambda x: (x[:, :1], x[:, 1:]), x="M 2"),
    case("split pairs", lambda x: L.split(x, 1), lambda x: (x[:, ::2], x[:, 1::2]), x="M 10"),
    case("split part 0", lambda x: L.split(x, 3)[0], lambda x: split_by_index(x, 0, 3), x="M 18"),
    case("split part 1", lambda x: L.split(x, 3)[1], lambda x: split_by_index(x, 1, 3), x="M 18"),
    case("join", lambda x, y: L.join(x, y), lambda x, y: torch.cat([x, y], 1)),
    case(
        "join pairs", lambda x, y: L.join(x, y, 1), lambda x, y: torch.stack([x, y], 2).flatten(1)
    ),
    case(
        "join threes",
        lambda x, y: L.join(x, y, 3),
        lambda x, y: join_by_index(x, y, 3),
        x="M 9",
        y="M 9",
    ),
    case("columns", lambda x: L.columns(x, 2, 5), lambda x: x[:, 2:5]),
    case(
        "columns but one",
        lambda x: (L.columns(x, 0, 6), L.columns(x, 1, 7)),
        lambda x: (x[:, :-1], x[:, 1:]),
    ),
    case("columns twice", lambda x: L.columns(L.columns(x, 1, 6), 2, 4), lambda x: x[:, 3:5]),
    case(
        "concat",
        lambda x, y, z: L.concat(x, y, z),
        lambda x, y, z: torch.hstack([x, y, z]),
        y="M 3",
        z="M 1",
    ),
    case(
        "concat of parts",
        lambda x: L.concat(L.columns(x, 3, 7), L.columns(x, 0, 3)),
        lambda x: x.roll(-3, 1),
    ),
    case("concat with a number", lambda x: L.concat(x, 0.1), lambda x: F.pad(x, (0, 1), value=0.1)),
    case("repeat", lambda x: L.repeat(x, 3), lambda x: x.repeat_interleave(3, 1)),
    case("tile", lambda x: L.tile(x, 3), lambda x: torch.hstack([x, x, x])),
    case(
        "column_index",
        lambda x: x + 0.1 * L.column_index(x),
        lambda x: x + 0.1 * torch.arange(7.0, dtype=x.dtype),
    ),
    case("row_index", lambda x: x * L.row_index(x), lambda x: x * torch.arange(len(x))[:, None]),
    case(
        "random", lambda x: x * L.random(x, 2**40 + 5), lambda x: x * uniform(2**40 + 5, *x.shape)
    ),
    case("dropout", lambda x: L.dropout(x, 0.3, 7), lambda x: kept(x, 0.3, 7)),
]

REDUCTIONS = [
    case("row_sum", L.row_sum, lambda x: x @ x.new_ones(7, 1)),
    case("row_mean", L.row_mean, lambda x: x.mean(1, keepdim=True)),
    case("row_max", L.row_max, lambda x: x.amax(1, keepdim=True)),
    case("row_variance", L.row_variance, lambda x: (x**2).mean(1, True) - x.mean(1, True) ** 2),
    case("logsumexp", lambda x: L.logsumexp(x), lambda x: torch.logsumexp(x, 1, keepdim=True)),
    case(
        "logsumexp after a shift",
        lambda x, c: L.logsumexp(x, c),
        lambda x, c: x.logsumexp(1, keepdim=True) - c,
        c="M 1",
    ),
    case(
        "logsumexp after a shift of all",
        lambda x, c: L.logsumexp(x, c),
        lambda x, c: x.logsumexp(1, keepdim=True) - c,
        c="1 1",
    ),
    case(
        "logsumexp of a shifted row",
        lambda x, r, c: x + L.logsumexp(r, c),
        lambda x, r, c: x + r.logsumexp(1, keepdim=True) - c,
        r="1 5",
        c="M 1",
    ),
    case("column_sum", L.column_sum, lambda x: x.new_ones(1, len(x)) @ x),
    case("column_max", L.column_max, largest_of_columns),
    case(
        "group_sum", lambda x: L.group_sum(x, 3), lambda x: x.unflatten(1, (3, 3)).sum(2), x="M 9"
    ),
    case(
        "group_max", lambda x: L.group_max(x, 3), lambda x: x.unflatten(1, (3, 3)).amax(2), x="M 9"
    ),
    case("group of all", lambda x: L.group_sum(x, 7), lambda x: x.sum(1, keepdim=True)),
    case("pick", lambda x, i: L.pick(x, i), lambda x, i: x.gather(1, i), i="M 1 index 7"),
    case(
        "pick none", lambda x, i: L.pick(x, i - 2), lambda x, i: picked(x, i - 2), i="M 1 index 12"
    ),
    case(
        "sums of a column",
        lambda x, c: x * L.row_sum(c) + L.column_sum(c),
        lambda x, c: x * c + c.sum(),
        c="M 1",
    ),
    case(
        "sums of a row",
        lambda x, r: x * L.column_sum(r) + L.row_sum(r),
        lambda x, r: x * r + r.sum(),
        r="1 7",
    ),
    case("largest of a row", lambda x, r: x * L.row_max(r), lambda x, r: x * r.amax(), r="1 7"),
    case("largest of a column", lambda x, c: x + L.row_max(c), lambda x, c: x + c, c="M 1"),
]

PRODUCTS = [
    case("linear", lambda x, w: L.linear(x, w), F.linear, w="5 7"),
    case(
        "linear with bias", lambda x, w, bias: L.linear(x, w, bias), F.linear, w="5 7", bias="1 5"
    ),
    case("linear operator", lambda x, w: x @ w, torch.mm, w="7 5"),
    case("stored", lambda x, w: L.stored(x @ w) * 2.0, lambda x, w: 2 * x @ w, w="7 5"),
    case("matmul", lambda x, w: L.matmul(x, w), torch.mm, w="7 5"),
    case(
        "matmul transpose b",
        lambda x, w: L.matmul(x, w, transpose_b=True),
        lambda x, w: x @ w.T,
        w="5 7",
    ),
    declared(
        "matmul transpose a",
        lambda x, y: L.matmul(x, y, transpose_a=True),
        lambda x, y: x.T @ y,
        y="M 3",
    ),
    declared(
        "matmul transpose both",
        lambda x, w: L.matmul(L.matmul(x, x, True), w, True, True),
        lambda x, w: (x.T @ x).T @ w.T,
        w="5 7",
    ),
    declared(
        "matmul of a column",
        lambda x, c: L.matmul(c, x, transpose_a=True),
        lambda x, c: (c * x).sum(0, True),
        c="M 1",
    ),
    case("transpose of a row", lambda x, r: x @ r.T, lambda x, r: (x * r).sum(1, True), r="1 7"),
    case(
        "transpose of a column", lambda x, w: x * L.row_sum(w).T, lambda x, w: x * w.sum(1), w="7 5"
    ),
]

OPERATIONS = [*ELEMENTWISE, *COLUMNS, *REDUCTIONS, *PRODUCTS]
