"""A solution of `examples/exercises/capped_entropy.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "V D"})
def capped_entropy(acc, cap=30.0):  # acc [M, V]
    z = L.softcap(acc, cap)
    e = L.exp(z - cap)
    total = L.row_sum(e)
    return z, L.log(total) + cap - L.row_sum(e * z) / total
