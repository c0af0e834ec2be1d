"""Reading a Hugging Face GPT-2 folder into a run directory; `keyhole.use.export` goes the other way.

What becomes of each file:

    config.json                    recipe.toml      position learned, norm layer, biases everywhere
    model.safetensors              checkpoints/     step 0: nothing was trained here
    tokenizer.json, keyhole.json   tokenizer.json   exact where we exported it, wrapped where others did
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError, StorageError
from keyhole.core.files import read_json, whole_folder, write_atomically, write_json
from keyhole.model.lm import LM
from keyhole.record import checkpoint
from keyhole.record.environment import environment
from keyhole.record.metrics import NAME as METRICS
from keyhole.record.run import Run, load_weights, named_tensors, open_run
from keyhole.text import Tokenizer, load_tokenizer, save_tokenizer
from keyhole.text.wordpieces import BytePairs
from keyhole.use.export import OURS
from keyhole.use.gpt2_form import ACTIVATIONS, correspondence, turn

# What transformers takes for a key that config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}

# Switches that change the function, with the only value we have a form for. reorder_and_upcast_attn is not one of them:
# it rounds differently in half precision and computes the same in float32.
_FIXED = {
    "scale_attn_weights": (True, "softmax here always divides scores by the root of the head width"),
    "scale_attn_by_inverse_layer_idx": (False, "softmax here does not divide scores by the number of the layer"),
    "add_cross_attention": (False, "a decoder here has no second text to read"),
}


def import_gpt2(folder: Path, out: Path) -> Run:
    """Read a Hugging Face GPT-2 folder into a run directory of its own, ready to sample, evaluate and look into."""
    folder, out = Path(folder), Path(out)
    config = _read_config(folder)
    tensors = _our_tensors(folder, config)
    with whole_folder(out, "importing into") as temporary:
        tokenizer, data = _import_tokenizer(folder, temporary)
        if tokenizer.vocab != config["vocab_size"]:
            raise InputError(
                f"{folder} has vocab_size = {config['vocab_size']} and a tokenizer of {tokenizer.vocab} tokens; "
                f"make them equal with model.resize_token_embeddings({tokenizer.vocab}) and save the model again"
            )
        recipe = Recipe.parse(_recipe(folder, config, data), where=str(folder / "config.json"))
        model = LM(recipe.model, tokenizer.vocab, recipe.data.block, folder)
        load_weights(model, tensors, str(folder))
        source = {"from": str(folder.resolve()), "model_type": "gpt2", "training_only": _training_only(config)}
        state = {"step": 0, "done": True, "imported": source["from"]}
        checkpoint.save(temporary / "checkpoints", named_tensors(model), {}, state)
        write_json(
            temporary / "environment.json", {**environment(), "imported": source, "data": {"hash": None}, "code": {}}
        )
        write_atomically(temporary / METRICS, "")
        write_atomically(temporary / "recipe.toml", recipe.to_toml())
    return open_run(out)


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json with GPT-2's defaults filled in; what we have no form for is refused by name."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    given = read_json(path)
    kind = given.get("model_type") if isinstance(given, dict) else None
    if kind != "gpt2":
        raise InputError(f"{path} describes a model of type {kind!r}; only gpt2 can be imported")
    config = {**_DEFAULTS, **given}
    for key, (only, reason) in _FIXED.items():
        if config.get(key, only) != only:
            raise InputError(f"{path}: {key} = {config[key]!r} cannot be imported: {reason}")
    if config["activation_function"] not in ACTIVATIONS:
        allowed = ", ".join(sorted(ACTIVATIONS))
        raise InputError(
            f"{path}: activation_function = {config['activation_function']!r} has no feed here (allowed: {allowed})"
        )
    config["n_inner"] = config["n_inner"] or 4 * config["n_embd"]
    for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
        if type(config[key]) is not int or config[key] < 1:
            raise InputError(f"{path}: {key} = {config[key]!r} is not valid; it is a whole number above 0")
    for key in ("layer_norm_epsilon", "resid_pdrop"):
        if type(config[key]) not in (int, float):
            raise InputError(f"{path}: {key} = {config[key]!r} is not valid; it is a number")
    return config


def _recipe(folder: Path, config: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """A recipe that builds the model of a config. Its source is no text: an imported run brings none to train on."""
    width, hidden, eps = config["n_embd"], config["n_inner"], float(config["layer_norm_epsilon"])
    ratio = {} if hidden == 4 * width else {"ratio": hidden / width}
    return {
        "data": {**data, "source": f"imported:{folder.resolve().name}", "block": config["n_positions"]},
        "model": {
            "layers": config["n_layer"],
            "width": width,
            "heads": config["n_head"],
            "mixer": {"name": "softmax", "bias": True},
            "norm": {"name": "layer", "bias": True, **({} if eps == 1e-5 else {"eps": eps})},
            "feed": {**ACTIVATIONS[config["activation_function"]], "bias": True, **ratio},
            "dropout": float(config["resid_pdrop"]),
            "tie": config["tie_word_embeddings"],
        },
    }


def _training_only(config: dict[str, Any]) -> dict[str, Any]:
    """What further training would not do as GPT-2 did: we have one dropout, and none on attention weights."""
    expected = {"embd_pdrop": config["resid_pdrop"], "attn_pdrop": 0}
    return {key: config[key] for key, ours in expected.items() if config[key] != ours}


def _our_tensors(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The folder's tensors under our names, in our layout and in float32."""
    found = {}
    for name, tensor in _read_tensors(folder).items():
        full = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        # Old files also hold the causal mask.
        if not full.endswith((".attn.bias", ".attn.masked_bias")):
            found[full] = tensor
    tied = config["tie_word_embeddings"]
    if tied and "lm_head.weight" in found:
        head = found.pop("lm_head.weight")
        if not torch.equal(head, found.get("transformer.wte.weight", head)):
            raise InputError(f"{folder} says tie_word_embeddings, but its lm_head is not its embedding; set it to false")
    pairs = correspondence(config["n_layer"], tied)
    if missing := {theirs for _, theirs in pairs} - found.keys():
        raise InputError(f"{folder} lacks weights that its config.json asks for: {', '.join(sorted(missing)[:3])}")
    if extra := found.keys() - {theirs for _, theirs in pairs}:
        raise InputError(f"{folder} holds weights that its config.json has no place for: {', '.join(sorted(extra)[:3])}")
    if odd := sorted(name for name, tensor in found.items() if not tensor.is_floating_point()):
        raise InputError(f"{folder} holds {odd[0]} as {found[odd[0]].dtype}; import an unquantized model")
    return {ours: turn(theirs, found[theirs]).float() for ours, theirs in pairs}


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of model.safetensors, or of the pieces that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        names = [single.name]
    elif index.is_file():
        pieces = read_json(index)
        names = sorted(set(pieces["weight_map"].values())) if isinstance(pieces, dict) and "weight_map" in pieces else []
        if not names or any(Path(name).name != name for name in names):
            raise InputError(f"{index} does not name the files of this folder that hold the weights")
    elif old := sorted(folder.glob("pytorch_model*.bin")):
        raise InputError(
            f"{old[0]} is a pickle, and reading a pickle can run any code in it; save the model again as safetensors "
            "with model.save_pretrained(FOLDER)"
        )
    else:
        raise InputError(f"{folder} has no weights: there is no model.safetensors in it")
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except FileNotFoundError:
            raise InputError(f"{index} names {name}, and there is no such file in {folder}") from None
        except SafetensorError as error:
            raise StorageError(f"{folder / name} is damaged ({error}); fetch it again") from None
    return tensors


def _import_tokenizer(folder: Path, out: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Write the run's tokenizer, and say what the recipe's [data] tells of it."""
    path, own = folder / "tokenizer.json", folder / OURS
    if not path.is_file():
        raise InputError(
            f"{folder} has no tokenizer.json, and a run needs a tokenizer; write one there with "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
        )
    theirs = read_json(path)
    if own.is_file():
        known = read_json(own)
        try:
            write_json(out / "tokenizer.json", known["tokenizer"])
            tokenizer = load_tokenizer(out)
            data = {key: known["data"][key] for key in ("tokenizer", "rows")}
        except (KeyError, TypeError, StorageError):
            raise StorageError(f"{own} is damaged; remove it to go by tokenizer.json alone") from None
        # Whoever changed tokenizer.json since the export meant it: then ours no longer counts.
        if json.loads(tokenizer.to_hugging_face()) == theirs:
            return tokenizer, data
    tokenizer = _wrap(theirs, path)
    save_tokenizer(tokenizer, out)
    return tokenizer, {"tokenizer": "bpe"}


def _wrap(state: Any, path: Path) -> BytePairs:
    """GPT-2's own kind of tokenizer as our bpe, which gives the same ids; other kinds are refused."""
    from tokenizers import Tokenizer as Fast

    state = state if isinstance(state, dict) else {}
    model, cut, join = (state.get(key) or {} for key in ("model", "pre_tokenizer", "decoder"))
    added = state.get("added_tokens") or []
    demands = {
        "a BPE model": model.get("type", "BPE") == "BPE" and not model.get("dropout"),
        "no normalizer": not state.get("normalizer"),
        "the ByteLevel pre-tokenizer": cut.get("type") == "ByteLevel" and cut.get("use_regex", True),
        "no space put in front": not cut.get("add_prefix_space"),
        "the ByteLevel decoder": join.get("type") == "ByteLevel",
        "added tokens that take no white space": not any(
            token.get("lstrip") or token.get("rstrip") or len(token["content"].split()) != 1 for token in added
        ),
    }
    if lacking := [demand for demand, met in demands.items() if not met]:
        raise InputError(
            f"{path} is not a tokenizer of GPT-2's kind, the only one that can be imported: it needs {lacking[0]}"
        )
    try:
        fast = Fast.from_str(json.dumps({**state, "truncation": None, "padding": None}))
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise StorageError(f"{path} is damaged ({error})") from None
    size = fast.get_vocab_size()
    if sorted(fast.get_vocab().values()) != list(range(size)):
        raise InputError(f"{path} leaves out token numbers below {size}; a vocabulary here has no holes")
    return BytePairs(fast)
