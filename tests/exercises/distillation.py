"""A solution of `examples/exercises/distillation.py`."""

import cadenza as cz
from cadenza import lang as L


@cz.epilogue(shapes={"x": "M D", "w": "V D", "teacher": "M V"})
def distillation(acc, teacher):  # acc and teacher [M, V]
    apart = L.exp(teacher) * (teacher - acc)
    return L.row_sum(apart) + L.logsumexp(acc)
