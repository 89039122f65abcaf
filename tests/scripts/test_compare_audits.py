"""Bounds beside those of jax_privacy: the true ε is the accountant's, ours lie below it, and the columns stay in order."""

import sys
from types import SimpleNamespace

import numpy as np

from scripts.experiments import compare_audits


class Auditor:
    """In the place of jax_privacy's, which has an environment of its own: what a column shows is how it was asked."""

    def __init__(self, included, others):
        assert len(included) + len(others) == 200

    def epsilon_one_run(self, error, delta, *, threshold_strategy):
        return 10 + threshold_strategy

    def epsilon_clopper_pearson(self, error, delta, *, one_sided, threshold_strategy):
        return 20 + threshold_strategy


def test_both_bounds_of_the_same_scores_in_one_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_audits, "CASES", (("Gaussian, μ", 2.0), ("response, ε", 3.0)))
    monkeypatch.setattr(compare_audits, "CANARIES", (200,))
    theirs = SimpleNamespace(CanaryScoreAuditor=Auditor, Bonferroni=lambda: 1, Split=lambda *, seed: 2)
    monkeypatch.setitem(sys.modules, "jax_privacy", SimpleNamespace(auditing=theirs))
    monkeypatch.setitem(sys.modules, "jax_privacy.auditing", theirs)
    compare_audits.save_ours(tmp_path / "out" / "scores.npz")
    compare_audits.print_both(tmp_path / "out" / "scores.npz")
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [["Gaussian, μ = 2", "200", "10.00"], ["response, ε = 3", "200", "3.00"]]
    for row in cells:
        ours = np.array([[float(bound) for bound in row[column].split(", ")] for column in (3, 6)])
        assert ours.shape == (2, compare_audits.SEEDS)
        assert np.all((ours > 0.5) & (ours < float(row[2])))
        assert [row[column].split(", ")[0] for column in (4, 5, 7, 8)] == ["11.00", "12.00", "21.00", "22.00"]
