"""The measurement of what clipped examples contribute runs from its command line, and says what they do."""

import json

import pytest

from scripts.bench import contributions


@pytest.mark.parametrize("precision", contributions.DTYPES)
def test_contributions_are_measured_and_written(tmp_path, capsys, precision):
    path = tmp_path / "contributions.jsonl"
    contributions.main(
        ["--vocabularies=50,99999", "--lengths=8", "--hidden=32", "--most_logits=1e4", "--threads=1"]
        + [f"--precision={precision}", f"--check={precision == 'float32'}", f"--output={path}"]
    )
    tied, untied = [json.loads(line) for line in path.read_text().splitlines()]
    assert (tied["tied"], untied["tied"]) == (True, False)
    for result in (tied, untied):
        assert (result["vocabulary"], result["length"]) == (50, 8)
        assert 0.999 <= result["contribution"] <= 1 + 1e-6
        assert result["check"] == ("accepted" if precision == "float32" else "not run")
    assert f"{tied['contribution']:.7f} C" in capsys.readouterr().out
