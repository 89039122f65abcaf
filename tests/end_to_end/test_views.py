"""Augmentation multiplicity in the trainer: K views of each example, at the privacy of one. False-alarm rates are stated."""

import functools
import math

import numpy as np
import pytest
import torch
from datasets import Dataset

from doppler_hf import DopplerTrainer
from tests.support.models import CLASSES, build
from tests.support.tiny import text_data, tiny_bert
from tests.support.trainers import NoSignal, Recorder, arguments, trained, trainer_of, weights

VIEWS = 4


def stripes(num_examples=40, seed=0):
    """Images of 8×8 pixels that are bright in one third, which is the label, and noise."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(CLASSES, size=num_examples)
    images = generator.normal(size=(num_examples, 3, 8, 8)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        image[:, :, 3 * label : 3 * label + 2] += 2.0
    return Dataset.from_dict({"pixel_values": images.tolist(), "labels": labels.tolist()})


def shifted(rows):
    """Each image moved up or down and mirrored at random."""
    images = []
    for image in torch.tensor(rows["pixel_values"]):
        moved = torch.roll(image, int(torch.randint(-2, 3, ())), dims=1)
        images.append(moved.flip(1) if torch.rand(()) < 0.5 else moved)
    return rows | {"pixel_values": images}


def stack(rows, *, dtype):
    return {
        "pixel_values": torch.stack([torch.as_tensor(row["pixel_values"], dtype=dtype) for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def image_trainer(tmp_path, *, cls=DopplerTrainer, data=None, model=None, callbacks=None, **overrides):
    options = dict(remove_unused_columns=False, augmentation_multiplicity=VIEWS, grad_sample_self_check=True)
    model = build("vit", torch.float32) if model is None else model
    return cls(
        model=model,
        args=arguments(tmp_path, **(options | overrides)),
        train_dataset=stripes().with_transform(shifted) if data is None else data,
        data_collator=functools.partial(stack, dtype=model.dtype),
        callbacks=callbacks,
    )


class Watched(DopplerTrainer):
    """Keeps every micro-batch of the training, but not of the checks before it."""

    def set_initial_training_values(self, args, dataloader):
        values = super().set_initial_training_values(args, dataloader)
        self.batches = []
        return values

    def compute_per_sample_loss(self, model, inputs):
        self.__dict__.setdefault("batches", []).append({name: value.clone() for name, value in inputs.items()})
        return super().compute_per_sample_loss(model, inputs)


def test_each_example_comes_in_different_views_and_evaluations_do_not(tmp_path):
    trainer = trained(image_trainer(tmp_path, cls=Watched))
    assert trainer.batches
    differing = 0
    for batch in trainer.batches:
        views, labels = batch["pixel_values"].unflatten(0, (-1, VIEWS)), batch["labels"].view(-1, VIEWS)
        assert bool((labels == labels[:, :1]).all())
        # Of one image: rows are moved, and images of noise have no two values alike.
        assert torch.equal(views.flatten(2).sort(dim=2).values, views[:, :1].flatten(2).sort(dim=2).values.expand(-1, 4, -1))
        differing += sum(len({view.cpu().numpy().tobytes() for view in of_example}) > 1 for of_example in views)
    # Of ten ways to move an image four are the same with probability 1e-3.
    examples = sum(len(batch["labels"]) for batch in trainer.batches) // VIEWS
    assert differing >= examples - 3
    evaluated = trainer.get_eval_dataloader(stripes(12, seed=1))
    assert len(evaluated.dataset) == 12
    assert sum(len(batch["labels"]) for batch in evaluated) == 12


def test_the_noise_is_that_of_one_view(tmp_path):
    recorder = Recorder()
    options = dict(noise_multiplier=1.7, per_sample_max_grad_norm=0.3, max_steps=4)
    trainer = trained(image_trainer(tmp_path, cls=NoSignal, callbacks=[recorder], grad_sample_self_check=False, **options))
    drawn = torch.cat(recorder.gradients)
    expected = 1.7 * 0.3 / 8
    assert trainer.privacy.mechanism.noise_std(0) == pytest.approx(expected)
    # The deviation of n normals is off by 1/√(2n) of itself; six of these have a probability of 2e-9.
    assert drawn.std().item() == pytest.approx(expected, rel=6 / math.sqrt(2 * len(drawn)))


def step_by_hand(trainer):
    """The private gradient of the first step, from the micro-batches that the trainer has seen, with ordinary autograd."""
    model, args = trainer.model, trainer.args
    total, losses = torch.zeros_like(weights(trainer)), []
    for batch in trainer.batches:
        for start in range(0, len(batch["labels"]), VIEWS):
            of_example = {name: value[start : start + VIEWS] for name, value in batch.items()}
            loss = model(**of_example).loss  # Transformers' mean over rows
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).cpu()
            total += gradient * min(1.0, args.per_sample_max_grad_norm / gradient.norm())
            losses.append(loss.item())
    return total / trainer.privacy.sampler.expected_batch_size, losses


@pytest.mark.parametrize(("engine", "accumulation"), [("book_keeping", 2), ("opacus", 1)])
def test_a_step_is_that_of_mean_gradients_clipped_once(tmp_path, accumulation, engine):
    recorder = Recorder()
    trainer = image_trainer(
        tmp_path, cls=Watched, model=build("vit"), callbacks=[recorder], clipping="vanilla", noise_seed=1,
        per_sample_max_grad_norm=2.0, noise_multiplier=0.0, learning_rate=0.0,
        allow_any_learning_rate=True, max_steps=1, grad_sample_engine=engine,
        gradient_accumulation_steps=accumulation, per_device_train_batch_size=8 // accumulation, report_train_loss="raw",
    )  # fmt: skip
    found = trainer.train().training_loss
    expected, losses = step_by_hand(trainer)
    torch.testing.assert_close(recorder.gradients[0], expected, atol=1e-9, rtol=1e-7)
    if accumulation == 1:  # else a mean of means, as Transformers'
        assert found == pytest.approx(np.mean(losses), rel=1e-4)


def test_a_private_loss_is_of_the_mean_over_views(tmp_path):
    added = []

    class Losses(Watched):
        def set_initial_training_values(self, args, dataloader):
            values = super().set_initial_training_values(args, dataloader)
            private_loss = self.privacy.private_loss
            add = private_loss.add
            private_loss.add = lambda losses, **options: (added.append(losses), add(losses, **options))
            return values

    options = dict(report_train_loss="private", max_steps=1, learning_rate=0.0, allow_any_learning_rate=True, noise_seed=1)
    trainer = trained(image_trainer(tmp_path, cls=Losses, **options))
    expected = torch.tensor(step_by_hand(trainer)[1])
    torch.testing.assert_close(torch.cat(added).cpu(), expected, atol=1e-5, rtol=1e-4)


def test_users_and_budgets_of_tokens_count_as_with_one_view(tmp_path):
    data = text_data().add_column("user", [number // 2 for number in range(24)])
    ends = []
    for views, tokens in ((1, None), (2, None), (2, 32)):
        recorder = Recorder()
        trainer = trainer_of(
            tmp_path / f"{views} {tokens}", model=tiny_bert().double(), data=data, callbacks=[recorder], noise_seed=1,
            noise_multiplier=0.0, augmentation_multiplicity=views, max_tokens_per_micro_batch=tokens,
            privacy_unit_column="user", per_device_train_batch_size=3, max_steps=2, remove_unused_columns=False,
        )  # fmt: skip
        trainer.train()
        ends.append(torch.stack(recorder.gradients))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-12, rtol=1e-9)  # views that are all the same change nothing
    torch.testing.assert_close(ends[2], ends[0], atol=1e-12, rtol=1e-9)


def mirrored_at_times(rows):
    """Every fourth image mirrored, at random."""
    images = [image.flip(1) if torch.rand(()) < 0.25 else image for image in torch.tensor(rows["pixel_values"])]
    return rows | {"pixel_values": images}


def with_noise(rows, *, dtype):
    batch = stack(rows, dtype=dtype)
    return batch | {"pixel_values": batch["pixel_values"] + torch.randn(batch["pixel_values"].shape, dtype=dtype)}


def with_dropout():
    model = build("vit", torch.float32)
    model.vit.layers[0].mlp.dropout = torch.nn.Dropout(0.1)
    return model


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        pytest.param({}, True, id="no change"), pytest.param(dict(augmentation_multiplicity=1), False, id="one view"),
        pytest.param(dict(transform=mirrored_at_times), False, id="transform"),
        pytest.param(dict(collator=with_noise), False, id="collator"),
        pytest.param(dict(model=with_dropout), False, id="layer of dropout"),
        pytest.param(dict(dropout=0.1), False, id="dropout of the configuration"),
    ],
)  # fmt: skip
def test_views_that_are_all_the_same_are_told_of(tmp_path, capsys, changes, is_told):
    changes = dict(changes)
    data = stripes() if (transform := changes.pop("transform", None)) is None else stripes().with_transform(transform)
    collator, model = changes.pop("collator", stack), changes.pop("model", lambda: build("vit", torch.float32))()
    model.config.attention_probs_dropout_prob = changes.pop("dropout", 0.0)
    trainer = image_trainer(tmp_path, data=data, model=model, max_steps=1, **changes)
    trainer.data_collator = functools.partial(collator, dtype=torch.float32)
    trained(trainer)
    assert ("all views of a record are the same" in " ".join(capsys.readouterr().out.split())) is is_told
