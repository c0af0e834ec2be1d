import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from gpt2_helpers import TEXT, assert_equal_logits, make_run, ours_and_theirs, some_ids, transformers

from keyhole.core.errors import InputError, StorageError
from keyhole.use import export, gpt2_form
from keyhole.use.evaluate import evaluate
from keyhole.use.export import export_run
from keyhole.use.gpt2 import import_gpt2
from keyhole.use.sample import sample

BIASED = {
    "model.mixer": {"name": "softmax", "bias": True},
    "model.norm": {"name": "layer", "bias": True},
    "model.feed": {"name": "gelu", "bias": True, "approximate": "tanh"},
}
GPT2_FILES = {"config.json", "generation_config.json", "keyhole.json", "model.safetensors", "tokenizer.json",
              "tokenizer_config.json"}  # fmt: skip


@pytest.fixture
def new_run(tmp_path):
    def make(changes=None, name="run", **options):
        (tmp_path / name).mkdir()
        return make_run(tmp_path / name, changes, **options)

    return make


VARIANTS = {
    "plain": {},
    "untied": {"model.tie": False},
    "biases": BIASED,
    "biases, untied": {**BIASED, "model.tie": False},
    "tanh": {"model.feed": {"name": "gelu", "approximate": "tanh"}},
    "relu-squared": {"model.feed": "relu-squared"},
    "sinusoidal": {"model.position": "sinusoidal"},
    "no position": {"model.position": "none"},
    "narrow feed": {"model.feed": {"name": "gelu", "ratio": 2.7}},
    "other eps": {"model.norm": {"name": "layer", "eps": 1e-3}},
    "dropout": {"model.dropout": 0.2},
    "kv_heads spelled out": {"model.kv_heads": 2},
    "quiet": {"model.init": "quiet"},
    "mup": {"model.init": "mup", "model.base_width": 8},
    "mup, biases, untied": {**BIASED, "model.init": "mup", "model.base_width": 8, "model.tie": False},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_transformers_computes_our_logits_and_so_does_the_imported_run(changes, new_run, tmp_path):
    run = new_run(changes)
    exported = export_run(run, tmp_path / "hf")
    assert (exported.form, set(exported.files)) == ("gpt2", GPT2_FILES)
    assert {path.stat().st_mode & 0o777 for path in exported.path.iterdir()} == {0o644}, "others must be able to read it"
    assert_equal_logits(run, tmp_path / "hf")

    back = import_gpt2(tmp_path / "hf", tmp_path / "back")
    ids = some_ids(run.tokenizer.vocab)
    with torch.no_grad():
        torch.testing.assert_close(back.model(ids), run.model(ids), rtol=1e-6, atol=2e-6)
    export_run(back, tmp_path / "again")
    for name in GPT2_FILES:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes(), name


@pytest.mark.parametrize(("feed", "tie"), [("gelu", True), ("relu-squared", False)])
def test_multipliers_are_folded_into_the_weights_that_gpt2_has(feed, tie, new_run, tmp_path):
    run = new_run({**BIASED, "model.init": "unit", "model.feed": {"name": feed, "bias": True}, "model.tie": tie})
    exported = export_run(run, tmp_path / "hf")
    assert exported.form == "gpt2"
    ours, theirs = ours_and_theirs(run, tmp_path / "hf")
    assert ours.std() > 0.001
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * ours.abs().max().item())
    no_multipliers = run.model
    no_multipliers.logit_scale *= 1.01
    assert (no_multipliers(some_ids(run.tokenizer.vocab)) - theirs).abs().max() > 1e-3 * ours.abs().max()


TOKENIZERS = [
    ("bytes", False), ("bytes", True), ("chars", False), ("chars", True), ("words", False),
    ({"name": "bpe", "size": 300}, False), ({"name": "bpe", "size": 300}, True),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "specials"), TOKENIZERS, ids=str)
def test_auto_tokenizer_gives_our_ids(spec, specials, new_run, tmp_path):
    run = new_run({"data.tokenizer": spec}, specials=specials)
    export_run(run, tmp_path / "hf")
    ours, theirs = run.tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    sample_text = TEXT[:100] + "<START> <|endoftext|>" if ours.name != "chars" or specials else TEXT[:100]
    assert theirs(sample_text, verbose=False)["input_ids"] == ours.encode(sample_text).tolist()
    assert len(theirs) == ours.vocab
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.start, ours.stop, ours.pad)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (ours.start, ours.stop)
    framed = [*([] if ours.start is None else [ours.start]), *ours.encode("the cat sat")]
    assert theirs.decode(framed, skip_special_tokens=True) == ours.decode(framed) == "the cat sat"


def test_an_imported_run_keeps_its_tokenizer_and_how_its_rows_were_cut(new_run, tmp_path):
    run = new_run({"data.tokenizer": {"name": "words", "count": 2}, "data.rows": "sentences"})
    export_run(run, tmp_path / "hf")
    back = import_gpt2(tmp_path / "hf", tmp_path / "back")
    assert back.tokenizer.hash == run.tokenizer.hash
    assert (back.recipe.data.rows, back.recipe.data.tokenizer) == ("sentences", run.recipe.data.tokenizer)
    assert sample(back, "the cat", 8, temperature=0.0) == sample(run, "the cat", 8, temperature=0.0)
    assert evaluate(back, ["the cat sat"]).total.loss == pytest.approx(evaluate(run, ["the cat sat"]).total.loss)


def test_an_imported_run_says_that_it_brings_no_text_to_train_on(new_run, tmp_path):
    export_run(new_run(), tmp_path / "hf")
    back = import_gpt2(tmp_path / "hf", tmp_path / "back")
    assert (back.step, back.metrics, back.environment["imported"]["model_type"]) == (0, [], "gpt2")
    with pytest.raises(InputError, match=r"imported from hf and brings no text; set data\.source"):
        evaluate(back)


# -- what is no GPT-2 --------------------------------------------------------------------------------------------------

OTHERS = {
    "mixer my.py:Mine": {"model.mixer": "my.py:Mine"},
    "grouped key-value heads (kv_heads 1 for 2 heads)": {"model.kv_heads": 1},
    "query-key norm (mixer softmax with qk_norm)": {"model.mixer": {"name": "softmax", "qk_norm": True}},
    "position rope": {"model.position": "rope", "model.norm": "rms"},
    "position alibi": {"model.position": "alibi"},
    "merge shift": {"model.merge": "shift"},
    "norm rms": {"model.norm": "rms"},
    "feed swiglu": {"model.feed": "swiglu"},
}
MINE = "import torch\nclass Mine(torch.nn.Module):\n    def forward(self, x): return x.cumsum(1) * .1\n"


@pytest.mark.parametrize(("lacking", "changes"), OTHERS.items(), ids=OTHERS)
def test_what_is_no_gpt2_is_exported_in_our_form_with_the_reason(lacking, changes, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "my.py").write_text(MINE)
    exported = export_run(make_run(tmp_path / "run", changes), tmp_path / "out")
    assert (exported.form, exported.reason) == ("safetensors", f"GPT-2 has no {lacking}")
    assert exported.files == ("KEYHOLE.md", "model.safetensors", "recipe.toml", "tokenizer.json")
    assert f"not a Hugging Face model: GPT-2 has no {lacking}." in (tmp_path / "out" / "KEYHOLE.md").read_text()


def test_the_snippet_in_the_note_loads_the_same_model(tmp_path):
    code = tmp_path / "run" / "code"
    code.mkdir(parents=True)
    (code / "my.py").write_text(MINE)
    run = make_run(tmp_path / "run", {"model.mixer": "code/my.py:Mine"})
    folder = export_run(run, tmp_path / "out").path
    shutil.rmtree(tmp_path / "run" / "code")  # the folder must stand on its own
    snippet = (folder / "KEYHOLE.md").read_text().split("```python\n")[1].split("```")[0]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    then = 'import torch; print(repr(model(torch.tensor([tokenizer.encode("the cat").tolist()])).tolist()))'
    done = subprocess.run([sys.executable, "-c", snippet + then], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = run.model(torch.tensor([run.tokenizer.encode("the cat").tolist()]))
    assert json.loads(done.stdout) == expected.tolist()


# -- nothing written over, nothing half, nothing wrong -----------------------------------------------------------------


@pytest.mark.parametrize("write", [export_run, lambda run, folder: import_gpt2(run.path.parent / "hf", folder)])
def test_an_existing_folder_is_never_written_over(write, new_run, tmp_path):
    run = new_run()
    export_run(run, tmp_path / "hf")
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    for path in (full / "mine.txt", file):
        path.write_text("mine")
    with pytest.raises(InputError, match="full is not empty, and nothing is written over; give a new folder"):
        write(run, full)
    with pytest.raises(InputError, match="file is a file; give a new folder"):
        write(run, file)
    assert [path.read_text() for path in (full / "mine.txt", file)] == ["mine", "mine"]
    write(run, empty)
    write(run, tmp_path / "deep" / "new")
    assert any(empty.iterdir())
    assert any((tmp_path / "deep" / "new").iterdir())


def test_an_interrupted_export_leaves_nothing(new_run, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    run = new_run()
    monkeypatch.setattr(export, "_tokenizer_config", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_run(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_is_told_in_one_sentence(new_run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    run = new_run()
    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(StorageError, match=r"exporting to .*out failed: No space left on device"):
        export_run(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def forget_the_transpose(name, tensor):
    square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
    return tensor if square or ".c_" not in name or not name.endswith(".weight") else tensor.t().contiguous()


def test_a_planted_fault_is_seen_by_the_export_itself(new_run, tmp_path, monkeypatch):
    # Only the square matrix is left as it is: every shape still fits, and nothing but the logits tells.
    monkeypatch.setattr(gpt2_form, "turn", forget_the_transpose)
    exported = export_run(new_run(), tmp_path / "out")
    assert exported.form == "safetensors"
    assert exported.reason.startswith("GPT-2 computes other logits with the same weights (up to ")


def test_a_planted_fault_is_seen_by_transformers(new_run, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt2_form, "turn", forget_the_transpose)
    monkeypatch.setattr(export, "_difference", lambda *_: None)
    run = new_run()
    export_run(run, tmp_path / "hf")
    ours, theirs = ours_and_theirs(run, tmp_path / "hf")
    assert (ours - theirs).abs().max() > 0.01
