"""What a person might write: one part of each kind, right and wrong, in one file."""

RIGHT = '''
import torch
from torch import nn

class Mine(nn.Module):
    """The least a mixer can be: a running mean of the tokens so far."""
    def __init__(self, width, heads, block, **options):
        super().__init__()
        self.map = nn.Linear(width, width)
        self.options = options
    def forward(self, x):
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.map(x.cumsum(1) / steps)

class Stepping(Mine):
    """The same with a state."""
    def begin(self, batch, like):
        return like.new_zeros(batch, 1, self.map.in_features), 0
    def step(self, x, state):
        total, seen = state
        sums = total + x.cumsum(1)
        count = seen + torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.map(sums / count), (sums[:, -1:], seen + x.shape[1])

class Adding(nn.Module):
    """A position that adds, and knows where it starts."""
    def __init__(self, block, width, size=1.0):
        super().__init__()
        self.table = nn.Parameter(torch.randn(block, width) * size)
    def add(self, x, start):
        return x + self.table[start : start + x.shape[1]]

class Whole(nn.Module):
    """The least a position can be."""
    def __init__(self, width):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(width))
    def forward(self, x):
        return x + self.slope * torch.arange(x.shape[1])[:, None] / 10

class Turning(nn.Module):
    """A position that scales queries and keys, by numbers that it learns."""
    def __init__(self, width, heads, block):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, block)[:, None].repeat(1, width // heads))
    def turn(self, x, start):
        return x * self.scale[start : start + x.shape[-2]]

class Distance(nn.Module):
    """A position that adds to scores."""
    def __init__(self, heads):
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(0.1, 1, heads))
    def bias(self, queries, keys):
        return -self.slope[:, None, None] * (queries[:, None] - keys[None, :])

class Half(nn.Module):
    """A merge of single tokens, a norm, a feed: whatever takes an x and returns one."""
    tokenwise = True
    def __init__(self, factor=0.5, times=1, label="a", on=True, extra=None):
        super().__init__()
        self.factor = factor
    def forward(self, x):
        return x * self.factor

class Constant(nn.Module):
    """A norm with a constant, which stays in float32 whatever the parameters become."""
    tokenwise = True
    def __init__(self, width):
        super().__init__()
        self.register_buffer("sizes", torch.linspace(0.5, 1.5, width))
    def forward(self, x):
        return x * self.sizes

class Layered(nn.Module):
    def __init__(self, width, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x):
        return x * (self.layer + 1)
'''

WRONG = """
import torch
from torch import nn

class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("I cannot")

class Wider(nn.Module):
    def forward(self, x):
        return torch.cat((x, x), -1)

class Pair(nn.Module):
    def forward(self, x):
        return x, x

class NaN(nn.Module):
    def forward(self, x):
        return x / 0

class BadStart(nn.Module):
    def __init__(self):
        super().__init__()
        self.missing = undefined

class Wants(nn.Module):
    def __init__(self, depth):
        super().__init__()

class AddsWider(nn.Module):
    def add(self, x, start):
        return torch.cat((x, x), -1)

class AddsNaN(nn.Module):
    def add(self, x, start):
        return x * float("nan")

class TurnsShort(nn.Module):
    def turn(self, x, start):
        return x[..., :-1, :]

class TurnsNaN(nn.Module):
    def turn(self, x, start):
        return x / 0

class BiasFlat(nn.Module):
    def bias(self, queries, keys):
        return queries.float()

class BiasRaises(nn.Module):
    def bias(self, queries, keys):
        return {}["gone"]

class NoModule:
    pass

def function():
    pass
"""
