"""Mixers with one fault each. What the fault is stands in the name; all else is a built-in mixer's."""

import torch
from torch import nn

from keyhole.mixers.contract import Cost
from keyhole.mixers.heads import in_chunks, sums_before
from keyhole.mixers.linear import Linear
from keyhole.mixers.normalised import divided, with_ones
from keyhole.mixers.softmax import Softmax


class StateNotCarried(Linear):
    """Each call of step begins anew."""

    def step(self, x, state):  # noqa: ARG002
        return super().step(x, self.begin(len(x), x))


class PadInADenominator(Linear):
    """Padded tokens have no value, but they count."""

    def mix(self, q, k, v, memory, mask=None):
        if mask is not None:
            v = v * mask[:, None, :, None]
        return super().mix(q, k, v, memory, None)


class CircularFFT(nn.Module):
    """A convolution whose FFT is not padded: the end of the text comes round to its beginning."""

    def __init__(self, width, block):
        super().__init__()
        self.kernel = nn.Parameter(0.9 ** torch.arange(block).float().expand(width, block).clone())

    def forward(self, x):
        T = x.shape[1]
        spectrum = torch.fft.rfft(x.mT, n=T) * torch.fft.rfft(self.kernel[:, :T], n=T)
        return torch.fft.irfft(spectrum, n=T).mT


class PaddedFFT(CircularFFT):
    """The same, padded: the control."""

    def forward(self, x):
        T = x.shape[1]
        spectrum = torch.fft.rfft(x.mT, n=2 * T) * torch.fft.rfft(self.kernel[:, :T], n=2 * T)
        return torch.fft.irfft(spectrum, n=2 * T)[..., :T].mT


class FutureInAChunk(Linear):
    """Within a chunk everybody reads everybody."""

    def mix(self, q, k, v, memory, mask=None):
        T = q.shape[2]
        fq, fk, ones = self.feature(q), self.feature(k), with_ones(v, mask)
        cq, ck, cv = (in_chunks(x, min(self.chunk, T)) for x in (fq, fk, ones))
        before, after = sums_before(memory[0], ck.mT @ cv)
        o = (cq @ ck.mT) @ cv + cq @ before
        return divided(o.flatten(2, 3)[:, :, :T]), (after,)


class WrongCost(Linear):
    """Declares half of what it does."""

    def cost(self, tokens):
        right = super().cost(tokens)
        return Cost(right.parameters, right.flops // 2, right.state_bytes)


class StaleCache(Softmax):
    """The cache is the module's own: a new text finds the old one's keys, and a copy is no copy."""

    def begin(self, batch, like):
        if not hasattr(self, "kept"):
            self.kept = super().begin(batch, like)
            self.kept.copy = lambda: self.kept
        return self.kept


class WrongInTheLastChunk(Linear):
    """Right wherever the length is a multiple of the chunk."""

    def mix(self, q, k, v, memory, mask=None):
        o, after = super().mix(q, k, v, memory, mask)
        left = q.shape[2] % self.chunk
        if left and q.shape[2] > self.chunk:
            o = torch.cat((o[:, :, :-left], o[:, :, -left:] * 1.001), 2)
        return o, after


class HalfGradient(Linear):
    """Its results are right, its gradients are not."""

    def forward(self, x, mask=None, impl=None):
        y = super().forward(x, mask, impl)
        return y if impl == "reference" else y / 2 + y.detach() / 2


class ReadsItsNeighbours(Linear):
    """Subtracts the mean over the rows of the batch."""

    def forward(self, x, mask=None, impl=None):
        y = super().forward(x, mask, impl)
        return y - y.mean(0, keepdim=True)


class WrongHeads(Linear):
    """Shows other heads than those that wrote."""

    def look(self, x, mask=None):
        seen = super().look(x, mask)
        return type(seen)(seen.pattern_BHTT, seen.heads_BTHD.roll(1, 2))


class ModuleState(nn.Module):
    """The state lies in the module, made new by begin: two texts read in turns get into each other."""

    def __init__(self, width, heads, block):
        super().__init__()
        self.inner = Linear(width, heads, block)

    def forward(self, x):
        return self.inner(x)

    def begin(self, batch, like):
        self.kept = self.inner.begin(batch, like)

    def step(self, x, state):  # noqa: ARG002
        y, self.kept = self.inner.step(x, self.kept)
        return y, None


class ZeroOutPeeks(nn.Module):
    """Reads the mean of the whole text, and hides it behind an output that starts at zero."""

    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return self.out(x - x.mean(1, keepdim=True))


class BoundaryLeak(nn.Module):
    """The last token of every ten reads the next one."""

    def forward(self, x):
        following = torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), 1)
        last = (torch.arange(x.shape[1]) % 10 == 9)[None, :, None]
        return x + following * last


class BigChunk(nn.Module):
    """Honest up to 150 tokens; those after read one another."""

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        return torch.cat((x[:, :150].cumsum(1) / count[:150], x[:, 150:] - x[:, 150:].mean(1, keepdim=True)), 1)


class KnowsTheLength(nn.Module):
    """Divides by how long the whole text is."""

    def forward(self, x):
        return x.cumsum(1) / x.shape[1]


class RightPadOnly(Linear):
    """Forgets the mask where padding stands before the text."""

    def mix(self, q, k, v, memory, mask=None):
        keep = mask if mask is not None and bool(mask[:, 0].all()) else None
        return super().mix(q, k, v, memory, keep)


class WrongMaskInLook(Linear):
    """Shows weight on padding."""

    def look(self, x, mask=None):  # noqa: ARG002
        return super().look(x)


AHEAD = {"suffix", "unaligned cuts", "truncation", "future gradient"}
PLANTED = {
    StateNotCarried: {"recurrence", "resumed state"},
    PadInADenominator: {"padding", "look"},
    CircularFFT: AHEAD,
    FutureInAChunk: AHEAD | {"forms", "padding", "recurrence", "resumed state", "look"},
    WrongCost: {"cost"},
    StaleCache: {"recurrence", "resumed state", "cost"},
    WrongInTheLastChunk: {"truncation", "forms", "padding", "recurrence", "resumed state", "look"},
    HalfGradient: {"forms", "gradients"},
    ReadsItsNeighbours: {"batch-mates", "recurrence", "resumed state", "padding", "look"},
    WrongHeads: {"look"},
    ModuleState: {"resumed state"},
    ZeroOutPeeks: AHEAD,
    BoundaryLeak: AHEAD - {"truncation"},
    BigChunk: AHEAD - {"future gradient"},
    KnowsTheLength: {"truncation"},
    RightPadOnly: {"padding", "look"},
    WrongMaskInLook: {"look"},
}
"""Each fault and the rules that it breaks."""
