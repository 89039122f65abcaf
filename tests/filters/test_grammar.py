"""What is read and written is the same filter; what is not a filter's name is refused with what would be one."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doppler_hf.filters import (
    PAPER_FILTERS,
    LowPassFilter,
    butterworth,
    chebyshev1,
    chebyshev2,
    from_coefficients,
    momentum,
    moving_average,
    parse_name,
    write_coefficients,
)


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


def test_a_preset_is_found_by_its_coefficients_alone_when_they_are_read():
    assert str(LowPassFilter.parse("b=0.1,0.1;a=1,-0.8")) == "f3"
    assert str(LowPassFilter.parse("b=1")) == "none"
    assert str(LowPassFilter(b=(0.1, 0.1), a=(1, -0.8))) == "b=0.1,0.1;a=1.0,-0.8"


@pytest.mark.parametrize("text", ["", "f7", "F1", "a=1;b=1", "b=", "b=0.5,;a=1", "b=0.1;a=1,-0.9;c=2", "b=one", "0.5,0.5"])
def test_parse_lists_presets_and_grammar(text):
    with pytest.raises(ValueError, match=re.escape(f"got {text!r}.")) as refusal:
        LowPassFilter.parse(text)
    assert str(refusal.value).startswith(f"A filter must be one of {', '.join(PAPER_FILTERS)}, a design as ")
    assert "b=b0,b1,...;a=1,a1,..." in str(refusal.value)


def test_parse_validates():
    with pytest.raises(ValueError, match=r"Multiply b by 0\.5"):
        LowPassFilter.parse("b=1,1")


@given(b=st.lists(st.floats(0.01, 1), min_size=1, max_size=5), pole=st.floats(-0.9, 0.99))
def test_any_coefficients_survive_the_round_trip(b, pole):
    low_pass_filter = from_coefficients(b, (1.0, -pole) if pole > 0 else (1.0,))
    assert LowPassFilter.parse(str(low_pass_filter)) == low_pass_filter
    assert LowPassFilter.parse(write_coefficients(low_pass_filter)) == low_pass_filter


CUTOFFS = st.floats(0.05, 0.9)
ORDERS = st.integers(1, 4)
DESIGNED = st.one_of(
    st.builds(butterworth, ORDERS, CUTOFFS),
    st.builds(chebyshev1, ORDERS, CUTOFFS, st.floats(0.1, 6)),
    st.builds(chebyshev2, ORDERS, CUTOFFS, st.floats(1, 60)),
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("butterworth:order=2,cutoff=0.1", butterworth(2, 0.1)),
        ("butterworth: cutoff=1e-1, order=2 ", butterworth(2, 0.1)),
        ("chebyshev1:order=2,cutoff=0.1,ripple_db=1", chebyshev1(2, 0.1, 1.0)),
        ("chebyshev2:order=3,cutoff=0.4,attenuation_db=30", chebyshev2(3, 0.4, 30.0)),
        ("momentum:beta=0.97", momentum(0.97)),
        ("moving-average:taps=4", LowPassFilter(b=(0.25,) * 4)),
    ],
)
def test_designs_are_read_by_name(text, expected):
    assert LowPassFilter.parse(text) == expected


def test_designs_from_numpy_numbers_print_as_plain_ones():
    assert str(butterworth(np.int64(2), np.float64(0.1))) == "butterworth:order=2,cutoff=0.1"
    assert str(momentum(np.float64(0.5))) == "momentum:beta=0.5"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", ("auto", {})),
        (" optimal-fir : taps = 8", ("optimal-fir", {"taps": 8})),
        ("optimal-fir:update_gap=20,taps=8", ("optimal-fir", {"taps": 8, "update_gap": 20})),
        ("butterworth:order=2,cutoff=0.1", ("butterworth", {"order": 2, "cutoff": 0.1})),
        ("first-order-v1", ("first-order-v1", {})),
        ("momentum", ("momentum", {})),
        ("b=0.1,0.1;a=1,-0.8", ("b", {})),
    ],
)
def test_names_are_split(text, expected):
    word, values = parse_name(text)
    assert (word, values) == expected
    assert all(isinstance(value, int) == (key in ("order", "taps", "update_gap")) for key, value in values.items())


@pytest.mark.parametrize("text", ["auto", "optimal-fir:taps=8"])
def test_filters_that_a_run_chooses_are_no_fixed_ones(text):
    with pytest.raises(ValueError, match=f"^{text!r} is no fixed filter: its coefficients come from a run"):
        LowPassFilter.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("butterworth", "must have the form 'butterworth:order=...,cutoff=...', got nothing after 'butterworth'"),
        ("butterworth:order=2", "got 'order' after 'butterworth'"),
        ("butterworth:order=2,cutoff=0.1,ripple_db=1", "got 'order', 'cutoff', 'ripple_db' after"),
        ("butterworth:order=2,order=2,cutoff=0.1", "got 'order', 'order', 'cutoff' after"),
        ("chebyshev1:order=2,cutoff=0.1", "must have the form 'chebyshev1:order=...,cutoff=...,ripple_db=...'"),
        ("momentum:0.9", "must have the form 'momentum:beta=...', got '0.9' after"),
        ("momentum:", "got '' after 'momentum'"),
        ("optimal-fir", "must have the form 'optimal-fir:taps=...[,update_gap=...]'"),
        ("optimal-fir:update_gap=5", "got 'update_gap' after 'optimal-fir'"),
        ("optimal-fir:taps=8,update_gap=2,update_gap=2", "got 'taps', 'update_gap', 'update_gap' after"),
        ("auto:taps=8", "must have the form 'auto', got 'taps' after 'auto'"),
        ("butterworth:order=2.5,cutoff=0.1", "order must be an integer, got '2.5' in"),
        ("butterworth:order=2,cutoff=low", "cutoff must be a number, got 'low' in"),
        ("butterworth:order=2,cutoff=nan", "cutoff must be a fraction of Nyquist inside (0, 1), got nan."),
        ("butterworth:order=0,cutoff=0.1", "order must be an integer of at least 1, got 0."),
        ("momentum:beta=1", "beta must be a decay in [0, 1), got 1.0."),
        ("first-order-v1:order=1", "got 'first-order-v1:order=1'"),
        ("momentm", "got 'momentm' (did you mean 'momentum'?)."),
        ("buterworth:order=2,cutoff=0.1", "(did you mean 'butterworth'?)."),
        ("butterworth:order=2,cutof=0.1", "got 'order', 'cutof' (did you mean 'cutoff'?) after"),
        ("bessel:order=2", "butterworth:order=...,cutoff=..., chebyshev1:"),
    ],
)
def test_what_does_not_belong_to_a_design_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LowPassFilter.parse(text)
