"""The card begins with privacy, says what the run knows, asks for nothing, and keeps what people have written."""

import contextlib
import json
import re
import shutil
from unittest import mock

import datasets
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertForSequenceClassification,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Trainer,
    ViTImageProcessorPil,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Processor,
)
from transformers.image_processing_utils import BaseImageProcessor
from transformers.video_processing_utils import BaseVideoProcessor

from doppler_hf import DopplerTrainer
from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.accounting import Releases, get_total_epsilon
from doppler_hf.privacy.accounting.attack import percent, trade_off
from doppler_hf.privacy.ledger.terms import HOW_COMPUTED, not_covered_in_words
from doppler_hf.run.saving.card_part import BEGIN, marked
from doppler_hf.run.saving.card_sections import loader_of, privacy_section
from doppler_hf.run.saving.model_card import renew_card
from tests.support.ledgers import after, all_events, statement
from tests.support.tiers import thorough
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import OfLogits, On, at, interrupt, trained, trainer_of

EVALUATED = dict(max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def adapted(base=None):
    return get_peft_model(base or tiny_bert(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


def items(section):
    """The items of the list of terms as a dictionary."""
    return dict(re.findall(r"^- \*\*(.+?)\*\*: (.*)$", section, re.MULTILINE))


def headings(card, level=2):
    return re.findall(rf"^{'#' * level} (.*)$", card, re.MULTILINE)


def snippet(card, language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", card, re.DOTALL)
    return found


# The plans of a ledger of all events: the second begins a round of its own, and ended a step before its plan.
TWO_RUNS = [Releases(1.0, 0.05, 7), Releases(1.0, 0.05, 4)]


def test_the_section_says_what_the_ledger_says():
    ledger = all_events(train_loss="raw", target_epsilon=8.0)
    section = privacy_section(ledger)
    terms = items(section)
    epsilon = get_total_epsilon(TWO_RUNS, delta=1e-5)
    assert terms["ε"] == f"{epsilon:.4g}, {HOW_COMPUTED}"
    assert (
        f"Trained with ({ledger.epsilon():.4g}, 1e-05)-differential privacy for one record (adding or removing it). ε was "
        f"{HOW_COMPUTED}." in section
    )
    best = trade_off(TWO_RUNS)
    rates = {"1 %": percent(best.true_positive_rate(0.01)), "0.1 %": percent(best.true_positive_rate(0.001))}
    for false, true in rates.items():
        assert terms[f"any attack with {false} false positives"] == f"at most {true} true positives"
    assert f"recognises a training record with a probability of at most {rates['1 %']};" in section
    assert terms["ε covers"] == "one record"
    assert terms["neighbouring data sets"] == "add or remove one record"
    assert terms["number of records N"] == "1,000 (public, not protected)"
    assert terms["target ε"] == "8"
    assert terms["restarts"] == "at step 6"
    assert terms["steps"] == "10 of 10 planned"
    assert terms["noise multiplier σ"] == "1"
    for steps in (7, 4):
        assert terms[f"ε computed for {steps} steps"] == "σ₀ = 1, sample rate q = 0.05"
    assert terms["clip norm C"] == "1 (automatic, flat)"
    assert terms["noise source"] == "a test"
    assert "NOT PRIVATE" in terms["training loss"]
    assert "opacus " in terms["software"]
    for line in not_covered_in_words(ledger):
        assert f"\n- {line}\n" in section
    assert f"\n    {ledger.head}\n" in section
    assert snippet(section, "sh") == "doppler-hf verify .\n"
    assert section.startswith("## Differential privacy\n")
    assert "|" not in section  # a phone would cut a table of long cells


@pytest.mark.parametrize(
    ("terms", "why"),
    [(dict(private=False), "its noise and random batches"), (dict(target_delta=1e-3), "δ ≥ 1/N, with which one")],
)
def test_what_is_not_private_is_not_called_so(terms, why):
    section = privacy_section(after(PrivacyLedger.open(statement(**terms)), 2))
    assert f"**Not differentially private**: {why}" in section
    assert "Trained with" not in section
    assert "ε covers the weights" not in section
    assert "attack" not in section
    assert items(section)["ε"].startswith("inf,") == (terms == dict(private=False))


def written_by(way, tmp_path):
    """Train and save in one of three ways, and return trainer and card."""
    model = adapted() if way != "plain" else tiny_bert()
    trainer = trained(trainer_of(tmp_path, model=model, compute_metrics=accuracy, **EVALUATED))
    trainer.save_model()
    if way != "adapter":
        trainer.create_model_card()
    return trainer, tmp_path / "out" / "README.md"


class PadsToGrid:
    """A collator that pads as its attribute says."""

    pad_to_multiple_of = None

    def __call__(self, rows):
        batch = pad(rows)
        more = -batch["input_ids"].shape[1] % (self.pad_to_multiple_of or 1)
        return {name: F.pad(each, (0, more)) if each.ndim > 1 else each for name, each in batch.items()}


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        (dict(bf16=True), True),
        (dict(), False),
        (dict(bf16=True, collator=PadsToGrid()), False),
        (dict(bf16=True, data=Rows()), True),  # whose lengths nobody knows
        (dict(bf16=True, data=Rows([row for row in text_data(200) if len(row["input_ids"]) == 5])), False),
    ],
)
def test_the_card_says_if_the_rounding_of_bfloat16_is_not_covered(tmp_path, options, is_told):
    trainer = trained(trainer_of(tmp_path, **options))
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    not_covered = card.split("Not covered by ε:")[1].split("###")[0]
    assert ("\n- the rounding of bfloat16, if" in not_covered) is is_told


@pytest.mark.parametrize("way", ["adapter", "plain", *thorough("adapter, written anew")])
def test_the_card_begins_with_privacy_and_says_what_the_run_knows(tmp_path, way):
    trainer, path = written_by(way, tmp_path)
    card = path.read_text("utf-8")
    assert "information needed" not in card.lower()
    assert headings(card, 1) == ["out"]
    assert headings(card) == ["Differential privacy", "How to load it", "The model", "Results", "Training arguments"]
    facts = items(card)
    last = [log for log in trainer.state.log_history if "eval_loss" in log][-1]
    assert facts["loss"] == f"{last['eval_loss']:.4g}"
    assert facts["accuracy"] == f"{last['eval_accuracy']:.4g}"
    assert f"| {last['step']} | {last['eval_loss']:.4g} | {last['eval_accuracy']:.4g} |" in card
    assert facts["training data"] == "24 records"
    assert facts["task"] == "text classification"
    assert facts["trained"].startswith("adapter LORA, 98 of" if way != "plain" else "3,122 of 3,122")
    assert "- learning_rate: 0.01 (as given)\n" in card
    assert "- optimizer: adam_bc, of doppler_hf; filter: none (auto)\n" in card
    assert "- training_steps: 4\n" in card
    assert max(map(len, card.split("| step |")[1].split("\n\n")[0].splitlines())) < 40
    if way == "adapter":
        of_checkpoint = (tmp_path / "out" / "checkpoint-2" / "README.md").read_text("utf-8")
        assert "information needed" not in of_checkpoint.lower()
        assert headings(of_checkpoint, 1) == ["out"]
        assert "after step 2" in of_checkpoint
        assert PrivacyLedger.load(tmp_path / "out" / "checkpoint-2").head in of_checkpoint


class Scores:
    """Metrics by a script: at each evaluation the next score."""

    def __init__(self, *scores):
        self.scores = list(scores)

    def __call__(self, prediction):
        return accuracy(prediction) | {"macro_recall": self.scores.pop(0)}


BEST = dict(
    max_steps=6, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
    metric_for_best_model="macro_recall", greater_is_better=True, rehearse=False,
)  # fmt: skip
ROWS = ("| 2 | 0.25 |", "| 4 | 0.75 |", "| 6 | 0.5 |")


def results_in(folder):
    """The section of the results, and its rows without the loss."""
    section = (folder / "README.md").read_text("utf-8").split("## Results\n")[1].split("\n## ")[0]
    return section, tuple(re.sub(r"^(\| \d+ \|)[^|]*\|", r"\1", row) for row in re.findall(r"^\| \d.*$", section, re.M))


@pytest.mark.parametrize("metric", ["macro_recall", *thorough("eval_macro_recall")])
def test_the_card_says_which_step_the_weights_are_from_and_shows_its_results(tmp_path, metric):
    scores = Scores(0.25, 0.75, 0.5)
    options = BEST | dict(metric_for_best_model=metric)
    trainer = trained(trainer_of(tmp_path, model=adapted(), compute_metrics=scores, **options))
    trainer.save_model()
    section, rows = results_in(tmp_path / "out")
    assert "The weights are those of step 4, chosen by `macro_recall`; the training went on to step 6.\n" in section
    assert "On the evaluation data, after step 4:" in section
    assert (items(section)["macro recall"], rows) == ("0.75", ROWS)
    losses = {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
    assert items(section)["loss"] == f"{losses[4]:.4g}"
    for step in (2, 4, 6):  # a checkpoint has the weights of its own step
        of_checkpoint = results_in(tmp_path / "out" / f"checkpoint-{step}")[0]
        assert f"after step {step}:" in of_checkpoint
        assert "chosen by" not in of_checkpoint
    scores.scores = [0.125, 0.375]
    trainer.evaluate()
    trainer.evaluate(text_data(6, seed=2), metric_key_prefix="eval_test")
    trainer.create_model_card()
    section, rows = results_in(tmp_path / "out")
    assert "after step 4:" in section
    found = items(section)
    assert (found["macro recall"], found["test macro recall"], rows) == ("0.125", "0.375", ROWS)
    # A later training forgets what was chosen before.
    scores.scores = [0.25]
    trainer.args.max_steps, trainer.args.load_best_model_at_end, trainer.args.save_strategy = 2, False, "no"
    trainer.train()
    trainer.create_model_card()
    section, _ = results_in(tmp_path / "out")
    assert "after step 2:" in section
    assert "chosen by" not in section


def remove_best(args, state, **_):
    if state.global_step == 6:
        shutil.rmtree(f"{args.output_dir}/checkpoint-4")


@pytest.mark.parametrize(
    ("why", "options", "scores", "step"),
    [
        ("the best checkpoint was removed", dict(callbacks=[On(save=remove_best)]), (0.25, 0.75, 0.5), 6),
        ("nothing was loaded", dict(load_best_model_at_end=False), (0.25, 0.75, 0.5), 6),
        *thorough(("the best evaluation has no checkpoint", dict(save_steps=4, max_steps=8), (0.25, 0.5, 0.75, 0.5), 4)),
        ("it stopped early", dict(max_steps=10, callbacks=[EarlyStoppingCallback(1)]), (0.25, 0.75, 0.5), 4),
    ],
)
def test_the_step_of_the_weights_is_that_of_what_was_loaded(tmp_path, why, options, scores, step):
    trainer = trained(trainer_of(tmp_path, compute_metrics=Scores(*scores), **BEST | options))
    saved = tmp_path / "out" / f"checkpoint-{step}" / "model.safetensors"
    for name, value in load_file(saved).items():
        assert value.equal(trainer.model.state_dict()[name].cpu()), why
    trainer.create_model_card()
    section, _ = results_in(tmp_path / "out")
    assert f"after step {step}:" in section
    assert ("The weights are those of step 4, chosen by" in section) == (step == 4)


def test_a_resumed_run_knows_a_best_checkpoint_of_before(tmp_path):
    scores = Scores(0.75, 0.5)
    stops = On(step_end=at(5, interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, compute_metrics=scores, callbacks=[stops], **BEST).train()
    trainer = trainer_of(tmp_path, compute_metrics=Scores(0.25), **BEST)
    trainer.train(resume_from_checkpoint=True)
    trainer.create_model_card()
    section, rows = results_in(tmp_path / "out")
    assert "The weights are those of step 2, chosen by `macro_recall`; the training went on to step 6." in section
    assert rows == ("| 2 | 0.75 |", "| 4 | 0.5 |", "| 6 | 0.25 |")


@pytest.mark.parametrize("way", ["adapter", *thorough("plain", "adapter, written anew")])
def test_the_front_matter_is_the_hubs(tmp_path, way):
    _, path = written_by(way, tmp_path)
    data = ModelCard.load(path).data
    assert data.library_name == ("transformers" if way == "plain" else "peft")
    assert {"differential-privacy", "doppler_hf"} <= set(data.tags)
    assert data.pipeline_tag == "text-classification"
    assert data.metrics == ["accuracy"]
    assert data.base_model is None


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")  # PEFT's, for new tokens
@pytest.mark.parametrize("way", ["adapter", "adapter of a changed base", "adapter for new tokens", "plain"])
def test_the_snippet_of_the_card_loads_the_model(tmp_path, monkeypatch, way):
    base = tmp_path / "a base"
    changes = {"num_hidden_layers": 1, "hidden_act": "relu", "id2label": {0: "bad", 1: "good"}} if "changed" in way else {}
    tiny_bert(num_hidden_layers=2).save_pretrained(base)
    model = BertForSequenceClassification.from_pretrained(base, **changes)
    if "tokens" in way:
        model.resize_token_embeddings(model.config.vocab_size + 2)
    model = adapted(model) if "adapter" in way else model
    trainer = trained(trainer_of(tmp_path, model=model))
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert str(tmp_path) not in card  # a folder of this machine
    assert items(card)["base model"] == "`a base`"
    data = ModelCard(card).data
    assert data.base_model is None
    assert not [tag for tag in data.tags if "base_model" in tag]
    monkeypatch.chdir(tmp_path / "out")
    (tmp_path / "out" / "a base").symlink_to(base)
    names = {}
    exec(snippet(card, "python"), names)
    found = {name: value for name, value in names["model"].named_parameters() if "lora" in name or way == "plain"}
    assert found
    for name, value in found.items():
        assert value.equal(trainer.model.get_parameter(name).cpu())
    tokens = torch.arange(6)[None]
    outputs = [each.eval()(input_ids=tokens).logits for each in (names["model"], trainer.model)]
    torch.testing.assert_close(*outputs)
    assert names["model"].config.id2label == trainer.model.config.id2label
    for name in ("num_hidden_layers", "hidden_act", "id2label"):
        assert (f"{name}=" in card) == ("changed" in way), name


def word_tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0, "a": 1})), pad_token="[PAD]")


def speech_processor(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "a": 5}))
    return Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")))


class OwnFeatures(Wav2Vec2FeatureExtractor):
    """A class of one's own, which no Auto class knows."""


PROCESSORS = {
    "tokenizer": lambda tmp_path: word_tokenizer(),
    "image_processor": lambda tmp_path: ViTImageProcessorPil(),
    "feature_extractor": lambda tmp_path: Wav2Vec2FeatureExtractor(feature_size=2),
    "processor": speech_processor,
    "feature_extractor, own": lambda tmp_path: OwnFeatures(feature_size=2),
}


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("model", ["plain", *thorough("adapter", "own")])
def test_the_snippet_of_the_card_loads_the_processing_class(tmp_path, monkeypatch, model, kind):
    made, base = PROCESSORS[kind](tmp_path), tmp_path / "out" / "a base"
    tiny_bert().save_pretrained(base)
    whole = BertForSequenceClassification.from_pretrained(base)
    trained_model = {"plain": lambda: whole, "adapter": lambda: adapted(whole), "own": lambda: Around(whole)}[model]()
    cls = OfLogits if model == "own" else DopplerTrainer
    options = dict(remove_unused_columns=False) if model == "own" else {}  # its forward names no columns
    trainer = trainer_of(tmp_path, model=trained_model, processing_class=made, cls=cls, max_steps=1, **options)
    trained(trainer).save_model()
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path / "out")
    names = {"model": Around(whole)}
    exec(snippet(card, "python"), names)
    found = names[kind.partition(",")[0]]
    assert type(found) is type(made)
    parts = (found, made) if kind != "processor" else (found.feature_extractor, made.feature_extractor)
    texts = [each.get_vocab() if kind == "tokenizer" else each.to_dict() for each in parts]
    assert texts[0] == texts[1]
    if kind == "processor":
        assert found.tokenizer.get_vocab() == made.tokenizer.get_vocab()


def test_a_video_processor_is_loaded_as_one():
    # Transformers makes one only where torchvision is installed.
    kinds = {"Video": (BaseVideoProcessor,), "Image": (BaseImageProcessor,)}
    made = {name: type(name, bases, {"__module__": "transformers.models.a"}) for name, bases in kinds.items()}
    found = {name: loader_of(object.__new__(each)).loader for name, each in made.items()}
    assert found == {"Video": "AutoVideoProcessor", "Image": "AutoImageProcessor"}


def test_a_base_model_and_a_data_set_of_the_hub_are_linked(tmp_path):
    model = tiny_bert()
    model.config._name_or_path = "google/a-bert"
    rows = datasets.Dataset.from_list([*text_data()])
    rows.info.dataset_name, rows.info.config_name = "sentences", "default"
    rows.info.download_checksums = {"hf://datasets/me/sentences@abc/train.parquet": None}
    trainer = trained(trainer_of(tmp_path, model=model, data=rows))
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    facts, data = items(card), ModelCard(card).data
    assert facts["base model"] == "[google/a-bert](https://huggingface.co/google/a-bert)"
    assert facts["training data"] == "[me/sentences](https://huggingface.co/datasets/me/sentences), 24 records"
    assert data.base_model == "google/a-bert"
    assert data.datasets == ["me/sentences"]


@pytest.mark.parametrize("part", ["a model", "an adapter", "neither"])
def test_a_module_of_ones_own_without_a_configuration_has_a_card_too(tmp_path, monkeypatch, part):
    base = tiny_bert()
    base.config._name_or_path = "google/a-bert"
    model = {"a model": lambda: Around(base), "an adapter": lambda: Around(adapted(base)), "neither": Sums}[part]()
    trainer = trained(trainer_of(tmp_path, model=model, cls=OfLogits, remove_unused_columns=False, max_steps=1))
    path, hub = tmp_path / "out" / "README.md", mock.Mock()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    if part == "an adapter":
        model.model.save_pretrained(path.parent)  # with a card of PEFT's, to which Transformers lets the model add
        assert "library_name: peft" in path.read_text("utf-8")
    trainer.hub_model_id = "me/mine"
    trainer.push_to_hub(license="mit")
    hub.upload_folder.assert_called_once()
    card = path.read_text("utf-8")
    assert "information needed" not in card.lower()
    assert headings(card) == ["Differential privacy", "How to load it", "The model", "Training arguments"]
    facts, data = items(card), ModelCard(card).data
    assert facts["class"] == f"`{type(model).__name__}`"
    assert data.license == "mit"
    assert data.base_model == (None if part == "neither" else "google/a-bert")
    assert ("google/a-bert" in facts.get("base model", "")) == (part != "neither")
    assert not hasattr(model, "config")


def test_a_module_of_ones_own_has_transformers_card_without_privacy(tmp_path):
    options = dict(disable_dp=True, noise_multiplier=None, remove_unused_columns=False, max_steps=1)
    trainer_of(tmp_path, model=Around(tiny_bert()), cls=OfLogits, **options).create_model_card(license="mit")
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "license: mit" in card
    assert "Differential privacy" not in card


def test_the_card_of_users_counts_users_and_not_their_rows(tmp_path):
    rows = datasets.Dataset.from_list([*text_data()]).add_column("who", [number // 2 for number in range(24)])
    trainer = trained(trainer_of(tmp_path, data=rows, privacy_unit_column="who", per_device_train_batch_size=2))
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert items(card)["training data"] == "12 users"
    # Transformers 5.24.0 is a version, and no number of rows.
    assert not re.search(r"(?<![\d.])24(?![\d.])", re.sub(r"[0-9a-f]{8,}", "", card))


class Around(nn.Module):
    """A module of one's own."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs).logits


class Sums(nn.Module):
    """A module without a part of Transformers'."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        return self.head((self.words(input_ids) * attention_mask[..., None]).sum(dim=1))


BY_HAND = (
    "Above all else.",
    "In the middle of it.",
    "## Who should use it",
    "Nobody.\n\n```sh\n# no heading\n```",
    "At the end.",
)


def with_text(card):
    return (
        card.replace("\n# out\n", f"\n# out\n\n{BY_HAND[0]}\n")
        .replace("## How to load it\n", f"{BY_HAND[1]}\n\n## How to load it\n")
        .replace("license: mit\n", "")
        .replace("---\n", "---\nlicense: mit\n", 1)
    ) + "\n".join(["", *BY_HAND[2:], ""])


@pytest.mark.parametrize("way", ["adapter", "plain"])
def test_text_that_people_have_added_stays_wherever_it_is(tmp_path, way):
    trainer, path = written_by(way, tmp_path)
    path.write_text(with_text(path.read_text("utf-8")), "utf-8")
    saves = [trainer.save_model, trainer.create_model_card, trainer.create_model_card, trainer.save_model]
    if way == "adapter":
        saves.insert(1, lambda: trainer.model.save_pretrained(path.parent))
    for save in saves:
        save()
        card = path.read_text("utf-8")
        assert {text: card.count(text) for text in BY_HAND} == dict.fromkeys(BY_HAND, 1)
        assert card.count("## Differential privacy\n") == card.count(BEGIN) == 1
        assert headings(card)[0] == "Differential privacy"
        assert ModelCard(card).data.license == "mit"
        assert PrivacyLedger.load(path.parent).head in card


def test_what_is_filled_in_of_a_template_stays_and_its_gaps_go(tmp_path):
    path = tmp_path / "out" / "README.md"
    path.parent.mkdir()
    card = str(ModelCard.from_template(ModelCard("---\nlicense: mit\n---\n").data))
    assert card.count("More Information Needed") > 20
    card = card.replace("- **Developed by:** [More Information Needed]", "- **Developed by:** Alice")
    card = card.replace("## Environmental Impact\n", "## Environmental Impact\n\nA kettle's worth.\n")
    path.write_text(card, "utf-8")
    trained(trainer_of(tmp_path, model=adapted())).save_model()
    card = path.read_text("utf-8")
    assert "information needed" not in card.lower()
    assert "- **Developed by:** Alice\n" in card
    assert "A kettle's worth." in card
    assert headings(card)[-2:] == ["Model Details", "Environmental Impact"]
    assert headings(card, 3)[-1] == "Model Description"
    assert "<!--" not in card.replace(BEGIN, "").replace("<!-- doppler_hf: end", "")


def test_a_card_written_by_hand_alone_stays(tmp_path):
    path, text = tmp_path / "out" / "README.md", "# My project\n\nHow to build it.\n\n## A list\n\n- more: less\n"
    path.parent.mkdir()
    path.write_text(text, "utf-8")
    trainer = trained(trainer_of(tmp_path))
    trainer.save_model()
    assert path.read_text("utf-8") == text  # of a plain model nobody has asked for a card
    trainer.create_model_card()
    card = path.read_text("utf-8")
    assert headings(card, 1) == ["My project"]
    assert card.endswith("How to build it.\n\n## A list\n\n- more: less\n")
    assert headings(card)[0] == "Differential privacy"


def test_what_transformers_wrote_before_goes_and_what_people_added_to_it_stays(tmp_path):
    public = trained(trainer_of(tmp_path, disable_dp=True, noise_multiplier=None, **EVALUATED))
    public.create_model_card()
    path = tmp_path / "out" / "README.md"
    path.write_text(path.read_text("utf-8").replace("## Training procedure", "By hand.\n\n## Training procedure"), "utf-8")
    trainer = trained(trainer_of(tmp_path, **EVALUATED))
    trainer.create_model_card()
    card = path.read_text("utf-8")
    assert "information needed" not in card.lower()
    assert card.count("By hand.") == card.count("- learning_rate:") == 1
    assert "Training Loss" not in card
    assert "generated automatically" not in card


def test_a_card_of_an_earlier_version_loses_its_section_and_nothing_else(tmp_path):
    old = (
        "# A model\n\nUsage.\n\n## Differential privacy\n\nTrained with (1, 1e-5)-differential privacy.\n\n| | |\n"
        "|---|---|\n| a | b |\n\nNot covered by ε:\n\n- this\n\n"
        "`doppler-hf verify` recomputes this from `privacy_ledger.json` beside "
        f"the model. The last hash of that file is\n\n    {64 * 'a'}\n\n## Mine\n\nText.\n"
    )
    path = tmp_path / "README.md"
    path.write_text(old, "utf-8")
    renew_card(path, "## Differential privacy\n\nNew.", title="other", metadata={})
    card = path.read_text("utf-8")
    assert "Usage." in card
    assert headings(card) == ["Differential privacy", "Mine"]
    assert card.endswith("## Mine\n\nText.\n")
    assert "1e-5" not in card
    renew_card(path, None, title="other", metadata={})
    assert headings(path.read_text("utf-8")) == ["Mine"]


def test_a_part_renewed_is_a_part_replaced(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"# A\n\n{marked('## Differential privacy' + chr(10) + chr(10) + 'ε = 3')}", "utf-8")
    for _ in range(3):
        renew_card(path, "## Differential privacy\n\nε = 4", title="other", metadata={"tags": ["a"]})
        text = path.read_text("utf-8")
        assert (text.count("ε = 3"), text.count("ε = 4"), text.count("- a\n")) == (0, 1, 1)
    again = text.replace("ε = 4", "ε = 0.1 and a half")  # somebody's own words, which are no longer the run's
    path.write_text(again, "utf-8")
    renew_card(path, "## Differential privacy\n\nε = 4", title="other", metadata={})
    card = path.read_text("utf-8")
    assert card.index("ε = 4") < card.index("end of this part") < card.index("ε = 0.1 and a half")


def test_a_fault_of_the_card_fails_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("doppler_hf.run.saving.beside_model.written_part", lambda *_: 1 / 0)
    trainer = trained(trainer_of(tmp_path, model=adapted()))
    trainer.save_model()
    trainer.create_model_card()
    said = capsys.readouterr().out
    assert said.count("was not completed (ZeroDivisionError: division by zero). The model is saved all the same.") == 2
    assert (tmp_path / "out" / LEDGER_NAME).exists()


@pytest.mark.parametrize("when", ["in the training", "after it"])
def test_an_evaluation_of_the_training_set_is_not_published(tmp_path, when):
    data = text_data()
    evaluated = data if when == "in the training" else text_data(8, seed=1)
    warned = pytest.warns(UserWarning, match="NOT PRIVATE")
    with warned if when == "in the training" else contextlib.nullcontext():
        trainer = trained(trainer_of(tmp_path, data=data, evaluated=evaluated, **EVALUATED))
    if when == "after it":
        with warned:
            trainer.evaluate(data)
    own = trainer.state.log_history[-1]["eval_loss"] if when == "after it" else None
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert ("## Results" in card) == (when == "after it")
    assert own is None or items(card)["loss"] != f"{own:.4g}"


def test_a_trainer_that_has_not_trained_the_weights_keeps_their_card(tmp_path, capsys):
    trained(trainer_of(tmp_path)).save_model()
    path = tmp_path / "out" / "README.md"
    head = PrivacyLedger.load(path.parent).head
    fresh = trainer_of(tmp_path, model=BertForSequenceClassification.from_pretrained(path.parent))
    fresh.create_model_card(license="mit")  # there is no card, so it is one with the guarantee alone
    card = path.read_text("utf-8")
    assert headings(card) == ["Differential privacy"]
    assert f"\n    {head}\n" in card
    assert "Trained with (" in card
    assert "the rounding of bfloat16, if the training computed in it" in card
    assert "information needed" not in card.lower()
    data = ModelCard(card).data
    assert data.license == "mit"
    assert {"differential-privacy", "doppler_hf"} <= set(data.tags)
    trained(again := trainer_of(tmp_path / "two", **EVALUATED)).save_model()
    again.create_model_card()
    path = tmp_path / "two" / "out" / "README.md"
    path.write_text(with_text(path.read_text("utf-8")), "utf-8")
    card = path.read_text("utf-8")
    fresh = trainer_of(tmp_path / "two")
    capsys.readouterr()
    fresh.create_model_card()
    assert path.read_text("utf-8") == card
    assert "was left as it is" in capsys.readouterr().out
    # Where the ledger does not cover the weights, nothing is said of privacy.
    tiny_bert().save_pretrained(path.parent)
    fresh.create_model_card()
    assert "Differential privacy" not in path.read_text("utf-8")


def test_a_trainer_without_privacy_is_transformers_own(tmp_path):
    trainer = trained(trainer_of(tmp_path, disable_dp=True, noise_multiplier=None))
    trainer.create_model_card()
    ours = (tmp_path / "out" / "README.md").read_text("utf-8")
    Trainer.create_model_card(trainer)
    assert ours == (tmp_path / "out" / "README.md").read_text("utf-8")
    assert f"Transformers {transformers.__version__}" in ours
