"""Two processes train what one would: disjoint shards, one reduction, noise once, replicas identical."""

import functools
import os
from pathlib import Path

import pytest
import scipy.stats
import torch

from doppler_hf.audit import neighbour_distances
from tests.audit.neighbour_cases import USUAL, trainer_for
from tests.support import processes
from tests.support.refusals import refused
from tests.support.tiny import head_alone, text_data
from tests.support.trainers import NoSignal, On, Recorder, at, interrupted, weights
from tests.support.trainers import checked_trainer_of as trainer_of


def train(folder, world, case):
    """What every process does; the environment tells it which one it is."""
    if case in ("equal", "other pieces"):  # every example in every draw, so that one process and two draw the same
        own = dict(
            noise_multiplier=0.5, noise_seed=3, per_device_train_batch_size=24 // world, base_optimizer="sgd",
            low_pass_filter="first-order-v1", learning_rate=0.1,
        )  # fmt: skip
        if case == "other pieces" and os.environ["RANK"] == "1":
            own |= dict(per_device_train_batch_size=4, gradient_accumulation_steps=3)
    else:
        own = dict(cls=NoSignal, noise_multiplier=2.0, per_sample_max_grad_norm=0.5, per_device_train_batch_size=8 // world)
    trainer = trainer_of(
        Path(folder) / case, callbacks=[recorder := Recorder()], evaluated=text_data(8, seed=1), use_cpu=True, max_steps=5,
        per_device_eval_batch_size=4,
        eval_strategy="steps", eval_steps=5, grad_sample_self_check=case == "equal",
        **{"gradient_accumulation_steps": 1} | own,
    )  # fmt: skip
    if trainer.args.process_index > 0:  # replicas must not rely on being built alike
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(1.0)
    trainer.train()
    ledger = trainer.privacy.ledger
    return {
        "eval_loss": trainer.evaluate()["eval_loss"],
        "weights": weights(trainer),
        "gradients": torch.stack(recorder.gradients),
        "steps": ledger.steps_run,
        "batch": ledger.statement.expected_batch_size,
    }


def shuffled(folder, world):
    """Return why a training is refused whose processes have shuffled their data each on its own."""
    return refusal(folder, "shuffled", data=text_data().shuffle(seed=int(os.environ["RANK"])))


def refusal(folder, name, **options):
    """Return why a training is refused."""
    try:
        trainer_of(Path(folder) / name, **options).train()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "was not refused"


# An argument that process 1 alone has, and its name in the statement.
OTHER_TERMS = {
    "per_sample_max_grad_norm": (dict(per_sample_max_grad_norm=10.0), "per_sample_max_grad_norm"),
    "learning_rate": (dict(learning_rate=0.5), "learning_rate"),
    "save_steps": (dict(save_strategy="steps", save_steps=3), "save_strategy"),
    "what is trained": (dict(model=head_alone()), "what is trained of the model"),
}


def other_terms(folder, world):
    """Return by argument why processes are refused that have different ones; not because of a check that can be left out."""
    found = {}
    for name, (others, _) in OTHER_TERMS.items():
        own = {"per_device_train_batch_size": 2, "per_sample_max_grad_norm": 1.0, "grad_sample_self_check": False}
        found[name] = refusal(folder, name, **own | (others if os.environ["RANK"] == "1" else {}))
    return found


def drifted(folder, world):
    """Return why a training is refused that moves the weights on process 1 alone."""
    move = On(step_end=at(2, lambda args, model, **_: model.classifier.bias.data.add_(args.process_index)))
    return refusal(folder, "drifted", callbacks=[move], max_steps=4)


def neighbours(folder, world):
    """Return distances and couplings of users whose examples lie on all processes."""
    case = USUAL | {"model": "roberta", "unit": "user", "accumulation": 3, "clipping": "vanilla", "loss": "private"}
    trainer = trainer_for(case, Path(folder) / "neighbours", per_device_train_batch_size=1)
    result = neighbour_distances(trainer, pairs=4, tolerance=1e-6)
    return result.distances, result.couplings, trainer.privacy.sampler.expected_batch_size


def resumed(folder, world):
    """Return the texts that a process has trained on before and after an interruption, and the plans of its ledger."""
    first, second = interrupted(Path(folder) / "resumed", gradient_accumulation_steps=2 // world)
    second.train(resume_from_checkpoint=True)
    return first.seen + second.seen, [[each.steps for each in plan] for plan in second.privacy.ledger.plans]


def stopped(folder, world):
    """Leave a run that was interrupted within its round."""
    interrupted(Path(folder) / "stopped", gradient_accumulation_steps=2 // world)


CASES = {
    "resumed": resumed,
    "stopped": stopped,
    **{case: functools.partial(train, case=case) for case in ("equal", "other pieces", "noise")},
    "shuffled": shuffled,
    "other_terms": other_terms,
    "drifted": drifted,
    "neighbours": neighbours,
}


FURTHER = ["resumed", "stopped", "other_terms"]


@pytest.fixture(scope="module")
def two_further(tmp_path_factory):
    return processes.launch(__file__, tmp_path_factory.mktemp("further"), 2, *FURTHER)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return processes.launch(__file__, tmp_path_factory.mktemp("two"), 2, *(case for case in CASES if case not in FURTHER))


def test_two_processes_equal_one(two_processes, tmp_path):
    one, two = train(tmp_path, 1, "equal"), two_processes["equal"]
    assert torch.equal(two[0]["weights"], two[1]["weights"])
    assert one["batch"] == two[0]["batch"] == 24
    for run in two:  # Transformers would give twice the loss
        assert run["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    # A sum of 24 gradients of norm 1, each after some 50 operations in a row, by parts; and five steps of 0.1 from there.
    # A wrong shard would change 1/24 of it at least.
    rounding = (24 + 50) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(two[0]["gradients"], one["gradients"], atol=rounding, rtol=0)
    torch.testing.assert_close(two[0]["weights"], one["weights"], atol=5 * 0.1 * rounding, rtol=0)


def test_processes_may_cut_their_shares_into_different_numbers_of_pieces(two_processes):
    """A small device next to a large one: the sums, the steps and the batch are the same."""
    for alike, cut in zip(two_processes["equal"], two_processes["other pieces"], strict=True):
        assert (cut["batch"], cut["steps"]) == (alike["batch"], alike["steps"]) == (24, 5)
        # Sums of 24 gradients of norm 1, each after some 50 operations in a row, in another order.
        rounding = (24 + 50) * torch.finfo(torch.float32).eps
        torch.testing.assert_close(cut["gradients"], alike["gradients"], atol=rounding, rtol=0)
        torch.testing.assert_close(cut["weights"], alike["weights"], atol=5 * 0.1 * rounding, rtol=0)
        assert cut["eval_loss"] == pytest.approx(alike["eval_loss"], rel=1e-5)
    assert torch.equal(*(run["weights"] for run in two_processes["other pieces"]))


def assert_noise_is_added_once(runs):
    noise = runs[0]["gradients"]
    assert all(torch.equal(run["gradients"], noise) for run in runs)
    assert [run["steps"] for run in runs] == [5] * len(runs)
    std = 2.0 * 0.5 / 8
    # Twice the noise, or half, would be off by √2; the standard error of the deviation is 1/√(2·coordinates).
    assert noise.std().item() == pytest.approx(std, rel=6 / (2 * noise.numel()) ** 0.5)
    # Nor has one coordinate in ten thousand none, or that of two processes, or the numbers of another one.
    noise = noise.double() / std
    assert scipy.stats.kstest(noise.flatten(), "norm").pvalue > 1e-6
    of_each = scipy.stats.chi2(len(noise)).cdf(noise.square().sum(dim=0))
    assert scipy.stats.kstest(of_each, "uniform").pvalue > 1e-6
    assert 1e-10 < of_each.min() < of_each.max() < 1 - 1e-10
    assert len(noise.unique()) > 0.99 * noise.numel()


def test_trap_14_noise_is_added_once_by_two_processes(two_processes):
    assert_noise_is_added_once(two_processes["noise"])


def test_trap_23_processes_with_different_data_are_refused(two_processes):
    for message in two_processes["shuffled"]:
        # No digest of lengths and labels, since messages end in logs.
        assert message.startswith("train_dataset differs between process 0 and process 1. Start all processes")
        assert "data in the same order" in message


@pytest.mark.thorough  # test_private_run.py compares terms
def test_processes_with_other_terms_are_refused(two_further):
    """A contribution of 10 C would lie beneath the noise of C, and the ledger of process 0 would not say so."""
    for messages in two_further["other_terms"]:
        for name, (_, field) in OTHER_TERMS.items():
            assert messages[name].startswith(f"{field} differs between process 0 and process 1: "), messages[name]


def test_weights_are_compared_in_the_end_of_a_short_training(two_processes):
    for message in two_processes["drifted"]:
        assert message.startswith("The weights on process 1 differ from those on process 0")
        assert "after step 4, " in message


@pytest.mark.thorough
def test_two_processes_go_on_with_their_round(two_further):
    """Each finds its own secret again: every record of 48 takes part once in the six steps, on one of them."""
    (of_first, plans), (of_second, _) = two_further["resumed"]
    assert plans == [[6]]
    assert len(set(of_first + of_second)) == len(of_first) + len(of_second) == 48


@pytest.mark.thorough
def test_one_process_does_not_take_up_the_round_of_two(two_further, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "further0" / "stopped"
    terms = dict(noise_multiplier=None, target_epsilon=8.0, max_steps=6, save_strategy="steps", save_steps=2)
    with refused("another-number-of-processes", match="Resume with 2 processes"):
        trainer_of(folder, data=text_data(48), **terms).train(resume_from_checkpoint=True)


def assert_one_user_moves_the_sum_by_at_most_c(runs):
    for distances, couplings, batch in runs:
        assert batch == 3 * len(runs)
        assert 0.1 < distances.min() < distances.max() <= 1 + 1e-6
        assert couplings.max() < 1e-12


def test_one_user_moves_the_sum_of_two_processes_by_at_most_c(two_processes):
    assert_one_user_moves_the_sum_by_at_most_c(two_processes["neighbours"])


@pytest.mark.slow
def test_one_user_moves_the_sum_of_four_processes_by_at_most_c(tmp_path):
    assert_one_user_moves_the_sum_by_at_most_c(processes.launch(__file__, tmp_path, 4, "neighbours")["neighbours"])


@pytest.mark.slow
def test_trap_14_noise_is_added_once_by_four_processes(tmp_path):
    assert_noise_is_added_once(processes.launch(__file__, tmp_path, 4, "noise")["noise"])


if __name__ == "__main__":
    processes.main(CASES)
