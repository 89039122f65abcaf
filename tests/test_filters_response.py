import numpy as np
import pytest
import scipy.linalg
import scipy.signal

from doppler_hf.filters import (
    PAPER_FILTERS,
    LowPassFilter,
    butterworth,
    impulse_response,
    momentum,
    noise_gain,
    step_response,
)

FILTERS = {**PAPER_FILTERS, "butterworth": butterworth(4, 0.1), "average": LowPassFilter(b=(0.25,) * 4)}


def dimpulse(low_pass_filter: LowPassFilter, steps: int) -> np.ndarray:
    """The impulse response by simulating SciPy's state space, not its filter routine."""
    length = low_pass_filter.order + 1
    b, a = (np.pad(values, (0, length - len(values))) for values in (low_pass_filter.b, low_pass_filter.a))
    a_matrix, b_matrix, c_matrix, d_matrix = scipy.signal.tf2ss(b, a)
    _, output, _ = scipy.signal.dlsim((a_matrix, b_matrix, c_matrix, d_matrix, 1), np.eye(steps)[0])
    return output[:, 0]


@pytest.mark.parametrize("name", FILTERS)
def test_impulse_and_step_response_match_scipy(name):
    kappa = dimpulse(FILTERS[name], 50)
    np.testing.assert_allclose(impulse_response(FILTERS[name], 50), kappa, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(step_response(FILTERS[name], 50), np.cumsum(kappa), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FILTERS)
def test_step_response_stays_positive_and_ends_at_one(name):
    response = step_response(FILTERS[name], 1000)
    assert response.min() > 0
    np.testing.assert_allclose(response[-1], 1, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", [name for name in FILTERS if FILTERS[name].order])
def test_noise_gain_solves_the_lyapunov_equation(name):
    low_pass_filter = FILTERS[name]
    length = low_pass_filter.order + 1
    b, a = (np.pad(values, (0, length - len(values))) for values in (low_pass_filter.b, low_pass_filter.a))
    a_matrix, b_matrix, c_matrix, d_matrix = scipy.signal.tf2ss(b, a)
    covariance = scipy.linalg.solve_discrete_lyapunov(a_matrix, b_matrix @ b_matrix.T)
    expected = (c_matrix @ covariance @ c_matrix.T + d_matrix**2).item()
    np.testing.assert_allclose(noise_gain(low_pass_filter), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.9999])
def test_noise_gain_of_momentum_is_known(beta):
    np.testing.assert_allclose(noise_gain(momentum(beta)), (1 - beta) / (1 + beta), rtol=1e-9, atol=0)


def test_noise_gain_of_filters_without_feedback_is_the_sum_of_squares():
    assert noise_gain(PAPER_FILTERS["none"]) == 1.0
    np.testing.assert_allclose(noise_gain(LowPassFilter(b=np.full(6000, 1 / 6000))), 1 / 6000, rtol=1e-12, atol=0)


@pytest.mark.parametrize("response", [impulse_response, step_response])
def test_no_steps_are_refused(response):
    with pytest.raises(ValueError, match="steps is 0"):
        response(PAPER_FILTERS["f1"], 0)
