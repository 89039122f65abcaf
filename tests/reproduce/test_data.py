"""No example is trained on and chosen by, and what is computed once is kept whole."""

import torch

from doppler_hf.reproduce.data import apart, kept


def test_no_example_is_trained_on_and_chosen_by():
    train, tuning_rows = apart(100, 30)
    assert len(tuning_rows) == 30
    assert sorted([*train, *tuning_rows]) == list(range(100))


def test_two_studies_may_keep_the_same_at_once(tmp_path, monkeypatch):
    path, save = tmp_path / "kept.pt", torch.save

    def interrupted(found, unfinished):
        save(found, unfinished)
        monkeypatch.setattr(torch, "save", save)
        assert kept(path, lambda: torch.ones(2)).tolist() == [1, 1]  # by the other one, in the meantime

    monkeypatch.setattr(torch, "save", interrupted)
    assert kept(path, lambda: torch.ones(2)).tolist() == [1, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["kept.pt"]
