"""The optimizer's filter is the one of the arguments, and the start says so; its groups may be changed."""

import re
from pathlib import Path

import pytest

from doppler_hf import DopplerTrainer
from tests.support.refusals import refused
from tests.support.trainers import trained, trainer_of


def test_a_head_may_learn_faster_as_the_docs_have_it(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "own-loss.md").read_text()
    names = {}
    exec(re.search(r"## Optimizer and scheduler.*?```python\n(.*?)```", page, flags=re.DOTALL)[1], names)

    def rates(trainer):
        of = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
        assert len(of) == len([*trainer.model.parameters()])
        return {name: of[id(p)] for name, p in trainer.model.named_parameters()}

    def trainer(cls, **options):
        return trainer_of(tmp_path / cls.__name__, cls=cls, save_strategy="steps", save_steps=2, **options)

    def assert_head_is_ten_times_as_fast(fast, plain):
        for name, rate in rates(plain).items():
            assert rates(fast)[name] == pytest.approx(rate * (10 if name.startswith("classifier") else 1))

    plain, fast = trained(trainer(DopplerTrainer, max_steps=2)), trained(trainer(names["FastHeadTrainer"], max_steps=2))
    assert_head_is_ten_times_as_fast(fast, plain)
    for each in (plain, fast):
        each.train()
    assert_head_is_ten_times_as_fast(fast, plain)
    resumed = trainer(names["FastHeadTrainer"], max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


def test_muon_takes_matrices_but_embeddings_and_goes_on_from_a_checkpoint(tmp_path):
    options = dict(save_strategy="steps", save_steps=2, base_optimizer="muon")
    first = trained(trainer_of(tmp_path, max_steps=2, **options))
    orthogonal = {id(p) for group in first.optimizer.param_groups if group["orthogonal"] for p in group["params"]}
    names = {name for name, p in first.model.named_parameters() if id(p) in orthogonal}
    assert names == {name for name, p in first.model.named_parameters() if p.ndim > 1 and "embeddings" not in name}
    plain = trained(trainer_of(tmp_path / "plain", max_steps=2))
    assert first.optimizer.optimizer.defaults["lr"] == plain.optimizer.optimizer.defaults["lr"]
    resumed = trainer_of(tmp_path, max_steps=4, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    with refused("another-optimizer-setting", match="base_optimizer='muon'"):
        trainer_of(tmp_path, max_steps=6).train(resume_from_checkpoint=True)
