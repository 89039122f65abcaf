"""What is read and written is the same filter; what is not a filter's name is refused with what would be one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter, butterworth, momentum, moving_average
from tests.support.refusals import refused


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
    with refused("not-a-fixed-filter", match="'auto'"):
        LowPassFilter.parse("auto")


@pytest.mark.parametrize(
    ("text", "code", "found"),
    [
        ("butterworth", "filter-syntax", "'butterworth:order=...,cutoff=...'"),
        ("butterworth:order=2,order=2,cutoff=0.1", "filter-syntax", "'order', 'order', 'cutoff'"),
        ("momentum:0.9", "filter-syntax", "'momentum:beta=...'; got '0.9'"),
        ("butterworth:order=2.5,cutoff=0.1", "filter-syntax", "'2.5'"),
        ("butterworth:order=2,cutoff=low", "filter-syntax", "'low'"),
        ("momentm", "no-such-filter", "'momentum'?"),
        ("butterworth:order=2,cutof=0.1", "filter-syntax", "'cutoff'?"),
        ("first-order", "no-such-filter", "(did you mean 'first-order-v1'?)"),
        ("f", "no-such-filter", "(did you mean 'f1'?)"),
        ("first", "no-such-filter", "a design (butterworth, momentum, moving-average, hann)"),
        ("bessel:order=2", "no-such-filter", "butterworth:order=2,cutoff=0.1"),
    ],
)
def test_what_does_not_belong_to_a_design_is_refused(text, code, found):
    with refused(code, match=re.escape(found)):
        LowPassFilter.parse(text)
