import json

import pytest
import torch
from gpt2_helpers import TEXT, assert_equal_logits, make_run, transformers
from safetensors.torch import load_file, save_file

from keyhole.core.errors import InputError, StorageError
from keyhole.text.wordpieces import BytePairs
from keyhole.use import gpt2
from keyhole.use.export import export_run
from keyhole.use.gpt2 import import_gpt2
from keyhole.use.sample import sample


def foreign_folder(folder, base=False, shard="5GB", **changes):
    """A GPT-2 made and saved by transformers, with a tokenizer of GPT-2's own kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    size = fast.get_vocab_size()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    options = {"vocab_size": size, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    options |= {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**{**options, **changes})
    torch.manual_seed(0)
    model = (transformers.GPT2Model if base else transformers.GPT2LMHeadModel)(config).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


FOREIGN = {
    "as saved": {},
    "without the prefix": {"base": True},
    "in pieces": {"shard": "40KB"},
    "untied": {"tie_word_embeddings": False},
    "other eps": {"layer_norm_epsilon": 1e-6},
    "exact gelu, narrow": {"activation_function": "gelu", "n_inner": 50},
    "upcast": {"reorder_and_upcast_attn": True},
}


@pytest.mark.parametrize("changes", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_gpt2_becomes_a_run_with_equal_logits_and_ids(changes, tmp_path):
    folder = foreign_folder(tmp_path / "hf", **changes)
    run = import_gpt2(folder, tmp_path / "run")
    assert_equal_logits(run, folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = TEXT[:200] + "<|endoftext|>the"
    assert run.tokenizer.encode(text).tolist() == theirs(text, verbose=False)["input_ids"]
    assert sample(run, "the cat", 5).startswith("the cat")

    export_run(run, tmp_path / "again")
    assert_equal_logits(run, tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again(text, verbose=False)["input_ids"] == theirs(text, verbose=False)["input_ids"]


def test_a_tokenizer_changed_since_the_export_is_the_one_that_counts(tmp_path):
    (tmp_path / "run").mkdir()
    run = make_run(tmp_path / "run", {"data.tokenizer": {"name": "bpe", "size": 280}})
    folder = export_run(run, tmp_path / "hf").path
    other = BytePairs.learn(["on the other hand, something else entirely " * 9], 280)
    (folder / "tokenizer.json").write_text(other.to_hugging_face())
    back = import_gpt2(folder, tmp_path / "back")
    assert back.tokenizer.encode(TEXT).tolist() == other.encode(TEXT).tolist() != run.tokenizer.encode(TEXT).tolist()


@pytest.mark.parametrize("content", ["[]", "{}", '{"tokenizer": {"name": "chars"}, "data": {}}'])
def test_a_damaged_keyhole_file_is_named(content, tmp_path):
    (tmp_path / "run").mkdir()
    folder = export_run(make_run(tmp_path / "run"), tmp_path / "hf").path
    (folder / "keyhole.json").write_text(content)
    with pytest.raises(StorageError, match=r"keyhole\.json is damaged; remove it to go by tokenizer\.json alone"):
        import_gpt2(folder, tmp_path / "back")


def test_what_training_would_do_differently_is_recorded(tmp_path):
    run = import_gpt2(foreign_folder(tmp_path / "hf", resid_pdrop=0.2, attn_pdrop=0.1), tmp_path / "run")
    assert run.recipe.model.dropout == 0.2
    assert run.environment["imported"]["training_only"] == {"attn_pdrop": 0.1, "embd_pdrop": 0.1}


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


REFUSED_CONFIGS = [
    ({"model_type": "llama"}, "describes a model of type 'llama'; only gpt2 can be imported"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True cannot be imported: softmax"),
    ({"scale_attn_weights": False}, "scale_attn_weights = False cannot be imported: softmax"),
    ({"add_cross_attention": True}, "add_cross_attention = True cannot be imported: a decoder"),
    ({"activation_function": "silu"}, "'silu' has no feed here .allowed: gelu, gelu_new, gelu_pytorch_tanh, relu2"),
    ({"n_embd": "wide"}, "n_embd = 'wide' is not valid; it is a whole number above 0"),
    ({"resid_pdrop": None}, "resid_pdrop = None is not valid; it is a number"),
    ({"n_head": 5}, "config.json: model: width 32 is not divisible by heads 5"),
    ({"n_layer": 3}, "lacks weights that its config.json asks for: transformer.h.2.attn.c_attn.bias"),
    ({"n_layer": 1}, "holds weights that its config.json has no place for: transformer.h.1.attn.c_attn.bias"),
    ({"vocab_size": 304}, r"vocab_size = 304 and a tokenizer of 300 tokens; .*model\.resize_token_embeddings\(300\)"),
    ({"n_positions": 8}, "position.weight has shape .16, 32. instead of .8, 32."),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_CONFIGS, ids=lambda value: str(value)[:40])
def test_a_gpt2_that_has_no_form_here_is_refused_by_name(changes, message, tmp_path):
    folder = foreign_folder(tmp_path / "hf")
    edit(folder / "config.json", **changes)
    with pytest.raises((InputError, StorageError), match=message):
        import_gpt2(folder, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "nothing may be left behind"


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:1000])


def elsewhere(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "../secret.safetensors"}}')


def quantized(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors")


def two_heads(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1}, folder / "model.safetensors")


REFUSED_FOLDERS = [
    (pickled, InputError, "pytorch_model.bin is a pickle, .* can run any code .* save the model again as safetensors"),
    (truncated, StorageError, "model.safetensors is damaged"),
    (elsewhere, InputError, "does not name the files of this folder"),
    (quantized, InputError, "c_attn.weight as torch.int8; import an unquantized model"),
    (two_heads, InputError, "says tie_word_embeddings, but its lm_head is not its embedding"),
    (lambda folder: (folder / "config.json").unlink(), InputError, "not a Hugging Face model folder: it has no config"),
    (lambda folder: (folder / "model.safetensors").unlink(), InputError, "there is no model.safetensors in it"),
    (lambda folder: (folder / "tokenizer.json").unlink(), InputError, "has no tokenizer.json, .* AutoTokenizer"),
    (lambda folder: edit(folder / "tokenizer.json", normalizer={"type": "NFC"}), InputError, "it needs no normalizer"),
    (lambda folder: edit(folder / "tokenizer.json", pre_tokenizer=None), InputError, "the ByteLevel pre-tokenizer"),
]


@pytest.mark.parametrize(("harm", "error", "message"), REFUSED_FOLDERS, ids=[row[2][:40] for row in REFUSED_FOLDERS])
def test_a_folder_that_cannot_be_read_is_refused_in_one_sentence(harm, error, message, tmp_path):
    folder = foreign_folder(tmp_path / "hf")
    harm(folder)
    with pytest.raises(error, match=message):
        import_gpt2(folder, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "nothing may be left behind"


def test_an_import_that_fails_midway_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    export_run(make_run(tmp_path / "run"), tmp_path / "hf")
    monkeypatch.setattr(gpt2, "_recipe", lambda *_: {"model": {"layers": 0}})
    with pytest.raises(InputError, match=r"model\.layers"):
        import_gpt2(tmp_path / "hf", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
