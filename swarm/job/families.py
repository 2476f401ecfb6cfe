"""Model families: one row per family, with all that the swarm must know of it. No torch.

A family whose model is "embedding, layers, norm, head" is one more row of FAMILIES. The job file, the cut, the estimate
of memory, the model folder and the stage all read this table; swarm.model.families looks up the library's classes by
the names given here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

Fields: TypeAlias = dict[str, tuple[type, Any]]

HEAD = "lm_head.weight"  # in every family
DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a decoder layer: what comes out of it and what goes in, and the field that gives it a bias.

    Widths are d (of the model), q (all queries), k (all keys), a (3 d) and i (inside the MLP).
    """

    name: str
    out: str
    into: str = "d"
    bias: str = ""  # "always", or a field of the config; empty: never


def _gated(queries_bias: str = "", attention_bias: str = "", mlp_bias: str = "") -> tuple[Matrix, ...]:
    """The matrices of a layer of Llama and its like."""
    return (
        *(Matrix(f"self_attn.{one}_proj", out, bias=queries_bias) for one, out in (("q", "q"), ("k", "k"), ("v", "k"))),
        Matrix("self_attn.o_proj", "d", "q", attention_bias),
        Matrix("mlp.gate_proj", "i", bias=mlp_bias),
        Matrix("mlp.up_proj", "i", bias=mlp_bias),
        Matrix("mlp.down_proj", "d", "i", mlp_bias),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """A family: the keys that a job file may give, the cost of a layer, and the library's names for its parts."""

    # Of the Hugging Face config, those that shape the model: type and default (None: derived, or absent). Dropout is 0
    # here, whatever the library's default; a pretrained config.json that does not name its dropout has the library's.
    fields: Fields
    library: str  # what the names of the library's classes begin with
    activation: str = "hidden_act"  # the field that names it
    least_positions: int = 2048  # max_position_embeddings unless the sequences are longer
    own_names: dict[str, str] = field(default_factory=dict)  # where the family's config.json differs from all others
    head_dim: int | None = None  # the library's default; None: width / heads
    may_omit_pairs: bool = False  # a config.json without num_key_value_heads means as many as heads
    dropout: float = 0.0  # the library's default
    whole_heads: bool = False  # the library insists that width is a multiple of heads, even where head_dim is given
    alternates: bool = False  # every other layer has a window, unless layer_types says otherwise
    # A layer's parameters.
    matrices: tuple[Matrix, ...] = _gated()
    into_first: bool = False  # matrices are kept the other way round: what goes in comes first
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: tuple[str, ...] = ()  # of the width of a head
    # Cost of a layer.
    saved_attention: float = 2.25  # elements that autograd saves per element of q + 2 kv: more where more is normed
    saved_inner: float = 4.0  # and per element of the MLP's width
    attention: str = "sdpa"
    # The library's classes, without what all begin with.
    causal_model: str = "ForCausalLM"
    layer: str = "DecoderLayer"
    norm: str = "RMSNorm"  # empty: torch's LayerNorm
    rotary: str = "RotaryEmbedding"  # empty: positions are learned, and belong to the first stage
    scaled_embedding: str = ""  # empty: torch's Embedding
    # Where the parts sit in the model, and what the config calls what they need.
    trunk: str = "model"
    embedding: str = "embed_tokens"
    positions: str = "wpe"
    layers: str = "layers"
    final_norm: str = "norm"
    head_in_files: str = HEAD  # what files of the library call the head
    norm_eps: str = "rms_norm_eps"
    embedding_dropout: str = ""  # the config's field; empty: none
    # How parameters start.
    padded: bool = True  # the embedding of pad_token_id is zero and stays so
    norm_start: float = 1.0
    residual: str = ""  # matrices whose name ends so start smaller by sqrt(2 x layers)

    @property
    def architecture(self) -> str:
        """The library's name of the whole model, as in config.json."""
        return f"{self.library}{self.causal_model}"

    @property
    def embedding_name(self) -> str:
        return f"{self.trunk}.{self.embedding}.weight"

    @property
    def learns_positions(self) -> bool:
        """Whether positions are parameters, so that their number is part of the model's shape."""
        return not self.rotary


_BASE: Fields = {
    "vocab_size": (int, None),
    "hidden_size": (int, 4096),
    "num_hidden_layers": (int, None),
    "num_attention_heads": (int, 32),
    "max_position_embeddings": (int, None),
    "initializer_range": (float, 0.02),
    "tie_word_embeddings": (bool, False),
    "bos_token_id": (int, None),  # both: the tokenizer's end of text
    "eos_token_id": (int, None),
    "pad_token_id": (int, None),
}
_GATED: Fields = _BASE | {
    "intermediate_size": (int, 11008),
    "num_key_value_heads": (int, None),
    "hidden_act": (str, "silu"),
    "rms_norm_eps": (float, 1e-6),
    "rope_theta": (float, 10000.0),
    "attention_dropout": (float, 0.0),
}
_WINDOW: Fields = {"sliding_window": (int, 4096)}
_QWEN2: Fields = (
    _GATED
    | _WINDOW
    | {"intermediate_size": (int, 22016), "use_sliding_window": (bool, False), "max_window_layers": (int, 28)}
)
_GEMMA2: Fields = (
    {key: value for key, value in _GATED.items() if key != "hidden_act"}
    | _WINDOW
    | {
        "hidden_size": (int, 2304),
        "intermediate_size": (int, 9216),
        "num_attention_heads": (int, 8),
        "head_dim": (int, None),
        "hidden_activation": (str, "gelu_pytorch_tanh"),
        "attention_bias": (bool, False),
        "tie_word_embeddings": (bool, True),
        "query_pre_attn_scalar": (int, None),
        "attn_logit_softcapping": (float, 50.0),
        "final_logit_softcapping": (float, 30.0),
    }
)
_GPT2: Fields = _BASE | {
    "hidden_size": (int, 768),
    "num_attention_heads": (int, 12),
    "n_inner": (int, None),
    "activation_function": (str, "gelu_new"),
    "layer_norm_epsilon": (float, 1e-5),
    "scale_attn_weights": (bool, True),
    "scale_attn_by_inverse_layer_idx": (bool, False),
    "resid_pdrop": (float, 0.0),
    "embd_pdrop": (float, 0.0),
    "attn_pdrop": (float, 0.0),
    "tie_word_embeddings": (bool, True),
}
_GPT_NEOX: Fields = _BASE | {
    "hidden_size": (int, 6144),
    "intermediate_size": (int, 24576),
    "num_attention_heads": (int, 64),
    "hidden_act": (str, "gelu"),
    "layer_norm_eps": (float, 1e-5),
    "rotary_pct": (float, 0.25),
    "rotary_emb_base": (float, 10000.0),
    "use_parallel_residual": (bool, True),
    "attention_bias": (bool, True),
    "attention_dropout": (float, 0.0),
    "hidden_dropout": (float, 0.0),
}
# Layer norms with bias and an MLP without a gate, as before Llama.
_Plain = partial(Family, norm="", padded=False)
FAMILIES = {
    "llama": Family(
        _GATED | {"head_dim": (int, None), "attention_bias": (bool, False), "mlp_bias": (bool, False)},
        "Llama",
        may_omit_pairs=True,
        whole_heads=True,
        matrices=_gated("attention_bias", "attention_bias", "mlp_bias"),
    ),
    "mistral": Family(_GATED | _WINDOW | {"intermediate_size": (int, 14336), "head_dim": (int, None)}, "Mistral"),
    "qwen2": Family(_QWEN2, "Qwen2", matrices=_gated("always")),
    "qwen3": Family(
        _QWEN2 | {"head_dim": (int, None), "attention_bias": (bool, False)},
        "Qwen3",
        head_dim=128,
        matrices=_gated("attention_bias", "attention_bias"),
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        saved_attention=4.0,
    ),
    # Eager attention as in Transformers: sdpa cannot cap the scores. The norms multiply by 1 + weight.
    "gemma2": Family(
        _GEMMA2,
        "Gemma2",
        activation="hidden_activation",
        head_dim=256,
        whole_heads=True,
        alternates=True,
        matrices=_gated("attention_bias", "attention_bias"),
        layer_norms=(
            *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
        saved_attention=5.0,
        attention="eager",
        scaled_embedding="TextScaledWordEmbedding",
        norm_start=0.0,
    ),
    "gpt2": _Plain(
        _GPT2,
        "GPT2",
        activation="activation_function",
        least_positions=1024,
        own_names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        dropout=0.1,
        matrices=(
            Matrix("attn.c_attn", "a", "d", "always"),
            Matrix("attn.c_proj", "d", "d", "always"),
            Matrix("mlp.c_fc", "i", "d", "always"),
            Matrix("mlp.c_proj", "d", "i", "always"),
        ),
        into_first=True,
        layer_norms=("ln_1", "ln_2"),
        saved_attention=1.25,
        saved_inner=5.0,
        causal_model="LMHeadModel",
        layer="Block",
        rotary="",
        trunk="transformer",
        embedding="wte",
        layers="h",
        final_norm="ln_f",
        norm_eps="layer_norm_epsilon",
        embedding_dropout="embd_pdrop",
        residual="c_proj.weight",
    ),
    "gpt_neox": _Plain(
        _GPT_NEOX,
        "GPTNeoX",
        matrices=(
            Matrix("attention.query_key_value", "a", "d", "attention_bias"),
            Matrix("attention.dense", "d", "d", "attention_bias"),
            Matrix("mlp.dense_h_to_4h", "i", "d", "always"),
            Matrix("mlp.dense_4h_to_h", "d", "i", "always"),
        ),
        saved_attention=2.0,
        saved_inner=2.0,
        layer="Layer",
        trunk="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        head_in_files="embed_out.weight",
        norm_eps="layer_norm_eps",
        embedding_dropout="hidden_dropout",
    ),
}
DEFAULT = "llama"  # of a model from scratch that names no family
