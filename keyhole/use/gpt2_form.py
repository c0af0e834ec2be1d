"""GPT-2's form of a model: which of our tensors is which of its, which models have it, and what it computes.

The one table below serves export and import. Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from keyhole.mixers.softmax import Softmax
from keyhole.model.lm import LM
from keyhole.parts.contract import Linear
from keyhole.parts.feed import Gelu, ReluSquared
from keyhole.parts.merge import Concat
from keyhole.parts.norm import LayerNorm
from keyhole.parts.position import Learned, NoPosition, Sinusoidal
from keyhole.record.run import named_tensors
from keyhole.text import Tokenizer

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu": {"name": "gelu", "approximate": "none"},
    "gelu_new": {"name": "gelu", "approximate": "tanh"},
    "gelu_pytorch_tanh": {"name": "gelu", "approximate": "tanh"},
    "relu2": {"name": "relu-squared"},
}
"""Our feed for each activation of GPT-2's that we have."""

_MODEL = (
    ("embedding", "wte.weight"),
    ("position.weight", "wpe.weight"),
    ("norm.gain", "ln_f.weight"),
    ("norm.bias", "ln_f.bias"),
)
_BLOCK = (
    ("mixer_norm.gain", "ln_1.weight"),
    ("mixer_norm.bias", "ln_1.bias"),
    ("mixer.qkv.weight", "attn.c_attn.weight"),
    ("mixer.qkv.bias", "attn.c_attn.bias"),
    ("mixer.out.weight", "attn.c_proj.weight"),
    ("mixer.out.bias", "attn.c_proj.bias"),
    ("feed_norm.gain", "ln_2.weight"),
    ("feed_norm.bias", "ln_2.bias"),
    ("feed.up.weight", "mlp.c_fc.weight"),
    ("feed.up.bias", "mlp.c_fc.bias"),
    ("feed.down.weight", "mlp.c_proj.weight"),
    ("feed.down.bias", "mlp.c_proj.bias"),
)


def correspondence(layers: int, tied: bool) -> list[tuple[str, str]]:
    """Every tensor of a GPT-2: our name and its name."""
    pairs = [(ours, f"transformer.{theirs}") for ours, theirs in _MODEL]
    for i in range(layers):
        pairs += [(f"blocks.{i}.{ours}", f"transformer.h.{i}.{theirs}") for ours, theirs in _BLOCK]
    return pairs if tied else [*pairs, ("head", "lm_head.weight")]


def turn(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor from our layout to GPT-2's, or back: its Conv1D keeps matrices (inputs, outputs), ours the transpose."""
    return tensor.t().contiguous() if ".c_" in name and name.endswith(".weight") else tensor


def what_gpt2_lacks(model: LM) -> str | None:
    """The first part of a model that GPT-2 has no form of, in words; None when the model is a GPT-2.

    Types are compared exactly, and not with isinstance: a subclass may compute something else.
    """
    block, config = model.blocks[0], model.config
    for spec, mixer in zip(config.mixers, (block.mixer for block in model.blocks), strict=True):
        if type(mixer) is not Softmax:
            return f"mixer {spec.name}"
        if mixer.groups != mixer.heads:
            return f"grouped key-value heads (kv_heads {mixer.groups} for {mixer.heads} heads)"
        if mixer.qk_norm is not None:
            return "query-key norm (mixer softmax with qk_norm)"
    kinds: tuple[tuple[str, Any, tuple[type[nn.Module], ...]], ...] = (
        ("position", model.position, (Learned, Sinusoidal, NoPosition)),
        ("merge", block.mixer.merge, (Concat,)),
        ("norm", model.norm, (LayerNorm,)),
        ("feed", block.feed, (Gelu, ReluSquared)),
    )
    for kind, part, known in kinds:
        if type(part) not in known:
            return f"{kind} {getattr(config, kind).name}"
    return None


def gpt2_config(model: LM, tokenizer: Tokenizer) -> dict[str, Any]:
    """The config.json of a model that lacks nothing."""
    config, feed = model.config, model.blocks[0].feed
    like = {"name": config.feed.name, **({"approximate": feed.approximate} if isinstance(feed, Gelu) else {})}
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocab,
        "n_positions": model.block_size,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": feed.up.weight.shape[0],
        "activation_function": next(name for name, ours in ACTIVATIONS.items() if ours == like),
        "layer_norm_epsilon": model.norm.eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tie,
        "bos_token_id": tokenizer.start,
        "eos_token_id": tokenizer.stop,
        "pad_token_id": tokenizer.pad,
        "dtype": "float32",
    }


@torch.no_grad()
def gpt2_tensors(model: LM) -> dict[str, torch.Tensor]:
    """The tensors of a model that lacks nothing, under GPT-2's names; a bias that we do without is zero there."""
    ours = named_tensors(model) | _without_multipliers(model)
    # Whatever our position adds to nothing is GPT-2's table: trained vectors, waves or zeros.
    ours["position.weight"] = model.position.add(torch.zeros(1, model.block_size, model.config.width), 0)[0]
    found = {}
    for name, theirs in correspondence(model.config.layers, model.config.tie):
        if name.endswith(".bias") and name not in ours:
            stem = name.removesuffix("bias")
            beside = ours[f"{stem}weight"] if f"{stem}weight" in ours else ours[f"{stem}gain"]
            found[theirs] = torch.zeros(beside.shape[0])
        else:
            found[theirs] = turn(theirs, ours[name].detach())
    return found


def _without_multipliers(model: LM) -> dict[str, torch.Tensor]:
    """The tensors that a model multiplies, times their multipliers: that of the logits goes into the last norm."""
    found = {f"{name}.weight": part.effective for name, part in model.named_modules() if isinstance(part, Linear)}
    if model.logit_scale != 1.0:
        last = model.norm.named_parameters(prefix="norm")
        found |= {name: parameter * model.logit_scale for name, parameter in last}
    return found


@torch.no_grad()
def gpt2_logits(config: dict[str, Any], tensors: dict[str, torch.Tensor], ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V) by GPT-2's definition, read off config and tensors alone: the oracle for every export."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        gain, bias = tensors[f"transformer.{name}.weight"], tensors[f"transformer.{name}.bias"]
        return layer_norm(x, gain.shape, gain, bias, config["layer_norm_epsilon"])

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ tensors[f"transformer.{name}.weight"] + tensors[f"transformer.{name}.bias"]

    def activation(x: torch.Tensor) -> torch.Tensor:
        name = config["activation_function"]
        return x.relu().square() if name == "relu2" else gelu(x, approximate="none" if name == "gelu" else "tanh")

    embedding = tensors["transformer.wte.weight"]
    x = embedding[ids_BT] + tensors["transformer.wpe.weight"][: ids_BT.shape[1]]
    for i in range(config["n_layer"]):
        qkv = conv(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1)
        q, k, v = (part.unflatten(-1, (config["n_head"], -1)).transpose(1, 2) for part in qkv)
        heads = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + conv(heads, f"h.{i}.attn.c_proj")
        x = x + conv(activation(conv(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ (embedding if config["tie_word_embeddings"] else tensors["lm_head.weight"]).T
