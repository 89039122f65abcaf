import math
import re

import numpy as np
import pytest
import scipy.signal

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, butterworth, chebyshev1, momentum, step_response

# The rows of the paper's two tables, copied in the paper's own form: (b, a without the leading one, denominator).
PAPER_ROWS = {
    "none": ([1], [], 1),
    "momentum": ([0.1], [-0.9], 1),
    "first-order-v1": ([1, 1], [-9], 11),
    "first-order-v2": ([3, -1], [-9], 11),
    "second-order": ([1, 2, 1], [-92, 38], 58),
    "f1": ([0.075, 0.025], [-0.9], 1),
    "f2": ([0.025, 0.075], [-0.9], 1),
    "f3": ([0.1, 0.1], [-0.8], 1),
    "f4": ([0.2, 0.2], [-0.6], 1),
    "f5": ([0.025, 0.05, 0.025], [-0.9], 1),
    "f6": ([0.025, 0.025], [-1.8, 0.85], 1),
}


def test_presets_are_the_rows_of_the_paper():
    assert list(PAPER_FILTERS) == list(PAPER_ROWS)
    for name, (b, a, denominator) in PAPER_ROWS.items():
        assert PAPER_FILTERS[name].b == tuple(value / denominator for value in b)
        assert PAPER_FILTERS[name].a == (1.0, *(value / denominator for value in a))


def test_presets_are_read_only():
    with pytest.raises(TypeError):
        PAPER_FILTERS["mine"] = PAPER_FILTERS["none"]


@pytest.mark.parametrize("coefficients", [[1, 1], np.array([1.0, 1.0]), (np.float32(1), 1)])
def test_coefficients_become_tuples_of_float(coefficients):
    low_pass_filter = LowPassFilter(b=[value / 2 for value in coefficients], a=np.array([1]))
    assert low_pass_filter == LowPassFilter(b=(0.5, 0.5))
    assert hash(low_pass_filter) == hash(LowPassFilter(b=(0.5, 0.5)))
    assert {type(value) for value in low_pass_filter.b + low_pass_filter.a} == {float}


@pytest.mark.parametrize(
    ("b", "a", "order"),
    [((1,), (1,), 0), ((0.1,), (1, -0.9), 1), ((0.2, 0.3, 0.5), (1,), 2), ((0.025, 0.05, 0.025), (1, -0.9), 2)],
)
def test_order_counts_states(b, a, order):
    assert LowPassFilter(b=b, a=a).order == order


@pytest.mark.parametrize(
    ("b", "a", "message"),
    [
        ((), (1.0,), "b is empty"),
        ((1.0,), (), "a is empty"),
        ((1.0, math.nan), (1.0,), "b[1] is nan"),
        ((1.0,), (1.0, -math.inf), "a[1] is -inf"),
        ((1.0, 0j), (1.0,), "b[1] is 0j"),
        ((2.0,), (2.0,), "a[0] is 2.0, not 1: divide b and a by a[0]"),
        ((0.3,), (1.0, -0.9), "is 3, not 1: multiply b by 0.333333333333333"),
        ((1 + 2e-6,), (1.0,), "not 1: multiply b by"),
        ((1.0, -1.0), (1.0,), "the DC gain sum(b)/sum(a) is 0"),
        ((1.0,), (1.0, -1.0), "has modulus 1, not strictly inside the unit circle"),
        ((-0.25,), (1.0, -1.25), "has modulus 1.25"),
        ((2.2,), (1.0, 1.2), "has modulus 1.2"),
        ((2.02,), (1.0, 0.0, 1.02), "has modulus 1.00995049"),
        ((0.0, 1.0), (1.0,), "is 0 at step 0"),
        ((-0.5, 1.5), (1.0,), "is -0.5 at step 0"),
        ((0.5, -0.4, -0.2, 1.1), (1.0,), "at step 2 "),
    ],
)
def test_invalid_coefficients_are_refused_with_the_offending_number(b, a, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LowPassFilter(b=b, a=a)


def test_the_factor_in_the_message_mends_the_filter():
    with pytest.raises(ValueError, match="multiply b by") as refusal:
        LowPassFilter(b=(0.3, 0.4), a=(1.0, -0.9))
    factor = float(str(refusal.value).rsplit(" ", 1)[1])
    LowPassFilter(b=(0.3 * factor, 0.4 * factor), a=(1.0, -0.9))


def test_dc_gain_tolerates_printed_coefficients():
    LowPassFilter(b=(0.3333333, 0.3333333, 0.3333334))
    LowPassFilter(b=(1 + 5e-7,))


def test_a_late_negative_step_response_is_found():
    """A late and large coefficient kicks a slow resonance: the first step below zero is the one SciPy finds."""
    a = np.poly([0.999 * np.exp(0.05j), 0.999 * np.exp(-0.05j)]).real
    b = np.zeros(5001)
    b[0], b[5000] = sum(a) + 0.02, -0.02
    response = scipy.signal.lfilter(b, a, np.ones(20000))
    first = int(np.argmax(response <= 0))
    assert first > 5000
    with pytest.raises(ValueError, match=f"at step {first} "):
        LowPassFilter(b=b, a=a)


@pytest.mark.parametrize("name", PAPER_FILTERS)
def test_presets_parse_by_name_and_print_as_it(name):
    assert LowPassFilter.parse(name) == PAPER_FILTERS[name]
    assert str(PAPER_FILTERS[name]) == name


@pytest.mark.parametrize(
    "low_pass_filter",
    [
        LowPassFilter(b=(0.3, 0.7)),
        LowPassFilter(b=(1 / 3, 2 / 3)),
        momentum(0.95),
        momentum(0.0),
        butterworth(4, 0.1),
        chebyshev1(3, 0.2, 0.5),
    ],
    ids=str,
)
def test_text_round_trip_is_exact(low_pass_filter):
    assert LowPassFilter.parse(str(low_pass_filter)) == low_pass_filter


def test_parse_reads_coefficients():
    assert LowPassFilter.parse("b=0.1,0.1;a=1,-0.8") == PAPER_FILTERS["f3"]
    assert LowPassFilter.parse(" b = 0.1, 1e-1 ; a = 1, -0.8 ") == PAPER_FILTERS["f3"]
    assert LowPassFilter.parse("b=1") == PAPER_FILTERS["none"]


@pytest.mark.parametrize("text", ["", "f7", "F1", "a=1;b=1", "b=", "b=0.5,;a=1", "b=0.1;a=1,-0.9;c=2", "b=one", "0.5,0.5"])
def test_parse_lists_presets_and_grammar(text):
    with pytest.raises(ValueError, match=re.escape(f"no filter reads {text!r}")) as refusal:
        LowPassFilter.parse(text)
    assert all(name in str(refusal.value) for name in PAPER_FILTERS)
    assert "b=b0,b1,...;a=1,a1,..." in str(refusal.value)


def test_parse_validates():
    with pytest.raises(ValueError, match=r"multiply b by 0\.5"):
        LowPassFilter.parse("b=1,1")


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("cutoff", [0.05, 0.5, 0.9])
def test_butterworth_has_its_cutoff(order, cutoff):
    low_pass_filter = butterworth(order, cutoff)
    assert low_pass_filter.order == order
    _, gains = scipy.signal.freqz(low_pass_filter.b, low_pass_filter.a, worN=[0.0, cutoff], fs=2)
    np.testing.assert_allclose(np.abs(gains), [1, math.sqrt(0.5)], rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_chebyshev1_has_unit_dc_gain_and_its_ripple(order):
    ripple_db = 1.0
    low_pass_filter = chebyshev1(order, 0.2, ripple_db)
    _, gains = scipy.signal.freqz(low_pass_filter.b, low_pass_filter.a, worN=np.linspace(0, 0.2, 2001), fs=2)
    decibels = 20 * np.log10(np.abs(gains))
    np.testing.assert_allclose(decibels[0], 0, rtol=0, atol=1e-6)
    np.testing.assert_allclose(decibels.max() - decibels.min(), ripple_db, rtol=1e-4, atol=0)


def test_momentum_is_the_exponential_moving_average():
    assert momentum(0.5) == LowPassFilter(b=(0.5,), a=(1.0, -0.5))
    np.testing.assert_allclose(step_response(momentum(0.9), 5), 1 - 0.9 ** np.arange(1, 6), rtol=1e-12, atol=0)


def test_a_cutoff_too_low_for_its_order_is_refused():
    with pytest.raises(ValueError, match="raise the cutoff"):
        butterworth(10, 0.005)


@pytest.mark.parametrize(
    ("design", "message"),
    [
        (lambda: butterworth(0, 0.5), "order is 0"),
        (lambda: butterworth(1.5, 0.5), "order is 1.5"),
        (lambda: butterworth(2, 0.0), "cutoff is 0.0"),
        (lambda: butterworth(2, 1.0), "cutoff is 1.0"),
        (lambda: butterworth(2, math.nan), "cutoff is nan"),
        (lambda: chebyshev1(-1, 0.5, 1.0), "order is -1"),
        (lambda: chebyshev1(2, -0.5, 1.0), "cutoff is -0.5"),
        (lambda: chebyshev1(2, 0.5, 0.0), "ripple_db is 0.0"),
        (lambda: momentum(1.0), "beta is 1.0"),
        (lambda: momentum(-0.1), "beta is -0.1"),
    ],
)
def test_bad_designs_are_refused_with_the_value(design, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        design()
