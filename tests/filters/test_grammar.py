"""What is read and written is the same filter; what is not a filter's name is refused with what would be one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, butterworth, momentum, moving_average


@pytest.mark.parametrize("name", PAPER_FILTERS)
def test_presets_parse_by_name_and_print_as_it(name):
    assert LowPassFilter.parse(name) == PAPER_FILTERS[name]
    assert str(PAPER_FILTERS[name]) == name


def test_parse_reads_coefficients():
    assert LowPassFilter.parse("b=0.1,0.1;a=1,-0.8") == PAPER_FILTERS["f3"]
    assert LowPassFilter.parse(" b = 0.1, 1e-1 ; a = 1, -0.8 ") == PAPER_FILTERS["f3"]
    assert LowPassFilter.parse("b=1") == PAPER_FILTERS["none"]


CUTOFFS = st.floats(0.05, 0.9)
ORDERS = st.integers(1, 4)
DESIGNED = st.one_of(
    st.builds(butterworth, ORDERS, CUTOFFS),
    st.builds(momentum, st.floats(0, 0.999)),
    st.builds(moving_average, st.integers(1, 30)),
)


@given(designed=DESIGNED)
def test_designs_survive_the_round_trip_by_name(designed):
    text = str(designed)
    assert LowPassFilter.parse(text) == designed
    assert text == designed.design
    # One tap is no filter, whatever it was designed as.
    assert str(LowPassFilter.parse(text)) == ("none" if designed == PAPER_FILTERS["none"] else text)


def test_the_filter_that_a_run_chooses_is_no_fixed_one():
    with pytest.raises(ValueError, match="'auto' is not a fixed filter"):
        LowPassFilter.parse("auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("butterworth", "must have the form 'butterworth:order=...,cutoff=...', got nothing after 'butterworth'"),
        ("butterworth:order=2,order=2,cutoff=0.1", "got 'order', 'order', 'cutoff' after"),
        ("momentum:0.9", "must have the form 'momentum:beta=...', got '0.9' after"),
        ("butterworth:order=2.5,cutoff=0.1", "order must be a whole number, got '2.5' in"),
        ("butterworth:order=2,cutoff=low", "cutoff must be a number, got 'low' in"),
        ("momentm", "got 'momentm' (did you mean 'momentum'?)."),
        ("butterworth:order=2,cutof=0.1", "got 'order', 'cutof' (did you mean 'cutoff'?) after"),
        ("bessel:order=2", "a design such as butterworth:order=2,cutoff=0.1, or"),
    ],
)
def test_what_does_not_belong_to_a_design_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LowPassFilter.parse(text)
