"""The program of a layer of Hugging Face's models, from its attention's output to its end."""

from __future__ import annotations

from cadenza.library import programs
from cadenza.library.function import block

WEIGHTS = {
    "w_output": "D A", "b_output": "1 D", "w_up": "U D", "b_up": "1 U", "w_down": "D F",
    "b_down": "1 D", "norm_weight": "1 D", "norm_bias": "1 D", "attention_norm": "1 D",
    "feed_forward_norm": "1 D",
}  # fmt: skip


@block(shapes={"x": "M D", "y": "M A", **WEIGHTS, "seed": "1 1", "feed_forward_seed": "1 1"})
def layer_end(x, y, w_output, w_up, w_down, *, b_output=None, b_up=None, b_down=None,
              norm_weight=None, norm_bias=None, attention_norm=None, feed_forward_norm=None,
              seed=None, feed_forward_seed=None, activation="swiglu", norm=None, norm_offset=0.0,
              eps=1e-5, dropout=0.0):  # fmt: skip
    """`cz.ops.decoder_block` without the sums of squares: these models hand on the stream alone.

    An output that nobody reads would still cost its share of backward.
    """
    return programs.decoder_block.function(
        x, y, w_output, w_up, w_down, b_output=b_output, b_up=b_up, b_down=b_down,
        norm_weight=norm_weight, norm_bias=norm_bias, attention_norm=attention_norm,
        feed_forward_norm=feed_forward_norm, seed=seed, feed_forward_seed=feed_forward_seed,
        activation=activation, norm=norm, norm_offset=norm_offset, eps=eps, dropout=dropout,
    )[0]  # fmt: skip
