"""A solution of `examples/exercises/contrastive.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.block(shapes={"a": "M D", "b": "C D", "target": "M 1 int64", "temperature": "1 1"})
def contrastive(a, b, target, temperature):
    unit = a * L.rsqrt(L.row_sum(a**2))
    s = L.linear(unit, b) / temperature
    return L.logsumexp(s, L.pick(s, target))
