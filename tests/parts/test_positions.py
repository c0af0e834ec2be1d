"""Legend: B rows, T tokens, W width, H heads, D head width."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.core.errors import InputError
from keyhole.parts.position import Alibi, Learned, NoPosition, Rope, Sinusoidal, angles

# The tables are kept in float32, so what is computed from them in float64 agrees with theory to about 1e-7 an entry.
TABLE = 3e-7
PAIRS = ["halves", "interleaved"]


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rope(pairs, block=64, width=24, heads=3, base=10000.0) -> Rope:
    return Rope(width, heads, block, base=base, pairs=pairs)


def exact_rope(x_BHTD, pairs, start, base=10000.0):
    """The definition in complex numbers: channel pair i at position t is multiplied by exp(i t base^(-2i/D))."""
    T, D = x_BHTD.shape[-2:]
    time, pair = torch.arange(start, start + T, dtype=torch.float64), torch.arange(D // 2, dtype=torch.float64)
    turn = torch.polar(torch.ones(T, D // 2, dtype=torch.float64), time[:, None] * base ** (-2 * pair / D))
    if pairs == "halves":
        turned = torch.complex(x_BHTD[..., : D // 2], x_BHTD[..., D // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), -1)
    turned = torch.view_as_complex(x_BHTD.unflatten(-1, (-1, 2))) * turn
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("pairs", PAIRS)
@given(start=st.integers(0, 60), tokens=st.integers(1, 4), base=st.sampled_from([10000.0, 500.0]))
def test_rope_is_a_product_of_complex_numbers(pairs, start, tokens, base):
    x = normal(2, 3, tokens, 8, seed=start)
    found = rope(pairs, base=base).turn(x, start)
    torch.testing.assert_close(found, exact_rope(x, pairs, start, base), rtol=0, atol=8 * TABLE)


@pytest.mark.parametrize("pairs", PAIRS)
@given(q_at=st.integers(0, 900), distance=st.integers(-900, 900), shift=st.integers(0, 100))
def test_the_score_of_two_turned_vectors_depends_on_their_distance_alone(pairs, q_at, distance, shift):
    k_at = min(max(q_at - distance, 0), 900)
    part, q, k = rope(pairs, block=1024), normal(1, 3, 1, 8, seed=1), normal(1, 3, 1, 8, seed=2)
    score = (part.turn(q, q_at) * part.turn(k, k_at)).sum(-1)
    moved = (part.turn(q, q_at + shift) * part.turn(k, k_at + shift)).sum(-1)
    torch.testing.assert_close(score, moved, rtol=0, atol=40 * TABLE)


@pytest.mark.parametrize("pairs", PAIRS)
def test_the_score_does_depend_on_the_distance(pairs):
    part, q, k = rope(pairs), normal(1, 3, 1, 8, seed=1), normal(1, 3, 1, 8, seed=2)
    scores = [(part.turn(q, 10) * part.turn(k, at)).sum(-1) for at in range(10)]
    assert min((a - b).abs().min() for i, a in enumerate(scores) for b in scores[:i]) > 1e-3


@pytest.mark.parametrize("pairs", PAIRS)
def test_turning_keeps_every_norm_and_leaves_position_0_alone(pairs):
    x = normal(2, 3, 64, 8)
    turned = rope(pairs).turn(x, 0)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=TABLE, atol=0)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    assert not torch.allclose(turned[:, :, 1], x[:, :, 1], atol=1e-2)


@pytest.mark.parametrize("pairs", PAIRS)
def test_the_written_gradient_of_the_turn_is_the_true_one(pairs):
    part = rope(pairs, block=8)
    x = normal(1, 3, 4, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: part.turn(x, 3), x)


def test_rope_angles_are_exact_where_half_precision_would_not_be():
    """In bfloat16 the angle itself would be off by .84 at position 30,000: the table must not know."""
    part = rope("halves", block=30_001)
    exact = torch.cos(30_000 * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4))
    torch.testing.assert_close(part.cos_TD[30_000, :4].double(), exact, rtol=0, atol=1e-7)


@pytest.mark.parametrize("pairs", PAIRS)
def test_rope_in_bfloat16_is_as_good_as_rounding(pairs):
    x = normal(2, 3, 64, 8)
    found = rope(pairs).turn(x.bfloat16(), 0)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact_rope(x, pairs, 0)).abs().max() < 4 * 2**-8 * x.abs().max()


def test_rope_refuses_a_head_it_cannot_pair_and_pairs_it_does_not_know():
    with pytest.raises(InputError, match="a head of width 3 is odd; use width / heads even"):
        Rope(9, 3, 8)
    with pytest.raises(InputError, match='rope pairs = \'thirds\' is not valid; it may be "halves" or "interleaved"'):
        Rope(12, 3, 8, pairs="thirds")


@pytest.mark.parametrize("width", [1, 2, 7, 16])
def test_sinusoidal_is_its_formula_entry_by_entry(width):
    found = Sinusoidal(width, 50).add(torch.zeros(1, 50, width, dtype=torch.float64), 0)[0]
    for t in range(50):
        for channel in range(width):
            wave = math.sin if channel % 2 == 0 else math.cos
            assert found[t, channel].item() == pytest.approx(wave(t / 10000 ** (channel // 2 * 2 / width)), abs=1e-7)


def test_sinusoidal_takes_a_base():
    found = Sinusoidal(4, 8, base=100.0).table_TW[5]
    expected = [math.sin(5), math.cos(5), math.sin(0.5), math.cos(0.5)]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-7)


def test_angles_grow_evenly_with_the_position():
    torch.testing.assert_close(angles(9, 6, 10000.0), torch.arange(9.0).double()[:, None] * angles(2, 6, 10000.0)[1])


def test_learned_adds_the_vector_of_each_position():
    part = Learned(6, 20)
    torch.nn.init.normal_(part.weight)
    x = torch.randn(2, 5, 6)
    found = part.add(x, 7)
    for t in range(5):
        assert torch.equal(found[:, t], x[:, t] + part.weight[7 + t])


def test_no_position_leaves_the_embedding_as_it_is():
    x = torch.randn(2, 5, 6)
    assert torch.equal(NoPosition().add(x, 3), x)


@pytest.mark.parametrize("make", [lambda: Learned(6, 30), lambda: Sinusoidal(6, 30)], ids=["learned", "sinusoidal"])
@given(cuts=st.lists(st.integers(0, 30), max_size=3))
def test_adding_in_pieces_is_adding_at_once(make, cuts):
    part = make()
    for weight in part.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(2, 30, 6)
    ends = sorted({0, *cuts, 30})
    pieces = [part.add(x[:, a:b], a) for a, b in pairwise(ends)]
    assert torch.equal(torch.cat(pieces, 1), part.add(x, 0))


@pytest.mark.parametrize("pairs", PAIRS)
@given(cuts=st.lists(st.integers(0, 30), max_size=3))
def test_turning_in_pieces_is_turning_at_once(pairs, cuts):
    part, x = rope(pairs, block=30), normal(2, 3, 30, 8)
    ends = sorted({0, *cuts, 30})
    pieces = [part.turn(x[:, :, a:b], a) for a, b in pairwise(ends)]
    assert torch.equal(torch.cat(pieces, 2), part.turn(x, 0))


def test_alibi_slopes_of_eight_heads_are_the_powers_of_one_half():
    assert Alibi(8).slope_H.tolist() == [2.0**-h for h in range(1, 9)]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 12])
def test_alibi_takes_the_slope_times_the_distance_from_the_score(heads):
    found = Alibi(heads).bias(torch.arange(3, 7), torch.arange(7))
    assert found.shape == (heads, 4, 7)
    for h in range(heads):
        for row, t in enumerate(range(3, 7)):
            for s in range(7):
                assert found[h, row, s].item() == pytest.approx(-(2 ** (-8 * (h + 1) / heads)) * (t - s), rel=1e-6)


def test_alibi_in_pieces_is_rows_of_the_whole():
    part, time = Alibi(3), torch.arange(12)
    assert torch.equal(part.bias(time[5:9], time[:9]), part.bias(time, time)[:, 5:9, :9])
