"""The residual stream of one layer's call, and the branches that are added to it.

A layer's own code runs on these in place of tensors: norms, projections and sums are written down,
and done by one program where a branch meets the stream. Anything else that code does with them
raises, so what is not understood is never computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.integrations.hf.programs import layer_end
from cadenza.library import programs
from cadenza.library.nn.linear import drawn_seed

if TYPE_CHECKING:
    from cadenza.integrations.hf.run import Run


class Stream:
    """The residual stream `[..., D]`: a tensor, or another stream and the branch to be added."""

    def __init__(self, tensor: Tensor | None, before: Any = None, branch: Any = None) -> None:
        self.known, self.before, self.branch = tensor, before, branch

    @property
    def tensor(self) -> Tensor:
        """The stream as a tensor, computed when it is first asked for."""
        if self.known is None:
            self.known = self.branch.onto(self.before)
        return self.known

    @property
    def shape(self) -> torch.Size:
        """As the tensor's; what is added has the same."""
        return self.tensor.shape if self.before is None else self.before.shape

    def __add__(self, branch: Any) -> Stream:
        if not isinstance(branch, Done | Output | FeedForward):
            return NotImplemented
        return Stream(None, self, branch)


class _Branch:
    """What is added to a stream, from either side."""

    def __add__(self, stream: Any) -> Stream:
        return stream + self if isinstance(stream, Stream) else NotImplemented


class Normed:
    """A stream under the norm at a path, not computed: the program that takes it begins with it."""

    def __init__(self, stream: Stream, path: str) -> None:
        self.stream, self.path = stream, path


class Done(_Branch):
    """A branch that the model's own modules computed, `[..., D]`."""

    def __init__(self, run: Run, value: Tensor) -> None:
        self.run, self.value = run, value

    def under(self, path: str) -> Done:
        """The branch by the norm, or the dropout, at a path."""
        return Done(self.run, self.run.module(path)(self.value))

    dropped = under

    def onto(self, stream: Stream) -> Tensor:
        """The stream with the branch added."""
        return stream.tensor + self.value


class Output(_Branch):
    """Attention's branch before its output projection: y `[..., A]`."""

    def __init__(self, run: Run, y: Tensor) -> None:
        self.run, self.y, self.norm = run, y, None
        self.dropout = run.dropout(0) if run.plan.form.drops_inside(0) else 0.0

    def under(self, path: str) -> Output:
        """The branch under a norm behind the projection."""
        self.norm = path
        return self

    def dropped(self, path: str) -> Output:
        """The branch behind a dropout."""
        self.dropout = self.run.dropout(0)
        return self

    def onto(self, stream: Stream) -> Tensor:
        """The stream with the branch added."""
        run, x = self.run, stream.tensor
        w, bias = run.weights.projection(run.plan.form.output)
        given = {} if self.norm is None else {"output_norm": run.weights.norm(self.norm)[0]}
        return run.call(
            programs.linear, self.y, w, bias, residual=x, **given, **run.numbers(),
            **_dropping(x, self.dropout, "seed"),
        )  # fmt: skip


class FeedForward(_Branch):
    """The feed-forward's branch, before anything of it is computed."""

    def __init__(self, run: Run, source: Stream | Normed) -> None:
        self.run, self.norm = run, None
        self.stem = source.path if isinstance(source, Normed) else None
        self.source = source.stream if isinstance(source, Normed) else source
        self.dropout = run.dropout(1) if run.plan.form.drops_inside(1) else 0.0

    under = Output.under

    def dropped(self, path: str) -> FeedForward:
        """The branch behind a dropout."""
        self.dropout = self.run.dropout(1)
        return self

    def operands(self) -> dict[str, Any]:
        """What the programs take of the feed-forward and of the norms before and after it."""
        run, form = self.run, self.run.plan.form
        w_up, b_up = run.weights.projection(*form.up)
        w_down, b_down = run.weights.projection(form.down)
        found = {"w_up": w_up, "b_up": b_up, "w_down": w_down, "b_down": b_down}
        found |= {"activation": run.plan.activation, **run.numbers(), **run.stem(self.stem)}
        return found

    def onto(self, stream: Stream) -> Tensor:
        """The stream with the branch added, and with attention's, if that is not done yet."""
        if stream is not self.source:
            raise TypeError("the feed-forward is added to another stream than it was computed of")
        run, branch = self.run, stream.branch
        norm = None if self.norm is None else run.weights.norm(self.norm)[0]
        if stream.known is None and isinstance(branch, Output) and branch.dropout == self.dropout:
            return self._with(branch, stream.before.tensor, norm)
        x = stream.tensor
        return run.call(
            programs.feed_forward, x, **self.operands(), output_norm=norm, skip=True,
            **_dropping(x, self.dropout, "seed"),
        )  # fmt: skip

    def _with(self, branch: Output, x: Tensor, norm: Tensor | None) -> Tensor:
        run = self.run
        w, bias = run.weights.projection(run.plan.form.output)
        attention_norm = None if branch.norm is None else run.weights.norm(branch.norm)[0]
        return run.call(
            layer_end, x, branch.y, w, b_output=bias, **self.operands(),
            attention_norm=attention_norm, feed_forward_norm=norm,
            **_dropping(x, self.dropout, "seed", "feed_forward_seed"),
        )  # fmt: skip


def _dropping(x: Tensor, dropout: float, *seeds: str) -> dict[str, Any]:
    """The options of a program that drops, nothing for one that doesn't."""
    return {"dropout": dropout, **{seed: drawn_seed(x) for seed in seeds}} if dropout else {}
