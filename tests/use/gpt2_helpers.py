"""What the tests of export and import share: a small run, and the comparison of its logits with transformers'."""

import pytest
import torch

from keyhole.core.config import Recipe
from keyhole.model.lm import build
from keyhole.record import checkpoint
from keyhole.record.run import Run, named_tensors, open_run
from keyhole.text import build_tokenizer, save_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers, from the extra `dev`, is the oracle here")

TEXT = "the cat sat on the mat; the dog sat on the cat. Größe: 5 €, naïve 😀\n\n it's <START> 42. " * 40


def make_run(folder, changes=None, specials=False) -> Run:
    """A run of a small model whose weights are far from their first values, as if training had ended."""
    recipe = Recipe().replace({"model.layers": 2, "model.width": 32, "model.heads": 2, "data.block": 16})
    recipe = recipe.replace(changes or {})
    recipe._folder = folder
    tokenizer = build_tokenizer(recipe.data.tokenizer, [TEXT], specials or recipe.data.rows != "text")
    save_tokenizer(tokenizer, folder)
    (folder / "recipe.toml").write_text(recipe.to_toml())
    (folder / "metrics.jsonl").touch()
    model, chance = build(recipe, tokenizer.vocab), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=chance) * 0.3
    checkpoint.save(folder / "checkpoints", named_tensors(model), {}, {"step": 7, "done": True})
    return open_run(folder)


def some_ids(vocab, rows=2, tokens=16):
    return torch.randint(vocab, (rows, tokens), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def ours_and_theirs(run, folder, dtype=torch.float32):
    """Logits of our model and of what transformers makes of the folder, on the same ids."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).to(dtype).eval()
    ids = some_ids(run.tokenizer.vocab)
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    ours = run.model.to(dtype)(ids)
    run.model.to(torch.float32).load_state_dict(weights)
    return ours, theirs(ids).logits


def assert_equal_logits(run, folder):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        ours, theirs = ours_and_theirs(run, folder, dtype)
        assert ours.std() > 0.1, "logits near zero would agree with anything"
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * ours.abs().max().item())
