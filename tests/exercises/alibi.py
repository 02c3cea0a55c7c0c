"""A solution of `examples/exercises/alibi.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.block(shapes={"q": "M D", "k": "C D", "slope": "1 1"})
def alibi(q, k, slope):
    s = L.linear(q, k)
    i, j = L.row_index(s), L.column_index(s)
    s = L.where(j <= i, s - slope * (i - j), -1e4)
    return s, L.logsumexp(s)
