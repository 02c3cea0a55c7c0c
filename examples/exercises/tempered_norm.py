"""Exercise: LayerNorm with a learned temperature, before a product.

h = ((x − mean) / √(variance + 1e-5) · gain + bias) / temperature, y = h · wᵀ.

x [M, D], gain and bias [D], temperature one number, w [N, D]; returns y [M, N]. All have gradients.
Nothing about kernels has to be decided here: write the formula, and see with `cadenza explain`
which factors leave the product.
"""

import torch.nn.functional as F

import cadenza as cz
from cadenza import lang as L


def tempered_norm_reference(x, gain, bias, temperature, w):
    """What it should be, in PyTorch."""
    h = F.layer_norm(x, x.shape[1:], gain, bias)
    return F.linear(h / temperature, w)


@cz.block(shapes={"x": "M D", "gain": "1 D", "bias": "1 D", "temperature": "1 1", "w": "N D"})
def tempered_norm(x, gain, bias, temperature, w):
    raise NotImplementedError
