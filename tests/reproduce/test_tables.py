"""Differences are paired."""

import numpy as np
from scipy import stats

from doppler_hf.reproduce.tables import Line, table


def test_differences_are_paired_and_have_students_interval():
    first, second = np.array([0.80, 0.90, 0.85]), np.array([0.82, 0.91, 0.88])
    lines = [Line("a", 1.0, first, (0.6, 0.5), None), Line("b", 2.0, second, (0.7, 0.25), (0.125, first))]
    rows = table(lines).splitlines()
    low, high = stats.ttest_1samp(100 * (second - first), 0).confidence_interval(0.95)
    assert rows[2] == "| a | 1 | 85.00 ± 2.89 | – | 60.0, 50.0 | – | – |"
    by_rule = f"0.125 | -2.00 [{-high:+.2f}, {-low:+.2f}]"
    assert rows[3] == f"| b | 2 | 87.00 ± 2.65 | +2.00 [{low:+.2f}, {high:+.2f}] | 70.0, 25.0 | {by_rule} |"
