"""Any function from ids to logits is asked the same probes; what leaks is rejected by name, what does not is not."""

import pytest
import torch
from torch import nn

import keyhole as kh
from keyhole.audits import audit_model, audit_recipe, dishonest
from keyhole.audits.model import LIMITS

AHEAD = {"suffix", "unaligned cuts", "truncation"}
TABLE = torch.randn(9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def failed(findings):
    return {finding.name for finding in dishonest(findings)}


def so_far(ids):
    count = torch.arange(1, ids.shape[1] + 1)[:, None]
    return (TABLE[ids].cumsum(1) / count).numpy()


def without_gradient(ids):
    """What leaves torch carries no gradient: that probe cannot be asked, the others can."""
    return so_far(ids)


def whole(ids):
    return TABLE[ids] - TABLE[ids].mean(1, keepdim=True)


def by_length(ids):
    return TABLE[ids] / ids.shape[1]


def batch_norm(ids):
    return TABLE[ids] - TABLE[ids].mean(0, keepdim=True)


def lookahead_at_odd_cuts(ids):
    blocks = [part.mean(1, keepdim=True).expand_as(part) for part in TABLE[ids].split(8, 1)]
    return TABLE[ids] + torch.cat(blocks, 1)


@pytest.mark.parametrize(
    ("function", "rules"),
    [
        (so_far, set()),
        (whole, AHEAD | {"future gradient"}),
        (by_length, {"truncation"}),
        (batch_norm, {"batch-mates"}),
        (lookahead_at_odd_cuts, {"unaligned cuts", "truncation", "future gradient"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_is_rejected_by_the_rules_it_breaks(function, rules):
    findings = kh.audit(function, vocab=9)
    assert failed(findings) == rules
    assert {f.limit for f in findings if f.name == "suffix"} == {LIMITS[torch.float32]}


class Tiny(nn.Module):
    """A model with an embedding, a mask and a leak that can be turned on."""

    def __init__(self, leak=0.0, pads=0.0):
        super().__init__()
        self.leak, self.pads = leak, pads
        self.table, self.drop = nn.Embedding(9, 16), nn.Dropout(0.5)
        self.head = nn.Linear(16, 9)

    def forward(self, ids, mask=None):
        x = self.drop(self.table(ids))
        keep = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].clamp_min(self.pads).to(x)
        x = (x * keep).cumsum(1) / keep.cumsum(1).clamp_min(1)
        return self.head(x + self.leak * x.flip(1).cumsum(1).flip(1))


def test_what_leaves_torch_is_told_that_its_gradient_cannot_be_asked():
    finding = next(f for f in kh.audit(without_gradient, vocab=9) if f.name == "future gradient")
    assert finding.verdict == "undecided"
    assert "no gradient" in finding.remedy


def test_a_module_is_asked_in_float64_and_left_as_it_was():
    model = Tiny().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    findings = {f.name: f for f in audit_model(model, 9)}
    assert {f.verdict for f in findings.values()} == {"holds"}
    assert findings["suffix"].limit == LIMITS[torch.float64]
    assert findings["future gradient"].evidence["power"] > 0
    assert findings["padding"].evidence["power"] > 0
    assert model.training
    assert model.drop.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_small_leak_in_a_module_is_seen_in_float64():
    assert failed(audit_model(Tiny(leak=1e-9), 9)) == AHEAD | {"future gradient"}


def test_padding_that_counts_is_seen():
    class Counts(Tiny):
        def forward(self, ids, mask=None):
            return super().forward(ids) if mask is None else super().forward(ids, mask.double().clamp_min(1e-4))

    assert failed(audit_model(Counts(), 9)) == {"padding"}


def test_a_module_that_cannot_be_copied_is_asked_as_it_is_with_a_wider_limit():
    class Fixed(Tiny):
        def __deepcopy__(self, memo):
            raise TypeError("not to be copied")

    model = Fixed().train()
    findings = {f.name: f for f in audit_model(model, 9)}
    assert findings["suffix"].limit == LIMITS[torch.float32]
    assert findings["suffix"].verdict == "holds"
    assert model.drop.training


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=40, n_embd=16, n_layer=2, n_head=2, **ids))


def test_a_hugging_face_model_and_its_folder_are_honest(tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path)
    for findings in (kh.audit(model), kh.audit(tmp_path), kh.audit(str(tmp_path))):
        assert {f.name: f.verdict for f in findings} == dict.fromkeys(
            [*sorted(AHEAD), "future gradient", "batch-mates", "padding", "determinism"], "holds"
        )
        assert {f.limit for f in findings if f.name == "suffix"} == {LIMITS[torch.float64]}


def test_a_hugging_face_model_that_lost_its_causal_mask_is_caught():
    model = gpt2()
    for block in model.transformer.h:
        norm = block.ln_1
        norm.register_forward_hook(lambda _module, _args, y: y - y.mean(1, keepdim=True))
    assert failed(kh.audit(model)) == AHEAD | {"future gradient", "padding"}


def test_a_runs_leak_is_caught_named_and_priced(dishonest_run, honest_run):
    findings = kh.audit(dishonest_run.path)
    assert failed(findings) >= AHEAD | {"future gradient", "prefix loss"}
    price = next(f for f in findings if f.name == "prefix loss")
    assert price.evidence["gap"] > 0.02
    assert price.evidence["interval"][0] > 0
    assert "worth" in price.measured
    named = [f for f in findings if f.statement.startswith("reweight: ")]
    assert {f.name for f in named} == AHEAD | {"future gradient"}
    assert "running form" in named[0].remedy

    findings = kh.audit(honest_run)
    assert dishonest(findings) == []
    price = next(f for f in findings if f.name == "prefix loss")
    assert price.verdict == "holds"
    assert abs(price.evidence["gap"]) < 1e-5


USER = """
from torch import nn

class Centred(nn.Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return x - x.mean(1, keepdim=True)
"""


def test_an_arm_is_audited_at_its_own_size_before_it_trains(tmp_path):
    (tmp_path / "my.py").write_text(USER)
    model = {"layers": 2, "width": 32, "heads": 2}
    for changes, rules in (({}, set()), ({"norm": "my.py:Centred"}, AHEAD | {"future gradient", "padding"})):
        given = {"data": {"block": 20}, "model": {**model, **changes}}
        findings = audit_recipe(kh.Recipe.parse(given, folder=tmp_path), vocab=11)
        assert failed(findings) == rules
        assert {f.aspect for f in findings if f.name != "determinism"} == {"honesty"}
    assert any(f.statement.startswith("my.py:Centred") and "a mean over the whole text" in f.measured for f in findings)


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        (so_far, {}, "the vocabulary of a function is not known; say it: audit"),
        (so_far, {"vocab": 1}, "vocab = 1 is not valid"),
        (so_far, {"vocab": 9, "kind": "mixer"}, "kind and options are a part's"),
        (42, {}, "give a part, a run, or a function"),
        ("none", {}, "none is a mixer and a position; say which: --kind mixer"),
        ("sofmax", {}, "there is no part 'sofmax'; did you mean 'softmax'"),
        ("runs/gone", {}, "there is no folder runs/gone"),
        (lambda ids: ids, {"vocab": 9}, "it must return logits"),
        (lambda ids: 1 / (0 * len(ids)), {"vocab": 9}, "could not read ids of shape .1, 2.: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_audited_is_one_sentence(target, settings, message):
    with pytest.raises(kh.InputError, match=message):
        kh.audit(target, **settings)


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(kh.InputError, match="neither a run"):
        kh.audit(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(kh.InputError, match="could not be read as a causal language model"):
        kh.audit(tmp_path)


def test_what_reads_ahead_in_long_texts_only_is_found_at_the_block_s_own_length():
    def logits(ids_BT):
        past = torch.nn.functional.one_hot(ids_BT, 16).double().cumsum(1)
        return past if ids_BT.shape[1] <= 64 else past + past[:, -1:]

    found = {finding.name: finding.verdict for finding in audit_model(logits, 16, block=96, full_block=True)}
    assert found["truncation"] == "fails"
    assert found["suffix"] == "holds", "no shorter text shows it"
