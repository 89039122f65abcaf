"""What a run warns of before its first step, when nothing is spent yet."""

from doppler_hf.run.reporting.start_warnings import low_signal_note


def test_noise_that_drowns_everything_is_told_before_it_is_spent():
    assert low_signal_note(0.004, num_trained=100_000) == []
    assert low_signal_note(0.006, num_trained=62) == []  # at most half as long as the average can be
    (note,) = low_signal_note(0.006, num_trained=100_000)
    assert note == (
        "the run may learn little, because the noise of its average gradient is 0.0060 C per coordinate: use larger "
        "batches, more epochs, more data or a larger ε"
    )
