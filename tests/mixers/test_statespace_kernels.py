"""Each fast form against its definition. Legend: see keyhole.mixers.statespace_kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from statespace_examples import VARIANTS, assert_all_close, explicit_powers, make, normal, value_and_gradients

from keyhole.mixers import statespace_kernels as kernels
from keyhole.mixers.flops import complex_fft, fft, measure

LENGTHS = [1, 2, 3, 7, 64, 65]


@pytest.mark.parametrize(("structure", "inputs"), VARIANTS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_kernel_is_made_of_explicit_powers(tokens, structure, inputs):
    system = make(structure, inputs).system
    weights = list(system.parameters())
    weight = normal(system.systems, system.channels, system.channels, tokens, seed=4)
    definition = lambda: system.definition(torch.float64)  # noqa: E731
    by_powers = value_and_gradients(lambda: explicit_powers(*definition(), tokens), weights, weight)
    in_turn = value_and_gradients(lambda: kernels.reference_kernel(*definition(), tokens), weights, weight)
    quickly = value_and_gradients(lambda: system.kernel(tokens, torch.float64), weights, weight)
    assert_all_close(in_turn, by_powers, 1e-12)
    assert_all_close(quickly, by_powers, 1e-11)


def explicit_divided_powers(a_G, s_G, tokens):
    """((a+s)^l - a^l)/s = sum over j < l of (a+s)^j a^(l-1-j): no division, no difference."""
    r = a_G + s_G
    lags = [sum((r**j * a_G ** (lag - 1 - j) for j in range(lag)), torch.zeros_like(a_G)) for lag in range(tokens)]
    return torch.stack(lags, -1)


SHIFTS = [0.0, *(sign * 10.0**-k for k in range(1, 17) for sign in (1, -1)), 0.45, -0.45, -0.5, 0.5, -0.9, -1.0, -1.2]


@pytest.mark.parametrize("a", [0.02, 0.5, 0.97])
def test_divided_powers_are_exact_at_and_around_a_shift_of_zero(a):
    """In value and both gradients, over every distance from 1 down to rounding, and through an eigenvalue of zero."""
    s_G = torch.tensor([*SHIFTS, -a], dtype=torch.float64)
    s_G = s_G[(a + s_G).abs() < 1].requires_grad_()
    a_G = torch.full_like(s_G, a).requires_grad_()
    weight = normal(len(s_G), 40, seed=3)
    found = value_and_gradients(lambda: kernels.divided_powers(a_G, s_G, 40), [a_G, s_G], weight)
    expected = value_and_gradients(lambda: explicit_divided_powers(a_G, s_G, 40), [a_G, s_G], weight)
    assert_all_close(found, expected, 1e-12)


def test_divided_powers_at_zero_are_the_slope_of_a_power():
    a_G = torch.tensor([0.9], dtype=torch.float64)
    lag = torch.arange(300, dtype=torch.float64)
    expected = lag * a_G ** (lag - 1)
    torch.testing.assert_close(kernels.divided_powers(a_G, torch.zeros_like(a_G), 300)[0], expected)


def test_divided_powers_in_float32_keep_their_digits_where_the_difference_has_lost_them():
    s_G = torch.tensor([0.0, 1e-7, -1e-6, 1e-5, -1e-4, 1e-3])
    a_G = torch.full_like(s_G, 0.99).requires_grad_()
    exact = kernels.divided_powers(a_G.detach().double(), s_G.double(), 500)
    size = exact.max()
    assert ((kernels.divided_powers(a_G, s_G, 500) - exact) / size).abs().max() < 1e-4
    naive = (kernels.powers(a_G + s_G, 500) - kernels.powers(a_G, 500)) / s_G[:, None]
    assert ((naive - exact) / size)[1:3].abs().max() > 1e-2, "the control: the plain difference is seen failing"


def test_a_rank_one_mixer_whose_w_and_u_are_orthogonal_has_finite_gradients():
    """s = w.u = 0 exactly, where the closed form divides zero by zero."""
    for inputs in ("channel", "head"):
        mixer = make("rank-one", inputs, state=2)
        mixer.system.rank_2GN.data[0], mixer.system.rank_2GN.data[1] = torch.tensor([[1.0, 0.0], [0.0, 0.5]]).double()
        x, weights = normal(2, 20, 6), list(mixer.parameters())
        found = value_and_gradients(lambda m=mixer, x=x: m(x), weights, normal(2, 20, 6, seed=2))
        expected = value_and_gradients(lambda m=mixer, x=x: m(x, impl="reference"), weights, normal(2, 20, 6, seed=2))
        assert_all_close(found, expected, 1e-11)


def test_a_long_diagonal_kernel_in_float32_keeps_its_phases():
    """At l = 4000 an angle of 3 times l is known in float32 to .001 only; the tables are made in float64."""
    system = make("diagonal").system
    with torch.no_grad():
        system.modes_2GN[0].fill_(-13)  # hardly any decay
        exact = system.kernel(4000, torch.float64)
        assert_all_close([system.kernel(4000, torch.float32)], [exact], 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("tokens", [*LENGTHS, 100])
def test_convolution_by_fft_is_the_sum(tokens, dtype):
    u = normal(2, 3, 4, tokens).to(dtype) * (1 + 0.5j if dtype.is_complex else 1)
    K = normal(3, 1, tokens, seed=1).to(dtype) * (1 - 2j if dtype.is_complex else 1)
    torch.testing.assert_close(kernels.convolve(u, K), kernels.reference_convolution(u, K), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [*LENGTHS, 100])
def test_the_scan_by_doubling_is_the_recurrence(tokens):
    A = normal(3, 4, 4) / 4
    z = normal(2, 3, 4, tokens, seed=1)
    torch.testing.assert_close(kernels.doubling_states(A, z), kernels.reference_states(A, z), rtol=0, atol=1e-12)


@given(least=st.integers(1, 20000))
def test_a_fast_length_is_the_smallest_product_of_twos_threes_and_fives(least):
    def is_fast(number):
        for prime in (2, 3, 5):
            while number % prime == 0:
                number //= prime
        return number == 1

    found = kernels.fast_length(least)
    assert is_fast(found)
    assert not any(is_fast(number) for number in range(least, found))
    assert kernels.padded_length(least) >= 2 * least


def test_flops_of_transforms_and_complex_products_are_counted_by_their_table():
    real, both = torch.zeros(3, 20), torch.zeros(3, 20, dtype=torch.complex64)
    assert measure(lambda: torch.fft.rfft(real)) == 3 * fft(20)
    assert measure(lambda: torch.fft.irfft(both, 24)) == 3 * fft(24)
    assert measure(lambda: torch.fft.fft(both, 24)) == measure(lambda: torch.fft.ifft(both, 24)) == 3 * complex_fft(24)
    assert measure(lambda: both @ both.T) == 4 * 2 * 3 * 20 * 3
