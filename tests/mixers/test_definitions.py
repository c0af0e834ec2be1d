"""Each mixer's reference is its equation, spelt out token by token from the projections on. Legend: see the mixers."""

import pytest
import torch
from mixer_examples import WIDTH, heads_of, make_mixer, normal

from keyhole.mixers.normalised import EPS
from keyhole.mixers.polynomial import feature_count, square_features


def outputs(mixer, one_token, T=17):
    """The mixer's result from a function (q_t, K up to t, V up to t) -> o_t for one head of one row."""
    x = normal(2, T, WIDTH, seed=5)
    q, k, v = heads_of(mixer, x)
    o = torch.stack(
        [
            torch.stack(
                [
                    torch.stack([one_token(q[b, h, t], k[b, h, : t + 1], v[b, h, : t + 1], h) for t in range(T)])
                    for h in range(q.shape[1])
                ]
            )
            for b in range(len(x))
        ]
    )
    return mixer.out(o.transpose(1, 2).flatten(2)), mixer(x, impl="reference")


def assert_equal(pair):
    torch.testing.assert_close(*pair, rtol=0, atol=1e-12)


def test_linear_attention_is_its_equation():
    def one_token(q, K, V, _):
        phi = lambda x: torch.where(x > 0, x + 1, x.exp())  # noqa: E731 - as on paper
        S = sum(torch.outer(phi(k), v) for k, v in zip(K, V, strict=True))
        z = sum(phi(k) for k in K)
        return S.T @ phi(q) / (EPS + z @ phi(q))

    assert_equal(outputs(make_mixer("linear"), one_token))


@pytest.mark.parametrize("offset", [0, 1])
def test_polynomial_attention_is_its_equation(offset):
    def one_token(q, K, V, _):
        weight = (offset + K @ q / q.shape[0] ** 0.5) ** 2
        return weight @ V / (EPS + weight.sum())

    assert_equal(outputs(make_mixer("polynomial", offset=offset), one_token))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("channels", [1, 2, 5, 16])
def test_the_features_of_the_square_have_the_square_as_their_product(channels, offset):
    x, y = normal(channels), normal(channels, seed=1)
    features = square_features(x, offset)
    assert len(features) == feature_count(channels, offset)
    torch.testing.assert_close(features @ square_features(y, offset), (offset + x @ y) ** 2, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("decay", [1.0, 0.8])
@pytest.mark.parametrize("lam", [1.0, 0.05])
def test_ridge_attention_is_a_ridge_regression_for_each_token(lam, decay):
    mixer = make_mixer("ridge", lam=lam, decay=decay)
    exact = float(mixer.log_lam[0].detach().exp())  # a parameter of float32 holds .05 to seven digits
    assert exact == pytest.approx(lam, rel=1e-6)

    def one_token(q, K, V, _):
        age = torch.arange(len(K) - 1, -1, -1, dtype=torch.float64)
        weight = decay**age
        # argmin over M of sum of g^age |v - M k|^2 + g^t lam |M|^2, answered at q
        H = (weight[:, None] * K).T @ K + decay ** len(K) * exact * torch.eye(K.shape[1], dtype=torch.float64)
        M = torch.linalg.lstsq(H, (weight[:, None] * K).T @ V).solution
        return M.T @ q

    torch.testing.assert_close(*outputs(mixer, one_token), rtol=0, atol=1e-10)


def test_each_head_of_ridge_attention_has_a_lam_of_its_own():
    mixer = make_mixer("ridge")
    mixer.log_lam.data = torch.tensor([-2.0, -1.0, 0.0, 1.0], dtype=torch.float64)

    def one_token(q, K, V, h):
        H = K.T @ K + mixer.log_lam[h].exp() * torch.eye(K.shape[1], dtype=torch.float64)
        return V.T @ K @ torch.linalg.solve(H, q)

    assert_equal(outputs(mixer, one_token))


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_window_is_a_softmax_over_the_last_tokens(window):
    def one_token(q, K, V, _):
        K, V = K[-window:], V[-window:]
        return torch.softmax(K @ q / q.shape[0] ** 0.5, 0) @ V

    assert_equal(outputs(make_mixer("window", window=window), one_token))


def test_the_average_is_the_mean_of_values():
    mixer, x = make_mixer("average"), normal(2, 9, WIDTH)
    means = torch.stack([(x[:, : t + 1] @ mixer.value.weight.T).mean(1) for t in range(9)], 1)
    assert_equal((mixer.out(means), mixer(x, impl="reference")))


def test_the_recurrent_network_is_its_equation():
    mixer, x = make_mixer("recurrent"), normal(2, 9, WIDTH)
    h, states = torch.zeros(2, WIDTH, dtype=torch.float64), []
    for t in range(9):
        h = torch.tanh(h @ mixer.recur.weight.T + x[:, t] @ mixer.drive.weight.T + mixer.drive.bias)
        states.append(h)
    assert_equal((mixer.out(torch.stack(states, 1)), mixer(x, impl="reference")))


def test_the_recurrent_pattern_is_the_size_of_the_jacobian():
    mixer, T = make_mixer("recurrent"), 6
    x = normal(1, T, WIDTH)
    mixer.drive.weight.data = torch.eye(WIDTH, dtype=torch.float64)  # then x is what drives
    states = lambda drive: mixer.look(drive[None]).heads_BTHD.flatten(2)[0]  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(states, x[0])  # (t, W, s, W)
    size = jacobian.unflatten(1, (4, -1)).square().sum((2, 4)) / (WIDTH // 4)
    torch.testing.assert_close(mixer.look(x).pattern_BHTT[0], size.sqrt().transpose(0, 1), rtol=0, atol=1e-10)
