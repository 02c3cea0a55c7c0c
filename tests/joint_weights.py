"""A layer of `cz.nn`, a step of it, and what of its weights is copied or lies together."""

import torch
from test_layers import tables_of
from torch.utils._python_dispatch import TorchDispatchMode

import cadenza as cz
from cadenza.library.nn.joint import Joint
from cadenza.library.weights import is_one_stretch

COPYING = ("cat", "clone", "contiguous", "copy_", "_to_copy", "stack")
WIDTH, FEED_FORWARD = 32, 40
COLUMNS = (4 + 2 * 2) * 6


class Copies(TorchDispatchMode):
    """The shapes of matrices of `width` columns that torch copies, of `rows` rows and more."""

    def __init__(self, width=WIDTH, rows=12):
        super().__init__()
        self.width, self.rows, self.found = width, rows, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in COPYING:
            shape = tuple(result.shape)
            if len(shape) == 2 and shape[1] == self.width and shape[0] >= self.rows:
                self.found.append(shape)
        return result


def layer(make="llama", dtype=torch.float32):
    torch.manual_seed(5)
    return cz.nn.DecoderLayer(WIDTH, 4, 2, FEED_FORWARD, architecture=make, head_dim=6).to(dtype)


def given(make="llama", dtype=torch.float32):
    """A layer's arguments: three dimensions, so that no activation looks like a weight."""
    x = torch.randn(2, 5, WIDTH, dtype=dtype, requires_grad=True)
    tables = tables_of(make, 2, 5) or ()
    return x, None, *(table.to(dtype) for table in tables)


def step(module, *inputs):
    """Forward and backward of a layer."""
    stream, squares = module(*inputs)
    (stream.square().sum() + squares.sum()).backward()
    return stream


def joint(module):
    """What of a module may lie in one storage."""
    return [
        group for part in module.modules() if isinstance(part, Joint) for group in part.groups()
    ]


def together(module):
    """Whether all weights of one product lie so; False for none at all."""
    groups = [group for group in joint(module) if len(group) > 1]
    return bool(groups) and all(map(is_one_stretch, groups))


def apart(module):
    """The same module, each parameter in memory of its own."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    assert not together(module)
    return module
