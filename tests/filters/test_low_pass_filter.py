"""Which coefficients are a filter, and which are refused with the number that is wrong."""

import copy
import math
import pickle
import re

import numpy as np
import pytest
import scipy.signal

from doppler_hf.filters import LowPassFilter, butterworth
from tests.support.refusals import refused


def test_coefficients_become_tuples_of_float():
    low_pass_filter = LowPassFilter(b=[np.float32(0.5), 0.5], a=np.array([1]))
    assert low_pass_filter == LowPassFilter(b=(0.5, 0.5))
    assert hash(low_pass_filter) == hash(LowPassFilter(b=(0.5, 0.5)))
    assert {type(value) for value in low_pass_filter.b + low_pass_filter.a} == {float}


@pytest.mark.parametrize(
    ("b", "a", "code", "value"),
    [
        ((), (1.0,), "no-coefficients", "b"),
        ((1.0, math.nan), (1.0,), "not-finite", "b[1]"),
        ((1.0, 0j), (1.0,), "not-finite", "0j"),
        ((2.0,), (2.0,), "not-normalized", "2.0"),
        ((0.3,), (1.0, -0.9), "wrong-gain", "b by 0.333333333333."),
        ((0.1,), (1.0, -0.8), "wrong-gain", "Multiply b by 2."),
        ((1 + 2e-6,), (1.0,), "wrong-gain", "1.000002"),
        ((1.0, -1.0), (1.0,), "wrong-gain", "positive sum"),
        ((1.0,), (1.0, -1.0), "unstable-filter", "0.999999"),
        ((2.02,), (1.0, 0.0, 1.02), "unstable-filter", "1.00995049"),
        ((-0.5, 1.5), (1.0,), "step-response-not-positive", "-0.5 at step 0 "),
        ((0.5, -0.4, -0.2, 1.1), (1.0,), "step-response-not-positive", "at step 2 "),
    ],
)
def test_invalid_coefficients_are_refused_with_the_offending_number(b, a, code, value):
    with refused(code, match=re.escape(value)):
        LowPassFilter(b=b, a=a)


def test_a_late_negative_step_response_is_found():
    """A late and large coefficient kicks a slow resonance: the first step below zero is the one SciPy finds."""
    a = np.poly([0.999 * np.exp(0.05j), 0.999 * np.exp(-0.05j)]).real
    b = np.zeros(5001)
    b[0], b[5000] = sum(a) + 0.02, -0.02
    response = scipy.signal.lfilter(b, a, np.ones(20000))
    first = int(np.argmax(response <= 0))
    assert first > 5000
    with refused("step-response-not-positive", match=f"at step {first} "):
        LowPassFilter(b=b, a=a)


def test_a_design_is_remembered_without_being_part_of_the_filter():
    designed = butterworth(2, 0.1)
    plain = LowPassFilter(b=designed.b, a=designed.a)
    assert designed == plain
    assert hash(designed) == hash(plain)
    assert repr(designed) == repr(plain)
    assert (designed.design, plain.design) == ("butterworth:order=2,cutoff=0.1", "")
    for copied in (copy.deepcopy(designed), pickle.loads(pickle.dumps(designed))):
        assert str(copied) == str(designed)
    with pytest.raises(TypeError, match="design"):
        LowPassFilter(b=(1.0,), design="none")
