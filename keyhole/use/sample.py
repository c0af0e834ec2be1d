"""Let a run talk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from keyhole.core.errors import InputError
from keyhole.model.decode import generate
from keyhole.record.run import Run


def sample(
    run: Run,
    prompt: str = "",
    tokens: int = 200,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """The prompt and what the run writes after it."""
    return prompt + "".join(
        stream_sample(run, prompt, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    )


def stream_sample(
    run: Run,
    prompt: str = "",
    tokens: int = 200,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Yield what the run writes after the prompt, piece by piece as it is drawn. The prompt itself is not repeated."""
    tokenizer = run.tokenizer
    ids = _prompt_ids(run, prompt)
    before = tokenizer.decode(ids)
    told = len(before)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    for token in generate(run.model, ids, tokens, stop=tokenizer.stop, **options):  # type: ignore[arg-type]
        ids.append(token)
        text = tokenizer.decode(ids)
        # Half of a character's bytes decodes as a replacement sign: hold it back until the rest is there.
        if not text.endswith("\ufffd"):
            yield text[told:]
            told = len(text)
    if len(rest := tokenizer.decode(ids)) > told:
        yield rest[told:]


def _prompt_ids(run: Run, prompt: str) -> list[int]:
    """The prompt's tokens, behind START where the model was trained on rows; without a prompt, a beginning it knows."""
    tokenizer = run.tokenizer
    ids = tokenizer.encode(prompt).tolist()
    if run.recipe.data.rows != "text" and tokenizer.start is not None:
        return [tokenizer.start, *ids]
    if ids:
        return ids
    try:
        newline = tokenizer.encode("\n")
    except InputError:
        newline = np.zeros(0, dtype=np.int32)
    return newline.tolist() or [0]
