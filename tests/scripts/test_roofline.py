"""What a GPU would take for passes of real width, a release and an optimizer step, by what they read and multiply."""

import re
from dataclasses import replace

import pytest

from scripts.bench import engine, roofline

pytestmark = pytest.mark.usefixtures("unchecked_arrays")

# Most of busy time and of kernels, private over plain.
MOST = {"roberta-base": (1.25, 1.35), "gpt2": (1.25, 1.35), "vit-base": (1.3, 1.35), "roberta-base-lora": (1.05, 1.05)}


@pytest.mark.thorough  # tests/privacy/test_devices.py counts kernels
@pytest.mark.parametrize("name", MOST)
def test_a_private_pass_costs_little_more_than_a_plain_one(name):
    # What a pass does once counts for more beside few layers; of adapters it is nearly all.
    work = replace(engine.ALL_WORKS[name], layers=12 if "lora" in name else 4)
    plain, private = (roofline.cost_of_pass(work, kind) for kind in ("plain", "book_keeping"))
    ratios = private.seconds / plain.seconds, private.kernels / plain.kernels
    assert all(ratio <= most for ratio, most in zip(ratios, MOST[name], strict=True)), ratios


def test_release_and_step_touch_each_number_as_often_as_they_must():
    """A sum is read and written; weight, one state of the filter and the second moment are, and the gradient is read."""
    work = replace(engine.ALL_WORKS["roberta-base"], layers=1)
    numbers = sum(each.numel() for each in engine.build(work, device="meta")[0].parameters())
    release, step = roofline.cost_of_release(work), roofline.cost_of_optimizer(work)
    assert (release.kernels, release.bytes) == (1, 2 * 4 * numbers)
    assert (step.kernels, step.bytes) == (1, 7 * 4 * numbers)


def test_the_table_is_printed(capsys, monkeypatch, tmp_path):
    tiny = {"tiny": replace(engine.ROBERTA, **engine.TINY)}
    monkeypatch.setattr(engine, "ALL_WORKS", tiny)
    roofline.main(["--works=tiny", "--operators=2", "--texts=256", f"--output={tmp_path / 'out.jsonl'}"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("tiny               busy ×")
    assert re.fullmatch(r"    a step on 256 texts ×\d\.\d\d: \d+ → \d+ ms, 8 → \d passes", shown[-1])
    assert len(shown) == 4
    assert '"work": "tiny"' in (tmp_path / "out.jsonl").read_text()
