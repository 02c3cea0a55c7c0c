"""What decoder layers are made of, as data: which submodules there are, and what each is for.

A form is recognised by the names of a layer's submodules, all of them; what they compute is found
by running them. No name of a model and no version stands here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """Names of a layer's parts. Projections and dropouts are paths from the layer.

    - norms: (before attention, after it, before the feed-forward, after it), None where there is
      none.
    - projections: those of queries, keys and values, or the one that has all of them in its rows.
    - up: those of gate and up, or the one that has both in its rows, or a plain one.
    - head_norms: optional norms of queries and keys.
    - dropouts: behind attention's output and behind the feed-forward, where there are any.
    """

    norms: tuple[str | None, str | None, str | None, str | None]
    attention: str
    projections: tuple[str, ...]
    output: str
    feed_forward: str
    up: tuple[str, ...]
    down: str
    activation: str
    head_norms: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    rotary: bool = True

    @property
    def before_attention(self) -> str | None:
        """The norm of attention's input."""
        return self.norms[0]

    @property
    def after_attention(self) -> str | None:
        """The norm of attention's output."""
        return self.norms[1]

    @property
    def before_feed_forward(self) -> str | None:
        """The norm of the feed-forward's input."""
        return self.norms[2]

    @property
    def after_feed_forward(self) -> str | None:
        """The norm of the feed-forward's output."""
        return self.norms[3]

    def drops_inside(self, place: int) -> bool:
        """Whether that dropout stands inside attention or the feed-forward, not in the layer."""
        return bool(self.dropouts) and "." in self.dropouts[place]

    def parts(self) -> set[str]:
        """Paths of all submodules that a layer of this form may have, without its optional ones."""
        listed = {name for name in self.norms if name}
        listed |= {self.attention, self.feed_forward, self.output, self.down, self.activation}
        return listed | {*self.projections, *self.up, *self.dropouts}

    def optional(self) -> set[str]:
        """Paths of the submodules that it may have besides."""
        return {*self.head_norms, *self.other}


def _separate(*norms: str | None) -> Form:
    """Llama's projections, with norms in four places."""
    return Form(
        norms=norms,
        attention="self_attn",
        projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.o_proj",
        feed_forward="mlp",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        activation="mlp.act_fn",
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    )


FORMS = (
    _separate("input_layernorm", None, "post_attention_layernorm", None),
    _separate(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    _separate(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    Form(
        norms=("input_layernorm", None, "post_attention_layernorm", None),
        attention="self_attn",
        projections=("self_attn.qkv_proj",),
        output="self_attn.o_proj",
        feed_forward="mlp",
        up=("mlp.gate_up_proj",),
        down="mlp.down_proj",
        activation="mlp.activation_fn",
        dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
    ),
    Form(
        norms=("ln_1", None, "ln_2", None),
        attention="attn",
        projections=("attn.c_attn",),
        output="attn.c_proj",
        feed_forward="mlp",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        activation="mlp.act",
        dropouts=("attn.resid_dropout", "mlp.dropout"),
        other=("attn.attn_dropout",),
        rotary=False,
    ),
)
