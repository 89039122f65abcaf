"""What a module and a loss of one's own do that a private run cannot take is told by its reason, and trains as mended."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding, TrainerCallback, default_data_collator

from doppler_hf import DopplerTrainer
from tests.support.tiny import Rows
from tests.support.trainers import checked_trainer_of, refused_training, trained


class Own(nn.Module):
    """Two layers, with what lies between and around them given as functions of the module and its input."""

    def __init__(self, within=lambda module, h: h, around=None, **parts):
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)
        self.within, self.around = within, around
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x, *others):
        if self.around is not None:
            return self.around(self, x, *others)
        return self.last(self.within(self, self.first(x).tanh()))


def entropies(model, inputs):
    return F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")


def of_loss(function=entropies, **attributes):
    def compute_per_sample_loss(self, model, inputs):
        return function(model, inputs)

    return type("Mine", (DopplerTrainer,), dict(compute_per_sample_loss=compute_per_sample_loss, **attributes))


def drawn(index, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index))


ROWS = [dict(x=drawn(index, 2), labels=index % 3) for index in range(24)]
RAGGED = [dict(x=drawn(index, 1 + index % 5, 2), labels=index % 3) for index in range(24)]


def labels_of(rows):
    return torch.tensor([row["labels"] for row in rows])


def listed(rows):
    return dict(x=[row["x"] for row in rows], labels=labels_of(rows))


def padded(rows):
    masks = [torch.ones(len(row["x"])) for row in rows]
    return dict(
        x=pad_sequence([row["x"] for row in rows], batch_first=True), mask=pad_sequence(masks, batch_first=True),
        labels=labels_of(rows),
    )  # fmt: skip


def mean_of_row(module, x, mask):
    hidden = module.first(x).tanh() * mask[..., None]
    return module.last(hidden.sum(dim=1) / mask.sum(dim=1, keepdim=True))


def padded_inside(module, x):
    mask = pad_sequence([torch.ones(len(row)) for row in x], batch_first=True)
    return mean_of_row(module, pad_sequence(x, batch_first=True), mask)


def one_by_one(module, x):
    return module.last(torch.stack([module.first(row).tanh().mean(dim=0) for row in x]))


def of_pair(module, both):
    return mean_of_row(module, *both)


def of_nodes(module, x, graph, number):
    hidden = module.first(x).tanh()
    return module.last(torch.zeros(number, 4).index_add(0, graph, hidden))


def with_mask(model, inputs):
    return F.cross_entropy(model(inputs["x"], inputs["mask"]), inputs["labels"], reduction="none")


def with_pair(kind):
    def losses(model, inputs):
        return F.cross_entropy(model(kind([inputs["x"], inputs["mask"]])), inputs["labels"], reduction="none")

    return of_loss(losses)


class Both(collections.UserList):
    """Two tensors in an object that nobody knows."""


def with_graph(model, inputs):
    scores = model(inputs["x"], inputs["graph"], len(inputs["labels"]))
    return F.cross_entropy(scores, inputs["labels"], reduction="none")


def joined(rows):
    numbers = torch.tensor([len(row["x"]) for row in rows])
    graph = torch.repeat_interleave(torch.arange(len(rows)), numbers)
    return dict(x=torch.cat([row["x"] for row in rows]), graph=graph, labels=labels_of(rows))


def as_sparse(rows):
    return default_data_collator(rows) | {"x": torch.stack([row["x"] for row in rows]).to_sparse()}


def as_nested(rows):
    values = torch.nested.nested_tensor([row["x"] for row in rows], layout=torch.jagged)
    return dict(x=values, labels=labels_of(rows))


def as_dense(rows):
    batch = as_nested(rows)
    mask = torch.nested.nested_tensor([torch.ones(len(row["x"]), 1) for row in rows], layout=torch.jagged)
    mask = mask.to_padded_tensor(0)[..., 0]
    return batch | {"x": batch["x"].to_padded_tensor(0), "mask": mask}


def with_rows(rows):
    return default_data_collator(rows) | {"number": len(rows)}


def divided(model, inputs):
    return entropies(model, inputs) / inputs["number"]


def filtered(rows):
    return default_data_collator([row for row in rows if row["labels"] != 2])


def clamped(module, hidden):
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return hidden


def normalized(module, hidden):
    return F.batch_norm(hidden, None, None, training=True)


def counted(module, hidden):
    module.calls += 1
    return hidden


def counting_buffer():
    model = Own(counted)
    model.register_buffer("calls", torch.tensor(0))
    return model


def two_views(model, inputs):
    views = torch.stack([inputs["x"], 0.9 * inputs["x"]], dim=1)
    found = F.normalize(model(views.flatten(0, 1)), dim=-1).unflatten(0, (-1, 2))
    return 1.0 - (found[:, 0] * found[:, 1]).sum(dim=-1)


def scripted():
    model = Own()
    model.first = torch.jit.script(model.first)
    return model


# For each case: the code, what the message names, what is refused, and what its mend changes.
CASES = {
    "one list entry after another": (
        "no-per-sample-gradient", "Pad all records to one tensor with a mask",
        dict(model=lambda: Own(around=one_by_one), rows=RAGGED, collator=listed),
        dict(model=lambda: Own(around=mean_of_row), cls=of_loss(with_mask), collator=padded),
    ),
    "tensors in an object": (
        "no-batch-in-arguments", "one by one",
        dict(model=lambda: Own(around=of_pair), cls=with_pair(Both), rows=RAGGED, collator=padded),
        dict(cls=with_pair(tuple)),
    ),
    "tensors in a list": (
        "other-number-of-losses", "other tensors one by one",
        dict(model=lambda: Own(around=of_pair), cls=with_pair(list), rows=RAGGED, collator=padded),
        dict(model=lambda: Own(around=mean_of_row), cls=of_loss(with_mask)),
    ),
    "sparse": ("batch-not-dense", r"'x'.*to_dense\(\)", dict(collator=as_sparse), dict(collator=default_data_collator)),
    "nested": (
        "batch-not-dense", r"'x'.*to_padded_tensor\(0\)",
        dict(model=lambda: Own(around=mean_of_row), cls=of_loss(with_mask), rows=RAGGED, collator=as_nested),
        dict(collator=as_dense),
    ),
    "clamp": ("backward-not-linear", "register_hook", dict(model=lambda: Own(clamped)), dict(model=Own)),
    "two views": (
        "other-number-of-losses", "rows_per_loss", dict(cls=of_loss(two_views)),
        dict(cls=of_loss(two_views, rows_per_loss=2)),
    ),
    "graphs": (
        "other-number-of-losses", "nodes of graphs",
        dict(model=lambda: Own(around=of_nodes), cls=of_loss(with_graph), rows=RAGGED, collator=joined),
        dict(model=lambda: Own(around=mean_of_row), cls=of_loss(with_mask), collator=padded),
    ),
    "number of rows": (
        "depends-on-others", "'number', one value for the whole batch", dict(cls=of_loss(divided), collator=with_rows),
        dict(cls=of_loss()),
    ),
    "batch norm": (
        "functional-batch-norm", "F.layer_norm", dict(model=lambda: Own(normalized)),
        dict(model=lambda: Own(lambda module, hidden: F.layer_norm(hidden, (4,)))),
    ),
    "filter": (
        "rows-left-out", "Remove these rows beforehand", dict(collator=filtered),
        dict(rows=[row for row in ROWS if row["labels"] != 2]),
    ),
    "counter": (
        "calls-counted", "'calls'", dict(model=counting_buffer), dict(model=lambda: Own(counted, calls=0)),
    ),
    "script": ("scripted-module", "'first'", dict(model=scripted), dict(model=Own)),
}  # fmt: skip


def options_of(*, model=Own, cls=None, rows=ROWS, collator=default_data_collator):
    torch.manual_seed(0)
    return dict(
        model=model(), cls=cls or of_loss(), data=Rows(rows), collator=collator, max_steps=1, remove_unused_columns=False
    )


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_with_its_reason_and_trains_with_its_mend(tmp_path, case):
    code, match, options, mend = CASES[case]
    refused_training(tmp_path, code, match=match, **options_of(**options))
    trained(checked_trainer_of(tmp_path / "mended", **options_of(**options | mend)))


def test_rows_in_a_list_of_tensors_are_a_batch(tmp_path):
    trained(
        checked_trainer_of(tmp_path, **options_of(model=lambda: Own(around=padded_inside), rows=RAGGED, collator=listed))
    )


def encoded(rows):
    return BatchEncoding(default_data_collator(rows))


def of_state(module, state, x):
    first, _ = state  # as a recurrent state, which has its layers first
    return module.last(module.first(x).tanh() + first.sum(0)[:, :4])


def with_state(model, inputs):
    state = torch.zeros(3, len(inputs["x"]), 4), torch.zeros(3, len(inputs["x"]), 4)
    return F.cross_entropy(model(state, inputs["x"]), inputs["labels"], reduction="none")


def whole_batch(model, inputs):
    return F.cross_entropy(model(inputs), inputs["labels"], reduction="none")


@pytest.mark.parametrize(
    "options",
    [
        dict(model=lambda: Own(around=lambda module, batch: module.last(module.first(batch["x"]))), cls=of_loss(whole_batch),
             collator=encoded),
        dict(model=lambda: Own(around=of_state), cls=of_loss(with_state)),
    ],
    ids=["a mapping that is no dictionary", "a tuple in front"],
)  # fmt: skip
def test_the_rows_are_those_of_the_input(tmp_path, options):
    trained(checked_trainer_of(tmp_path, **options_of(**options)))


def average(teacher, model):
    with torch.no_grad():
        for name, weight in teacher.named_parameters():
            weight.lerp_(model.get_parameter(name), 0.1)


def distance(model, teacher, inputs):
    with torch.no_grad():
        targets = teacher(inputs["x"]).softmax(dim=-1)
    return F.cross_entropy(model(inputs["x"]), targets, reduction="none")


class Averages(TrainerCallback):
    def __init__(self, teacher):
        self.teacher = teacher

    def on_step_end(self, args, state, control, model=None, **kwargs):
        average(self.teacher, model)


def test_an_average_of_weights_is_kept_outside_of_the_model(tmp_path, capsys):
    def in_the_loss(model, inputs):
        average(model.teacher, model)
        return distance(model, model.teacher, inputs)

    def with_teacher():
        return Own(teacher=Own().requires_grad_(False))

    refused_training(
        tmp_path, "weights-written", match="'teacher.*mean teacher.*on_step_end",
        **options_of(model=with_teacher, cls=of_loss(in_the_loss)),
    )  # fmt: skip
    model = with_teacher()
    options = options_of(model=lambda: model, cls=of_loss(lambda model, inputs: distance(model, model.teacher, inputs)))
    trainer = trained(checked_trainer_of(tmp_path / "inside", callbacks=[Averages(model.teacher)], **options))
    trainer.save_model()
    assert "were changed by something other than the steps of the private run" in capsys.readouterr().out
    model = Own()
    teacher = copy.deepcopy(model).requires_grad_(False)
    options = options_of(model=lambda: model, cls=of_loss(lambda model, inputs: distance(model, teacher, inputs)))
    trainer = trained(checked_trainer_of(tmp_path / "outside", callbacks=[Averages(teacher)], **options))
    trainer.save_model()
    assert "covers the weights next to it" in capsys.readouterr().out
    assert not torch.equal(teacher.last.weight, model.last.weight)


def right(predicted):
    return {"accuracy": float((predicted.predictions.argmax(axis=-1) == predicted.label_ids).mean())}


def test_metrics_without_labels_are_told_to_name_them(tmp_path, capsys):
    options = dict(evaluated=Rows(ROWS[:8]), eval_strategy="steps", eval_steps=1, **options_of())
    strict = lambda predicted: {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids[0]).mean())}  # noqa: E731
    refused_training(tmp_path, "no-names-of-labels", match=r"label_names=\['labels'\]", compute_metrics=strict, **options)
    options |= dict(model=Own(), max_steps=1)
    trained(checked_trainer_of(tmp_path / "named", label_names=["labels"], compute_metrics=right, **options))
    capsys.readouterr()
    options |= dict(model=Own())
    trained(checked_trainer_of(tmp_path / "other", compute_metrics=lambda predicted: {"one": 1.0}, **options))
    assert "compute_metrics gets no labels" in capsys.readouterr().out
