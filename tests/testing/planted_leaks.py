"""Parts that know what they may not, one way each, and honest ones that look like them; names say how."""

import torch
from torch import nn


class HeadNorm(nn.Module):
    """A merge: each head times its norm over the whole text."""

    over = 1

    def forward(self, heads):
        return heads * heads.square().sum((self.over, 3), keepdim=True).sqrt()


class BatchHeadNorm(nn.Module):
    """A merge: each head times its norm at this place over all rows of the batch."""

    def forward(self, heads):
        return heads * heads.square().sum((0, 3), keepdim=True).sqrt()


class WholeHeadNorm(nn.Module):
    """A merge: each head times its norm over the whole batch and the whole text."""

    def forward(self, heads):
        return heads * heads.square().sum((0, 1, 3), keepdim=True).sqrt()


class Attends(nn.Module):
    """Queries, keys and values of several heads, and the way back: what the leaking attentions below share."""

    def __init__(self, width, heads, block):  # noqa: ARG002
        super().__init__()
        self.heads, self.project, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def split(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))

    def join(self, o):
        return self.out(o.transpose(1, 2).flatten(2))

    def scores(self, x):
        q, k, v = self.split(x)
        return q @ k.mT / q.shape[-1] ** 0.5, v, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


class TotalLengthFeatures(Attends):
    """Linear attention whose features turn by place / length of the whole text (as cosformer's do)."""

    def forward(self, x):
        q, k, v = self.split(x)
        angle = torch.pi / 2 * torch.arange(x.shape[1])[:, None] / x.shape[1]
        q, k = (torch.cat((part.relu() * angle.cos(), part.relu() * angle.sin()), -1) for part in (q, k))
        weights = (q @ k.mT).tril()
        return self.join(weights @ v / (weights.sum(-1, keepdim=True) + 1))


class PooledLandmarks(Attends):
    """Attention through landmarks that are means of segments of the whole text (as in a careless Nystrom)."""

    def forward(self, x):
        q, k, v = self.split(x)
        marks = min(4, x.shape[1])
        pooled = [torch.stack([s.mean(2) for s in part.tensor_split(marks, 2)], 2) for part in (q, k)]
        scale = q.shape[-1] ** -0.5
        first, last = (q @ pooled[1].mT * scale).softmax(-1), (pooled[0] @ k.mT * scale).softmax(-1)
        return self.join((first @ last).tril() @ v)


class SoftmaxOverQueries(Attends):
    """The softmax runs over the queries instead of the keys."""

    def forward(self, x):
        scores, v, causal = self.scores(x)
        return self.join(scores.masked_fill(~causal, float("-inf")).softmax(-2) @ v)


class FiniteMask(Attends):
    """Later tokens are masked by adding -1e4 to their scores."""

    def forward(self, x):
        scores, v, causal = self.scores(x)
        return self.join((scores - 1e4 * ~causal).softmax(-1) @ v)


class FinitePaddingMask(Attends):
    """Later tokens are masked with -inf; padding by adding -1e4."""

    def forward(self, x, mask=None):
        scores, v, causal = self.scores(x)
        if mask is not None:
            scores = scores - 1e4 * ~mask[:, None, None, :]
        return self.join(scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v)


class BlockMeans(nn.Module):
    """Every token reads the mean of its block of 8."""

    def forward(self, x):
        return x + torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in x.split(8, 1)], 1)


class InstanceNorm(nn.Module):
    """A norm: each channel over the whole text."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt() * self.gain


class GroupNormOverTime(nn.Module):
    """A norm: torch's GroupNorm, which also takes its statistics over time."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x):
        return self.norm(x.mT).mT


class MeanOverTime(nn.Module):
    """A norm: takes the text's mean away."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True)


class ExpertChoice(nn.Module):
    """A feed: each expert chooses the tokens that it likes best, among all of the text."""

    def __init__(self, width):
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4), nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        scores, y = self.router(x).softmax(-1), x
        for number, expert in enumerate(self.experts):
            score, chosen = scores[..., number].topk(-(-x.shape[1] // 4), dim=1)
            index = chosen[..., None].expand(-1, -1, x.shape[-1])
            y = y.scatter_add(1, index, expert(x.gather(1, index)) * score[..., None])
        return y


class LeakingGradient(nn.Module):
    """Its results are honest; their gradient comes from the next token."""

    def forward(self, x):
        following = nn.functional.pad(x, (0, 0, 0, 1))[:, 1:]
        return x + following - following.detach()


class NextToken(nn.Module):
    """A convolution that is padded on both sides."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        return self.conv(x.mT).mT


class RunningMoments(nn.Module):
    """An honest norm: mean and variance of each channel so far."""

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        mean = x.cumsum(1) / count
        return (x - mean) / ((x.square().cumsum(1) / count - mean.square()).clamp_min(0) + 1e-5).sqrt()


class RunningHeadNorm(nn.Module):
    """An honest merge: each head times its norm so far."""

    def forward(self, heads):
        return heads * heads.square().sum(3, keepdim=True).cumsum(1).clamp_min(1e-30).sqrt()


class Dropping(Attends):
    """Honest attention with dropout on its weights and its result."""

    def __init__(self, width, heads, block):
        super().__init__(width, heads, block)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        scores, v, causal = self.scores(x)
        return self.drop(self.join(self.drop(scores.masked_fill(~causal, float("-inf")).softmax(-1)) @ v))


class TokenChoice(ExpertChoice):
    """An honest feed: each token chooses its two experts."""

    def forward(self, x):
        gate, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weight = torch.zeros(*x.shape[:2], 4).scatter(-1, chosen, gate)
        return x + sum(expert(x) * weight[..., number : number + 1] for number, expert in enumerate(self.experts))


AHEAD = {"suffix", "unaligned cuts", "truncation", "future gradient"}
"""The rules that a part breaks which reads the whole text."""

LEAKS = {
    (HeadNorm, "merge"): (AHEAD, "a norm over the whole text"),
    (BatchHeadNorm, "merge"): ({"batch-mates"}, ""),
    (WholeHeadNorm, "merge"): (AHEAD | {"batch-mates"}, "a norm over the whole text"),
    (TotalLengthFeatures, "mixer"): ({"truncation"}, "how long the whole text is"),
    (PooledLandmarks, "mixer"): (AHEAD, "sum or softmax over time"),
    (SoftmaxOverQueries, "mixer"): (AHEAD, "sum or softmax over time"),
    (FiniteMask, "mixer"): ({"suffix", "unaligned cuts"}, "a finite number such as -1e4"),
    (FinitePaddingMask, "mixer"): ({"padding"}, ""),
    (BlockMeans, "mixer"): ({"unaligned cuts", "truncation", "future gradient"}, "whole blocks of 8 tokens"),
    (InstanceNorm, "norm"): (AHEAD, "mean and variance over the whole text"),
    (GroupNormOverTime, "norm"): (AHEAD, "mean and variance over the whole text"),
    (MeanOverTime, "norm"): (AHEAD, "a mean over the whole text"),
    (ExpertChoice, "feed"): (AHEAD - {"future gradient"}, "compete with later ones to be chosen"),
    (LeakingGradient, "mixer"): ({"future gradient"}, "their gradient is not"),
    (NextToken, "mixer"): (AHEAD, "reads 1 ahead"),
}
"""Each leak, the rules of honesty that it breaks, and what its diagnosis says."""

HONEST = [(RunningMoments, "mixer"), (RunningHeadNorm, "merge"), (Dropping, "mixer"), (TokenChoice, "feed")]
