"""A function run in two processes that meet by gloo on the CPU, and models that are trained so.

Each rank has half of the sequences. What a function finds, it leaves in a folder by torch.save.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cadenza as cz
from cadenza.library.models import LlamaConfig

Function = Callable[[int, Path], None]
WORLD, STEPS, PARTS = 2, 3, 2
CONFIG = LlamaConfig(
    vocabulary=61, width=24, layers=2, heads=4, key_value_heads=2, feed_forward=40, context=16
)


def both(function: Function, folder: Path) -> None:
    """Runs a function of a module, given rank and folder, in two processes to their end."""
    torch.multiprocessing.spawn(_joined, (function, folder), nprocs=WORLD)


def _joined(rank: int, function: Function, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / function.__name__}.meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    try:
        function(rank, folder)
    finally:
        dist.destroy_process_group()


# --- models ---------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """A small Llama whose loss is the sum over tokens over a number of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.llama = cz.models.Llama(CONFIG).double()
        self.head = cz.nn.LinearCrossEntropy(CONFIG.width, CONFIG.vocabulary)
        self.head.weight = self.llama.lm_head.weight

    def forward(self, tokens: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        x = self.llama.model(tokens[:, :-1])
        return self.head(x, tokens[:, 1:], num_items_in_batch=number)


def batch(step: int) -> torch.Tensor:
    """Tokens of 8 sequences, of which two processes take 4 each, in two parts of 2."""
    return torch.randint(61, (8, 9), generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, rank: int | None) -> None:
    """Steps of SGD, with the gradients of two parts added up; all sequences where rank is None."""
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.5)
    for step in range(STEPS):
        tokens = batch(step)
        number = torch.tensor(tokens[:, 1:].numel())
        own = tokens if rank is None else tokens.chunk(WORLD)[rank]
        share = 1 if rank is None else WORLD  # wrappers take the mean over processes
        optimizer.zero_grad()
        for part in own.chunk(PARTS):
            (share * model(part, number)).backward()
        optimizer.step()


def in_one_process() -> dict[str, torch.Tensor]:
    """The parameters after the same steps without any wrapper."""
    model = WithLoss()
    trained(model, None)
    return model.state_dict()


def replicated(rank: int, folder: Path) -> None:
    """Training under DistributedDataParallel."""
    model = WithLoss()
    trained(DistributedDataParallel(model), rank)
    torch.save(model.state_dict(), folder / f"replicated{rank}")


def sharded(rank: int, folder: Path) -> None:
    """Training under fully_shard, layers resharded after forward, one of them checkpointed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    model, mesh = WithLoss(), init_device_mesh("cpu", (WORLD,))
    for layer in model.llama.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    first, forward = model.llama.model.layers[0], type(model.llama.model.layers[0]).forward
    first.forward = lambda *given: checkpoint(forward, first, *given, use_reentrant=False)
    trained(model, rank)
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    torch.save(full, folder / f"sharded{rank}")
