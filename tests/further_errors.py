"""Causes of errors for docs/errors.md that no list of the tests holds: what takes more than a line.

Rows of FURTHER begin with a function that raises; rows of ENVIRONMENTS are code as it reads, what
must be so meanwhile, and a function that raises then.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import test_accumulate
import torch
from messages import tensor
from test_call_errors import R, W, X, doubled, normed
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import cadenza as cz
from cadenza import backends
from cadenza import lang as L
from cadenza.backends.triton.tuning import choices
from cadenza.core.parse import parse

accumulate_weight_gradient = test_accumulate.accumulate_weight_gradient


def value_of_another_call():
    kept = []
    cz.block(lambda x: kept.append(x) or x)(X)
    cz.block(lambda x: x * kept[0])(X)


def second_derivative():
    r = R.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(normed(X, W, rstd=r).square().sum(), r, create_graph=True)
    gradient.sum().backward()


def second_derivative_of_a_loss():
    x, w, target = tensor(3, 8).requires_grad_(), tensor(9, 8), torch.arange(3)
    loss = cz.ops.linear_cross_entropy(x, w, target)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()


def forward_mode():
    torch.func.jvp(lambda x: doubled(x, 2.0), (X,), (X,))


def gradient_of_a_function():
    torch.func.grad(lambda x: doubled(x, 2.0).sum())(X)


def freed_memory():
    weight = W.clone()
    weight.untyped_storage().resize_(0)
    normed(X, weight, rstd=R)


def hook_inside_of_a_layer():
    layer = cz.nn.FeedForward(8, 12)
    layer.gate_proj.register_forward_hook(print)
    layer(X)


def feed_forward_that_adds():
    layer = cz.nn.DecoderLayer(8, 2, 1, 12)
    layer.mlp = cz.nn.FeedForward(8, 12, skip=True)
    layer(tensor(1, 5, 8))


def norm_of_another_eps():
    layer = cz.nn.DecoderLayer(8, 2, 1, 12, architecture="qwen3")
    layer.self_attn.q_norm = cz.nn.RMSNorm(4, eps=0.5)
    layer(tensor(1, 5, 8))


def output_norm_of_another_eps():
    cz.nn.Linear(8, 9, norm=cz.nn.RMSNorm(8), output_norm=cz.nn.RMSNorm(9, eps=0.5))


FURTHER = [
    (lambda: cz.block(3),),
    (lambda: cz.epilogue(lambda: 1.0),),
    (lambda: L.row_sum(tensor(2, 3, 8)),),
    (lambda: L.where(X, X, 0.0),),
    (lambda: L.cast(X, torch.int8),),
    (lambda: cz.ops.linear(X, W, softcap=-1.0),),
    (lambda: cz.ops.linear(X, W, residual=1.0),),
    (lambda: cz.ops.qkv_projection(X, W, head_dim=4, heads=1, interleaved="no"),),
    (lambda: cz.ops.packed_positions(torch.tensor([0.0, 5.0]), 5),),
    (lambda: cz.ops.qkv_projection(X, W, head_dim=4, heads=1, interleaved=True),),
    (lambda: cz.nn.LinearCrossEntropy(8, 9, weight=1.0),),
    (hook_inside_of_a_layer,),
    (feed_forward_that_adds,),
    (norm_of_another_eps,),
    (output_norm_of_another_eps,),
    (lambda: cz.nn.Linear(8, 9, softcap="much"),),
    (lambda: accumulate_weight_gradient(W, X.to("meta"), tensor(5, 12)),),
    (value_of_another_call,),
    (second_derivative,),
    (second_derivative_of_a_loss,),
    (forward_mode,),
    (gradient_of_a_function,),
    (freed_memory,),
    (lambda: parse("def f(x: float32[M, 4]): return sinus(x)"),),
    (lambda: doubled(X, 2.0, backend="tritn"),),
]


@contextmanager
def one_process() -> Iterator[None]:
    """A group of this process alone, over which tensors can be sharded."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def sharded_weight():
    """A call with a weight that is a shard."""
    mesh = init_device_mesh("cpu", (1,))
    normed(X, distribute_tensor(W, mesh, [Shard(0)]), rstd=R)


def without_triton():
    """As where the package is not installed."""
    return mock.patch.object(backends, "has_triton", return_value=False)


def variable(**values: str) -> partial:
    """An environment with some variables."""
    return partial(mock.patch.dict, os.environ, **values)


def by_triton():
    """A call that asks for Triton."""
    doubled(X, 2.0, backend="triton")


ENVIRONMENTS = [
    ("normed(X, distribute_tensor(W, mesh, [Shard(0)]), rstd=R)", one_process, sharded_weight),
    ("CADENZA_BACKEND=tritn", variable(CADENZA_BACKEND="tritn"), lambda: doubled(X, 2.0)),
    ("CADENZA_TUNE=on", variable(CADENZA_TUNE="on"), choices.mode),
    ('doubled(X, 2.0, backend="triton")  # without the package triton', without_triton, by_triton),
    ('doubled(X, 2.0, backend="triton")  # X on a CPU', variable(TRITON_INTERPRET="0"), by_triton),
]
