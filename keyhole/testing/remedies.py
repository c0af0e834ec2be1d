"""What mends a leak, as code to copy. Legend: B rows, T tokens, W width, H heads, D head width, E experts."""

from __future__ import annotations

RUNNING_NORM = """\
# the running form of a norm over the text: each token knows what came before it, itself included
square = heads_BTHD.square().sum(-1, keepdim=True)        # (batch, time, heads, 1)
norm = square.cumsum(1).clamp_min(1e-30).sqrt()           # was: square.sum(1, keepdim=True).sqrt()
y_BTHD = heads_BTHD * norm                                # or divide by it; its state is square's last running sum"""

RUNNING_MEAN = """\
# the running form of a mean over the text
count_T1 = torch.arange(1, x_BTW.shape[1] + 1, device=x_BTW.device)[:, None]
mean_BTW = x_BTW.cumsum(1) / count_T1                     # was: x_BTW.mean(1, keepdim=True)
y_BTW = x_BTW - mean_BTW"""

RUNNING_MOMENTS = """\
# the running form of a mean and a variance over the text
count_T1 = torch.arange(1, x_BTW.shape[1] + 1, device=x_BTW.device)[:, None]
mean_BTW = x_BTW.cumsum(1) / count_T1                     # was: x_BTW.mean(1, keepdim=True)
var_BTW = x_BTW.square().cumsum(1) / count_T1 - mean_BTW.square()
y_BTW = (x_BTW - mean_BTW) / (var_BTW.clamp_min(0) + 1e-5).sqrt()"""

OWN_PLACE = """\
# measure by the token's own place, or by a length fixed when the part is built, never by how long the text is
place_T1 = torch.arange(1, x_BTW.shape[1] + 1, device=x_BTW.device)[:, None]
y_BTW = x_BTW.cumsum(1) / place_T1                        # was: ... / x_BTW.shape[1]"""

SHIFT = """\
# look back, not ahead: the earlier tokens move to the right
before_BTW = torch.nn.functional.pad(x_BTW, (0, 0, 1, 0))[:, :-1]    # was: x_BTW[:, 1:] padded at the end
# and a convolution is padded on its left alone: pad(x_BWT, (kernel - 1, 0))"""

MASK = """\
# the future weighs nothing, and the softmax runs over what is read (the keys, the last dimension)
causal_TT = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=scores_BHTT.device).tril()
weights_BHTT = scores_BHTT.masked_fill(~causal_TT, float("-inf")).softmax(-1)"""

BLOCKS = """\
# within a block each token reads the block so far; whole sums are handed on only to later blocks
# (for blocks of C tokens, T a multiple of C)
blocks_BNCW = x_BTW.unflatten(1, (-1, C))
before_BN1W = blocks_BNCW.sum(2, keepdim=True).cumsum(1) - blocks_BNCW.sum(2, keepdim=True)
y_BTW = (before_BN1W + blocks_BNCW.cumsum(2)).flatten(1, 2)          # was: blocks_BNCW.mean(2) for the whole block"""

PADDED_FFT = """\
# a convolution by FFT is padded to twice the length, or the end comes round to the beginning
T = x_BTW.shape[1]
spectrum = torch.fft.rfft(x_BTW.mT, n=2 * T) * torch.fft.rfft(kernel_WT[:, :T], n=2 * T)
y_BTW = torch.fft.irfft(spectrum, n=2 * T)[..., :T].mT"""

TOKEN_CHOICE = """\
# each token chooses its experts; experts that choose their tokens compare earlier ones with later ones
gate_BTE, chosen_BTE = scores_BTE.softmax(-1).topk(2, dim=-1)        # was: scores_BTE.softmax(-1).topk(capacity, dim=1)"""

OWN_ROW = """\
# statistics of the token itself, not of the batch it happens to stand in
mean_BT1 = x_BTW.mean(-1, keepdim=True)                   # was: x_BTW.mean(0) or x_BTW.mean((0, 1))
y_BTW = (x_BTW - mean_BT1) / (x_BTW.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()"""

PADDING = """\
# padding weighs nothing: no score, no place in a sum, and none in what the sum is divided by
weights_BHTT = scores_BHTT.masked_fill(~mask_BT[:, None, None, :], float("-inf")).softmax(-1).nan_to_num(0.0)
total_BTW = (x_BTW * mask_BT[..., None]).cumsum(1)
mean_BTW = total_BTW / mask_BT.cumsum(1).clamp_min(1)[..., None]"""

DETACH = """\
# what the result does not depend on must not be in its gradient either
y_BTW = honest_BTW                                        # was: honest_BTW + (ahead_BTW - ahead_BTW.detach())"""
