"""A micro-batch that does not fit into memory gives the same sum in halves, or a clear error."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import M2M100Config, M2M100ForConditionalGeneration

from doppler_hf import DopplerTrainer
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.batching.micro_batches import MicroBatch
from doppler_hf.privacy.clipping import factored
from doppler_hf.privacy.clipping.per_sample_gradient import Dense
from doppler_hf.run.halving import Rows, halves_of, names_of_rows
from tests.end_to_end.test_privacy_units import users
from tests.end_to_end.test_views import image_trainer
from tests.run.test_start_check import of_tokens
from tests.support.models import CHOICES, batch_for, build
from tests.support.tiers import thorough
from tests.support.tiny import tiny_bert
from tests.support.trainers import Recorder, checked_trainer_of, weights

ERRORS = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "processor": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 28 "
        "bytes. Error code 12 (Cannot allocate memory)"
    ),
}
# In float64, of weights that were moved by noise of 0.1: some hundred roundings of some dozen terms.
TOLERANCE = dict(rtol=0.0, atol=1e-12)


class Small(DopplerTrainer):
    """Has the memory for so many rows, from the first step on, and fails at one place if there are more."""

    place, rows, error = "forward", 2, staticmethod(ERRORS["device"])

    def set_initial_training_values(self, args, dataloader):
        values = super().set_initial_training_values(args, dataloader)
        self.passes, self.failures = [], 0
        self.is_small = True
        return values

    def fail(self, *, at, rows):
        if at == self.place and rows > self.rows:
            self.failures += 1
            raise self.error()

    def compute_per_sample_loss(self, model, inputs):
        if not getattr(self, "is_small", False):
            return super().compute_per_sample_loss(model, inputs)
        rows = len(inputs["labels"])
        self.passes.append((rows, {name: value.clone() for name, value in inputs.items()}, torch.get_rng_state()))
        layer = next(module for module in model.modules() if isinstance(module, nn.LayerNorm))  # the first of all

        def watch(module, inputs, output):
            self.fail(at="forward", rows=rows)
            output.register_hook(lambda gradient: self.fail(at="backward", rows=rows))

        hook = layer.register_forward_hook(watch)
        try:
            losses = super().compute_per_sample_loss(model, inputs)
        finally:
            hook.remove()
        self.fail(at="loss", rows=rows)
        return losses


def small(place, *, rows=2, error="device"):
    return type("Small", (Small,), {"place": place, "rows": rows, "error": staticmethod(ERRORS[error])})


def fail_while_adding(monkeypatch, trainer):
    """Let the third sum of a micro-batch with too many examples be written to its half."""
    counts = []
    for form in (Dense, factored.OuterProducts, factored.LookedUpRows):

        def add(self, total, weights, *, beta=1, original=form.add_weighted):
            original(self, total, weights, beta=beta)
            if len(weights) > trainer.rows and hasattr(trainer, "passes"):
                counts.append(1)
                if len(counts) % 3 == 0:
                    total.view(-1)[::2] = 7.0
                    trainer.failures += 1
                    raise trainer.error()

        monkeypatch.setattr(form, "add_weighted", add)


def run(make, tmp_path, *, cls):
    recorder = Recorder()
    trainer = make(tmp_path / cls.place, cls=cls, callbacks=[recorder])
    trainer.train()
    return trainer, recorder.gradients


def texts(folder, **options):
    model = tiny_bert().double()
    return checked_trainer_of(folder, model=model, **(dict(noise_seed=1, noise_multiplier=0.1, max_steps=3) | options))


def failing_texts(monkeypatch, folder, **options):
    trainer = texts(folder, **options)
    if trainer.place == "adding":
        fail_while_adding(monkeypatch, trainer)
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# --- the same sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "error"),
    [("forward", "device"), *thorough(("loss", "device"), ("backward", "device")), ("backward", "processor")],
)
def test_halves_give_the_weights_of_the_whole(tmp_path, place, error):
    whole, expected = run(texts, tmp_path, cls=small("nowhere"))
    halved, found = run(texts, tmp_path, cls=small(place, error=error))
    assert whole.failures == 0 < halved.failures
    assert len(found) == 3
    torch.testing.assert_close(found, expected, **TOLERANCE)
    torch.testing.assert_close(weights(halved), weights(whole), **TOLERANCE)
    assert losses(halved) == pytest.approx(losses(whole), rel=1e-12)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        *thorough(("backward", {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 12})),
        ("adding", {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 12}),
        ("backward", {"max_tokens_per_micro_batch": 24}),
        *thorough(("adding", {"max_tokens_per_micro_batch": 24})),
        ("adding", {"clipping_granularity": "per_layer", "clipping": "vanilla"}),
        *thorough(("backward", {"grad_sample_engine": "opacus"})),
    ],
)
def test_however_a_draw_is_cut(tmp_path, monkeypatch, place, options):
    make = partial(failing_texts, monkeypatch, **options)
    _, expected = run(make, tmp_path, cls=small("nowhere"))
    halved, found = run(make, tmp_path, cls=small(place))
    assert halved.failures > 0
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("report", [*thorough("raw"), "private"])
def test_what_was_half_added_begins_the_draw_anew(tmp_path, monkeypatch, report):
    """And the loss is of each example once."""
    options = dict(gradient_accumulation_steps=3, report_train_loss=report, max_steps=2)
    make = partial(failing_texts, monkeypatch, **options)
    whole, expected = run(make, tmp_path, cls=small("nowhere"))
    halved, found = run(make, tmp_path, cls=small("adding"))
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert losses(halved) == pytest.approx(losses(whole), rel=1e-12)
    # Some examples are computed again, after those that were added when it failed.
    assert sum(rows for rows, *_ in halved.passes if rows <= 2) > sum(rows for rows, *_ in whole.passes)


def test_an_example_keeps_its_share_of_its_unit(tmp_path):
    def make(folder, **more):
        return texts(
            folder, data=users(), privacy_unit_column="user_id", per_device_train_batch_size=5, clip_unit_mean=False, **more
        )

    whole, expected = run(make, tmp_path, cls=small("nowhere"))
    halved, found = run(make, tmp_path, cls=small("backward", rows=1))
    assert len(set(whole.private_run.sampler.counts.tolist())) > 2
    assert halved.failures > 0
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_unit_whose_mean_is_clipped_stays_whole(tmp_path):
    def make(folder, **more):
        options = dict(max_examples_per_unit=3, clip_unit_mean=True, per_device_train_batch_size=6)
        return texts(folder, data=users(), privacy_unit_column="user_id", **(options | more))

    _, expected = run(make, tmp_path, cls=small("nowhere"))
    halved, found = run(make, tmp_path, cls=small("backward", rows=5))
    assert halved.failures > 0
    assert 3 in {rows for rows, *_ in halved.passes}  # one of the users of at least three, cut from others
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("place", [*thorough("forward"), "backward"])
def test_the_views_of_an_example_stay_together_and_are_not_drawn_again(tmp_path, place):
    """Both pieces of the only step are drawn before the first pass, so that the views are the same in both runs."""

    def make(folder, **more):
        return image_trainer(
            folder,
            model=build("vit"),
            noise_seed=1,
            noise_multiplier=0.1,
            max_steps=1,
            per_device_train_batch_size=8,
            **more,
        )

    whole, expected = run(make, tmp_path, cls=small("nowhere"))
    halved, found = run(make, tmp_path, cls=small(place, rows=7))
    assert halved.failures > 0
    assert {rows % 4 for rows, *_ in halved.passes} == {0}
    assert {rows for rows, *_ in halved.passes if rows <= 7} == {4}
    torch.testing.assert_close(found, expected, **TOLERANCE)
    # Each view that was drawn is computed once in a pass that does not fail.
    drawn, computed = (
        torch.cat([inputs["pixel_values"] for rows, inputs, _ in trainer.passes if rows <= trainer.rows or trainer is whole])
        for trainer in (whole, halved)
    )
    assert torch.equal(drawn, computed)


@pytest.mark.parametrize("place", [*thorough("forward", "backward"), "adding"])
def test_an_example_is_counted_once_for_the_clip_norm(tmp_path, monkeypatch, place):
    make = partial(failing_texts, monkeypatch, clipping="vanilla", clipping_quantile=0.5, per_sample_max_grad_norm=0.1)
    trainers = [run(make, tmp_path, cls=small(where))[0] for where in ("nowhere", place)]
    norms = [[logs["clip_norm"] for logs in trainer.state.log_history if "clip_norm" in logs] for trainer in trainers]
    assert trainers[1].failures > 0
    assert len(set(norms[0])) == 3
    assert norms[1] == pytest.approx(norms[0], rel=1e-9)


def of_choices(examples):
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


@pytest.mark.thorough
def test_the_choices_of_an_example_stay_together(tmp_path):
    def make(folder, **more):
        model = build("bert-choice")
        inputs, labels = batch_for(model, batch=24)
        data = [{name: value[row] for name, value in inputs.items()} | {"labels": labels[row]} for row in range(len(labels))]
        trainer = checked_trainer_of(folder, model=model, data=data, noise_seed=1, noise_multiplier=0.1, max_steps=2, **more)
        trainer.data_collator = of_choices
        return trainer

    _, expected = run(make, tmp_path, cls=small("nowhere"))
    halved, found = run(make, tmp_path, cls=small("backward", rows=1))
    assert halved.failures > 0
    assert all(inputs["input_ids"].shape[1] == CHOICES for _, inputs, _ in halved.passes)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_each_pass_has_random_numbers_of_its_own(tmp_path):
    trainer, _ = run(texts, tmp_path, cls=small("backward"))
    states = {state.numpy().tobytes() for *_, state in trainer.passes}
    assert trainer.failures > 0
    assert len(states) == len(trainer.passes)


def test_a_part_is_padded_as_it_was_collated(tmp_path):
    trainer, _ = run(texts, tmp_path, cls=small("forward"))
    lengths = iter([inputs["input_ids"].shape[1] for _, inputs, _ in trainer.passes])
    for rows, *_ in trainer.passes:
        length = next(lengths)
        if rows > 2:  # its first half follows
            expected = length
        elif rows == 2:
            assert length in (expected, length)
    whole, _ = run(texts, tmp_path / "whole", cls=small("nowhere"))
    of_whole = [row for _, inputs, _ in whole.passes for row in inputs["input_ids"].tolist()]
    of_parts = [row for rows, inputs, _ in trainer.passes if rows <= 2 for row in inputs["input_ids"].tolist()]
    assert of_parts == of_whole


# --- what is said ---------------------------------------------------------------------------------------------------------


def test_it_is_said_once_and_without_a_number(tmp_path, capsys):
    trainer, _ = run(texts, tmp_path, cls=small("forward"))
    said = [line for line in capsys.readouterr().out.splitlines() if "memory" in line]
    assert trainer.failures > 1
    assert len(said) == 1
    assert said[0].startswith("A micro-batch does not fit into memory, and is computed in halves")
    assert not re.search(r"\d", said[0])


def refused(trainer, match):
    with pytest.raises(RuntimeError, match=match) as refusal:
        trainer.train()
    assert not re.search(r"\d", str(refusal.value))
    # The allocator's words have sizes in them.
    assert refusal.value.__cause__ is None
    assert refusal.value.__context__ is None


@pytest.mark.parametrize("place", [*thorough("forward"), "backward"])
def test_an_example_that_does_not_fit_ends_the_run_and_nothing_is_lost(tmp_path, place):
    options = dict(save_strategy="steps", save_steps=1)
    trainer = texts(tmp_path, cls=small("nowhere", rows=0), **options)
    step_end = trainer.callback_handler.on_step_end

    def then_fail(args, state, control):
        type(trainer).place = place if state.global_step == 2 else "nowhere"
        return step_end(args, state, control)

    trainer.callback_handler.on_step_end = then_fail
    refused(trainer, r"An example must fit into memory by itself, .* a whole unit, got one that does not\. Truncate")
    assert trainer.state.global_step == 2
    assert PrivacyLedger.load(tmp_path / "out").steps_run == 3  # counted before it was computed
    resumed = texts(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.state.global_step, resumed.privacy.ledger.steps_run) == (3, 4)


def test_what_was_not_checked_is_not_halved(tmp_path):
    trainer = texts(tmp_path, cls=small("forward"), grad_sample_self_check=False)
    refused(trainer, r"grad_sample_self_check=False, got one that does not: .* max_tokens_per_micro_batch, or leave")


def test_a_draw_whose_rows_share_random_numbers_is_not_halved(tmp_path):
    torch.manual_seed(0)
    config = M2M100Config(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    options = dict(gradient_accumulation_steps=1, per_device_train_batch_size=12, max_steps=1)
    trainer = checked_trainer_of(tmp_path, cls=small("loss"), model=M2M100ForConditionalGeneration(config), **options)
    trainer.data_collator = of_tokens
    with pytest.raises(
        RuntimeError, match=r"where all its rows share random numbers, got one that .* the layer 'model\.encoder'"
    ):
        trainer.train()


@pytest.mark.parametrize(
    "more",
    [
        lambda rows: {"class_weights": torch.ones(3)},
        lambda rows: {"class_weights": torch.ones(rows)},  # by chance, in some micro-batches
        lambda rows: {"texts": ["a"] * rows},
        lambda rows: {"input_ids": torch.ones(rows + 2, 3)},  # of which some examples have several
    ],
    ids=["tensor", "by-chance", "list", "more-rows"],
)
def test_what_has_no_row_for_each_example_is_not_halved(more):
    batch = MicroBatch({"input_ids": torch.ones(4, 3)} | more(4), 4)
    with pytest.raises(RuntimeError, match="if not all that was collated is tensors with a row for each example"):
        halves_of(batch, rows=Rows(frozenset({"input_ids"}), []))


def test_rows_are_told_by_two_sizes():
    batches = {rows: {"x": torch.ones(rows, 2), "weights": torch.ones(11), "one": torch.ones(())} for rows in (11, 13)}
    assert names_of_rows(batches) == {"x"}


@pytest.mark.parametrize(("size", "views", "sizes"), [(2, 1, [1, 1]), (5, 1, [2, 3]), (12, 4, [4, 8]), (8, 4, [4, 4])])
def test_halves_are_of_whole_examples(size, views, sizes):
    batch = MicroBatch({"x": torch.arange(size), "number": 2, "scale": torch.tensor(0.5)}, size, 0.25, views)
    halves = halves_of(batch, rows=Rows(frozenset({"x"}), []))
    assert [half.size for half in halves] == [len(half.inputs["x"]) for half in halves] == sizes
    assert torch.equal(torch.cat([half.inputs["x"] for half in halves]), torch.arange(size))
    assert all((half.weight, half.inputs["number"], half.inputs["scale"]) == (0.25, 2, 0.5) for half in halves)
    assert all(half.rows_each == views for half in halves)


def test_other_errors_are_left_alone(tmp_path):
    class Broken(Small):
        place, error = "backward", staticmethod(lambda: RuntimeError("shapes do not match"))

    with pytest.raises(RuntimeError, match="shapes do not match"):
        texts(tmp_path, cls=Broken).train()


# --- memory that is really too small --------------------------------------------------------------------------------------

SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from doppler_hf import DopplerTrainer
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import checked_trainer_of, weights

class Limited(DopplerTrainer):
    def set_initial_training_values(self, args, dataloader):
        values = super().set_initial_training_values(args, dataloader)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 200 * 2**20,) * 2)
        return values

torch.set_num_threads(1)
found = []
for cls in (DopplerTrainer, Limited):
    print(cls.__name__)
    model = tiny_bert(intermediate_size=65536, max_position_embeddings=64).double()
    options = dict(gradient_accumulation_steps=1, per_device_train_batch_size=24, max_steps=1, noise_seed=1)
    trainer = checked_trainer_of(Path(sys.argv[1]) / cls.__name__, model=model, data=text_data(40), cls=cls, **options)
    trainer.train()
    found.append(weights(trainer))
print("differ by", (found[0] - found[1]).abs().max().item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
@pytest.mark.thorough
def test_a_run_in_too_little_memory_ends_with_the_same_weights(tmp_path):
    """A layer of 65,536 neurons takes 75 MiB and more for each of the tensors that are kept of 24 examples."""
    root = Path(__file__).parents[2]
    # Of one thread and one arena, so that the address space is that of the tensors.
    environment = os.environ | {"PYTHONPATH": str(root), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=root, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    in_plenty, in_little = result.stdout.split("\nLimited\n")
    words = "does not fit into memory, and is computed in halves"
    assert (words in in_plenty, words in in_little) == (False, True)
    assert float(in_little.rpartition("differ by")[2]) <= TOLERANCE["atol"]
