"""Ordinary mistakes are told with a fix before anything is spent, and each fix trains."""

import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, IterableDataset, TensorDataset, default_collate

from doppler_hf import DopplerTrainer
from tests.support.refusals import refused
from tests.support.tiers import combined, thorough
from tests.support.tiny import Rows, pad, text_data, tiny_bert
from tests.support.trainers import arguments, checked_trainer_of, trainer_of, weights
from tests.support.unspent import refusal_unspent

TOKENIZER = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0}, "[PAD]")), pad_token="[PAD]")
IMAGE = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)


def made(tmp_path, data, *, collator=None, **options):
    """A trainer whose collator is Transformers' unless it is given."""
    return checked_trainer_of(tmp_path, data=data, collator=collator, **{"max_steps": 1} | options)


def trains(trainer):
    trainer.train()
    return trainer.state.global_step == 1


def told(code, *args, match=None, **options):
    """Check that a mistake is refused, and no error of another library comes before."""
    with refused(code, match=match) as caught:
        made(*args, **options).train()
    return caught.value


# --- data -----------------------------------------------------------------------------------------------------------------


def test_what_is_no_data_set_is_told_how_to_become_one(tmp_path):
    whole = text_data()
    listed = lambda rows: Dataset.from_list(list(rows))  # noqa: E731
    frame, columns, stream = whole.to_pandas(), whole[:], whole.to_iterable_dataset()
    for given, code, mend, fixed in (
        (frame, "rows-not-numbered", r"datasets\.Dataset\.from_pandas\(train_dataset\)", Dataset.from_pandas),
        (columns, "rows-not-numbered", r"dict.* datasets\.Dataset\.from_dict\(train_dataset\)", Dataset.from_dict),
        (DatasetDict(train=whole), "rows-not-numbered", r"train_dataset\['train'\]", lambda sets: sets["train"]),
        (stream, "streamed-data", r"datasets\.Dataset\.from_list\(list\(", listed),
    ):  # fmt: skip
        told(code, tmp_path, given, match=mend, collator=pad)
        assert trains(made(tmp_path / "fixed", fixed(given), collator=pad))
    # Transformers would ask for max_steps first.
    told("streamed-data", tmp_path, stream, collator=pad, max_steps=-1)


@pytest.mark.parametrize("given", [str, Path])
def test_a_path_is_told_how_to_become_a_data_set(tmp_path, given):
    text_data().to_parquet(path := tmp_path / "train.parquet")
    told(
        "not-a-data-set", tmp_path, given(path), match=r"\.load_dataset\('parquet', data_files=.*train\.parquet'\)\['train'"
    )
    data = datasets.load_dataset("parquet", data_files=str(path))["train"]
    named = dict(evaluated={"one": given(path)}, collator=pad)
    told("not-a-data-set", tmp_path, data, evaluated=given(path), collator=pad, match="eval_dataset must")
    told("not-a-data-set", tmp_path, data, match=r"eval_dataset\['one'\] must", **named)
    told("not-a-data-set", tmp_path, "me/data", match=r"\.load_dataset\('me/data'\)\['train'")
    assert trains(made(tmp_path, data, evaluated=data.select([]), collator=pad))


def test_several_data_sets_are_told_how_to_be_given(tmp_path):
    first, second = text_data(), text_data(seed=1)
    told("not-a-data-set", tmp_path, [first, second], match=r"datasets\.concatenate_datasets\(train_dataset\)", collator=pad)
    assert trains(made(tmp_path / "1", datasets.concatenate_datasets([first, second]), collator=pad))
    rows = [Rows(first), Rows(second)]
    told("not-a-data-set", tmp_path, rows, match=r"torch\.utils\.data\.ConcatDataset\(train_dataset\)", collator=pad)
    assert trains(made(tmp_path / "2", ConcatDataset(rows), collator=pad))
    options = dict(collator=pad, eval_strategy="epoch")
    third = text_data(8, seed=2)
    told("not-a-data-set", tmp_path, first, evaluated=[second, third], match="'first': set1", **options)
    trainer = made(tmp_path / "3", first, evaluated={"first": second, "second": third}, **options)
    assert trains(trainer)
    assert "eval_second_loss" in trainer.evaluate()
    trainer = made(tmp_path / "4", first, **options)
    trainer.eval_dataset = [second, third]
    assert refusal_unspent(trainer, "not-a-data-set")


def test_an_empty_data_set_to_evaluate_is_told_before_anything_is_spent(tmp_path):
    none, some = text_data().select([]), text_data(8, seed=1)
    evaluates, one_of_two = dict(eval_strategy="epoch", rehearse=False), {"a": some, "b": none}
    told("no-examples", tmp_path, text_data(), evaluated=none, collator=pad, match="^eval_dataset is empty", **evaluates)
    told(
        "no-examples",
        tmp_path,
        text_data(),
        evaluated=[],
        collator=pad,
        match="^eval_dataset is",
        compute_metrics=lambda _: {},
    )
    match = r"^eval_dataset\['b'\] is empty"
    told("no-examples", tmp_path, text_data(), evaluated=one_of_two, collator=pad, match=match, **evaluates)
    assert trains(made(tmp_path / "1", text_data(), evaluated={"a": some}, collator=pad, **evaluates))
    assert trains(made(tmp_path / "2", text_data(), evaluated=none, collator=pad))  # nothing is evaluated


def test_an_input_of_another_name_is_told_to_be_renamed(tmp_path):
    data = text_data().rename_column("input_ids", "inputs")
    match = r"Transformers removes \(inputs\), .*\.rename_column\(NAME, 'input_ids'\)"
    told("no-inputs", tmp_path, data, processing_class=TOKENIZER, match=match)
    assert trains(made(tmp_path, data.rename_column("inputs", "input_ids"), processing_class=TOKENIZER))


def test_rows_in_their_order_alone_are_told_how_to_become_a_table(tmp_path):
    class InOrder(IterableDataset):
        def __len__(self):
            return 24

        def __iter__(self):
            return iter(text_data())

    told("streamed-data", tmp_path, InOrder(), match=r"datasets\.Dataset\.from_list\(list\(", collator=pad)
    assert trains(made(tmp_path / "fixed", Dataset.from_list(list(InOrder())), collator=pad))


@pytest.mark.parametrize("rows", [np.ones((24, 5), int), TensorDataset(torch.ones(24, 5))])
def test_rows_without_names_are_told_how_to_get_some(tmp_path, rows):
    told("not-a-mapping", tmp_path, rows, match=r"datasets\.Dataset\.from_dict\(\{'pixel_values': images,")
    table = Dataset.from_dict({"input_ids": [[index] * 3 for index in range(24)], "labels": [0, 1] * 12})
    assert trains(made(tmp_path, table))


def test_rows_of_unequal_lengths_are_told_how_to_be_padded_and_not_how_long_they_are(tmp_path):
    lengths = {len(row["input_ids"]) for row in text_data()}
    of_tokens = text_data().map(lambda row: {"labels": [1] * len(row["input_ids"])})
    tagger = hf.BertForTokenClassification(tiny_bert().config)
    for options in (
        dict(data=text_data()),
        dict(data=text_data().with_format("torch"), collator=default_collate),
        dict(data=of_tokens, model=tagger, processing_class=TOKENIZER),
        dict(data=text_data().map(lambda row: {"labels": [[1], [1, 0]]}), collator=default_collate),
    ):
        error = told("not-padded", tmp_path, **options)
        assert error.__suppress_context__ or error.__context__ is None
        assert not {int(number) for number in re.findall(r"\d+", str(error))} & lengths
    assert trains(made(tmp_path / "1", text_data(), processing_class=TOKENIZER))
    assert trains(made(tmp_path / "2", text_data(), collator=hf.DataCollatorWithPadding(TOKENIZER)))
    assert trains(made(tmp_path / "3", of_tokens, model=tagger, collator=hf.DataCollatorForTokenClassification(TOKENIZER)))


def sized(number, *, seed=0):
    return [int(each) for each in np.random.default_rng(seed).integers(3, 9, size=number)]


def choices(*, right=1, are_alike=False):
    """Rows of two texts, which are of one length in a row or not."""
    ids = [[[5] * size, [6] * (size if are_alike else size + 1)] for size in sized(24)]
    return Dataset.from_dict({"input_ids": ids, "labels": [right] * 24})


def targets():
    """Texts with labels of other lengths."""
    pairs = zip(sized(24), sized(24, seed=1), strict=True)
    return Dataset.from_list([{"input_ids": [5] * first, "labels": [6] * second} for first, second in pairs])


def t5():
    sizes = dict(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))


def gpt2():
    sizes = dict(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


@pytest.mark.parametrize("are_alike", [True, False])
@pytest.mark.parametrize("processor", [None, TOKENIZER])
def test_choices_of_unequal_lengths_are_told_their_collator(tmp_path, are_alike, processor):
    model, data = hf.BertForMultipleChoice(tiny_bert().config), choices(are_alike=are_alike)
    told("not-padded", tmp_path, data, model=model, processing_class=processor, match=r"DataCollatorForMultipleChoice\(tok")
    assert trains(made(tmp_path, data, model=model, collator=hf.DataCollatorForMultipleChoice(TOKENIZER)))


@pytest.mark.parametrize("processor", [None, TOKENIZER])
def test_labels_of_unequal_lengths_are_told_their_collator(tmp_path, processor):
    model = t5()
    match = r"DataCollatorForSeq2Seq\(tokenizer, model=model\) .*DataCollatorForTokenClassification"
    told("not-padded", tmp_path, targets(), model=model, processing_class=processor, match=match)
    assert trains(made(tmp_path, targets(), model=model, collator=hf.DataCollatorForSeq2Seq(TOKENIZER, model=model)))
    several = text_data().map(lambda row: {"labels": [float(row["labels"]), 1.0]})  # two classes for each text
    error = told("not-padded", tmp_path, several, model=tiny_bert(problem_type="multi_label_classification"))
    assert "DataCollatorWithPadding" in str(error)


def test_a_second_text_of_unequal_lengths_is_told_the_collator_that_pads_it(tmp_path):
    """Neither a tokenizer nor the collator that uses it pads columns of other names."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(50, 4), nn.Linear(8, 2)

        def forward(self, input_ids_a, attention_mask_a, input_ids_b, attention_mask_b, labels=None):
            found = [
                (self.table(ids) * mask[..., None]).sum(dim=1)
                for ids, mask in ((input_ids_a, attention_mask_a), (input_ids_b, attention_mask_b))
            ]
            return {"logits": self.head(torch.cat(found, dim=1))}

    class OfPairs(DopplerTrainer):
        def compute_per_sample_loss(self, model, inputs):
            labels = inputs.pop("labels")
            return F.cross_entropy(model(**inputs)["logits"], labels, reduction="none")

    def rows_of(*ends):
        one, other = text_data(), text_data(seed=1)
        kept = {"labels": one["labels"]} | {f"{name}{ends[0]}": one[name] for name in ("input_ids", "attention_mask")}
        return Dataset.from_dict(kept | {f"{name}{ends[1]}": other[name] for name in ("input_ids", "attention_mask")})

    options = dict(model=Pairs(), cls=OfPairs, processing_class=TOKENIZER)
    padding = hf.DataCollatorWithPadding(TOKENIZER)
    match = "columns 'input_ids_a', 'attention_mask_a', 'input_ids_b', 'attention_mask_b'.*own-loss.*#rows-with-two-texts"
    for collator in (default_collate, padding):
        told("not-padded", tmp_path, rows_of("_a", "_b"), match=match, collator=collator, **options)
    match = "pad the columns 'input_ids_b', 'attention_mask_b'"
    plain = options | dict(remove_unused_columns=False)
    told("not-padded", tmp_path, rows_of("", "_b"), match=match, collator=padding, **plain)
    guide = (Path(__file__).parents[2] / "docs/guides/own-loss.md").read_text()
    snippet = re.search(r"### Rows with two texts\n.*?```python\n(.*?)```", guide, re.DOTALL)[1]
    exec(snippet, names := {"tokenizer": TOKENIZER})
    assert trains(made(tmp_path / "1", rows_of("_a", "_b"), collator=names["pad_both"], **options))


def test_the_label_of_a_choice_is_told_to_be_its_number(tmp_path):
    options = dict(model=hf.BertForMultipleChoice(tiny_bert().config), collator=hf.DataCollatorForMultipleChoice(TOKENIZER))
    for data in (choices(right=2), choices(right=2).with_transform(lambda rows: rows), [*choices(right=2)]):
        error = told("values-out-of-range", tmp_path, data, match="from 0 to 1, .*the number of the right choice", **options)
        assert "num_labels" not in str(error)
    assert trains(made(tmp_path, choices(right=1), **options))
    with refused("label-without-class", match="the number of the right choice"):
        inputs = options["collator"]([*choices(right=2)][:2])
        made(tmp_path, choices(), **options).compute_per_sample_loss(options["model"], dict(inputs))


# --- losses ---------------------------------------------------------------------------------------------------------------


class FromLabels(nn.Module):
    """A model whose forward cannot do without labels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class OfTransformers(hf.BertForSequenceClassification):
    def forward(self, input_ids, attention_mask, labels=None):
        outputs = super().forward(input_ids, attention_mask)
        return {"loss": F.cross_entropy(outputs.logits, labels), "logits": outputs.logits}


class Told(DopplerTrainer):
    """As the message says."""

    def compute_per_sample_loss(self, model, inputs):
        return F.cross_entropy(model(**inputs)["logits"], inputs["labels"], reduction="none")


@pytest.mark.parametrize(
    ("model", "code"),
    [(FromLabels(), "not-of-transformers"), (OfTransformers(tiny_bert().config), "forward-without-labels")],
    ids=lambda each: type(each).__name__,
)
def test_a_model_that_computes_its_loss_from_labels_is_told_what_to_override(tmp_path, model, code):
    rows = Dataset.from_list([{"x": [float(index)] * 4, "labels": index % 2} for index in range(24)])
    data, collator = (rows, hf.default_data_collator) if isinstance(model, FromLabels) else (text_data(), pad)
    options = dict(model=model, collator=collator)
    told(code, tmp_path, data, match=r"F\.cross_entropy\(model\(\*\*inputs\)\['logits'\]", **options)
    assert trains(made(tmp_path, data, cls=Told, **options))


MASKING = hf.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0, "[MASK]": 1}, "[PAD]")), pad_token="[PAD]", mask_token="[MASK]"
)
# A model → what the message names, and the rows and the collator that it asks for.
WITH_LABELS = {
    "causal": (
        gpt2, r"DataCollatorForLanguageModeling\(tokenizer, mlm=False\)", None,
        hf.DataCollatorForLanguageModeling(TOKENIZER, mlm=False),
    ),
    "some tokens": (
        gpt2, r"DataCollatorForSeq2Seq\(tokenizer\)", lambda row: row["input_ids"],
        hf.DataCollatorForSeq2Seq(TOKENIZER),
    ),
    "masked": (
        lambda: hf.BertForMaskedLM(tiny_bert().config), r"DataCollatorForLanguageModeling\(tokenizer, mlm=True\)", None,
        hf.DataCollatorForLanguageModeling(MASKING, mlm=True),
    ),
    "seq2seq": (
        t5, r"text_target=target\)\['input_ids'\].*DataCollatorForSeq2Seq\(tokenizer, model=model\)",
        lambda row: row["input_ids"][:2], hf.DataCollatorForSeq2Seq(TOKENIZER),
    ),
    "token classes": (
        lambda: hf.BertForTokenClassification(tiny_bert().config), r"DataCollatorForTokenClassification\(tokenizer\)",
        lambda row: [1] * len(row["input_ids"]), hf.DataCollatorForTokenClassification(TOKENIZER),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WITH_LABELS)
def test_rows_without_labels_are_told_what_makes_those_of_the_model(tmp_path, kind):
    build, match, label, collator = WITH_LABELS[kind]
    data = text_data().remove_columns("labels")
    told("no-labels", tmp_path, data, model=build(), processing_class=TOKENIZER, match=match)
    labelled = data if label is None else data.map(lambda row: {"labels": label(row)})
    assert trains(made(tmp_path, labelled, model=build(), collator=collator))


@pytest.mark.parametrize("given", [[], ["labels"], ["end_positions"]])
def test_a_model_of_answers_is_told_the_names_of_its_positions(tmp_path, given):
    model, data = hf.BertForQuestionAnswering(tiny_bert().config), text_data().remove_columns("labels")
    lacking = data.map(lambda row: dict.fromkeys(given, 1))
    options = dict(model=model, collator=hf.DataCollatorWithPadding(TOKENIZER), remove_unused_columns="labels" not in given)
    match = "no `start_positions` and `end_positions`.*encoding.char_to_token"
    told("no-labels", tmp_path, lacking, match=match, **options)
    answers = data.map(lambda row: {"start_positions": 1, "end_positions": 2})
    assert trains(made(tmp_path, answers, **options))


def images(**columns):
    return Dataset.from_dict({"pixel_values": torch.randn(24, 3, 8, 8).tolist(), **columns})


def test_a_contrastive_model_is_told_to_train_a_classifier(tmp_path):
    text = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    config = hf.CLIPConfig(
        text_config=text | dict(max_position_embeddings=8, eos_token_id=49, bos_token_id=48), vision_config=IMAGE,
        projection_dim=8,
    )  # fmt: skip
    model = hf.CLIPModel(config)
    pairs = images(input_ids=[[48, 3, index, 49] for index in range(24)])
    for given in (pairs, pairs.add_column("return_loss", [True] * 24)):
        told("loss-of-the-batch", tmp_path, given, match="CLIPModel.* CLIPForImageClassification", model=model)
    model.save_pretrained(tmp_path / "clip")
    classifier = hf.CLIPForImageClassification.from_pretrained(tmp_path / "clip", num_labels=2)
    classifier.vision_model.post_layernorm.requires_grad_(False)  # which its classes do not use
    assert trains(made(tmp_path, images(labels=[0, 1] * 12), model=classifier))


def test_each_contrastive_model_is_told_the_classifier_of_its_family(tmp_path):
    text = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    model = hf.SiglipModel(hf.SiglipConfig(text_config=text | dict(max_position_embeddings=4), vision_config=IMAGE))
    pairs = images(input_ids=[[48, 3, index, 49] for index in range(24)])
    told("loss-of-the-batch", tmp_path, pairs, match=" SiglipForImageClassification", model=model)
    model.save_pretrained(tmp_path / "siglip")
    classifier = hf.SiglipForImageClassification.from_pretrained(tmp_path / "siglip", num_labels=2)
    labelled = images(labels=[0, 1] * 12)
    told("unreached-parameters", tmp_path, labelled, match=r"vision_model\.head", model=classifier)
    classifier.vision_model.head.requires_grad_(False)
    assert trains(made(tmp_path, labelled, model=classifier))


SPEECH = dict(conv_dim=[8], conv_kernel=[4], conv_stride=[2], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
              feat_extract_norm="layer", layerdrop=0.0, mask_time_prob=0.0)  # fmt: skip
DECODERS = {
    "trocr": lambda **sizes: hf.TrOCRConfig(
        d_model=8, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8, decoder_layerdrop=0.0, **sizes
    ),
    "gpt2": lambda **sizes: hf.GPT2Config(n_embd=8, n_layer=1, n_head=2, **sizes),
    "bert": lambda **sizes: tiny_bert(**sizes, hidden_size=8, intermediate_size=8).config,
}


@pytest.mark.parametrize(("decoder", "of_images"), combined(DECODERS, [True, False], strength=1))
def test_two_models_of_which_one_writes_what_the_other_sees_or_hears_train(tmp_path, decoder, of_images):
    """As TrOCR and Donut: decoder ids are made from the labels, as the model does."""
    kinds = (hf.VisionEncoderDecoderModel, hf.VisionEncoderDecoderConfig, hf.ViTConfig(**IMAGE))
    if not of_images:
        sizes = {name: size for name, size in IMAGE.items() if "size" in name and name not in ("image_size", "patch_size")}
        encoder = hf.Wav2Vec2Config(**sizes, num_hidden_layers=1, num_attention_heads=2, **SPEECH)
        kinds = (hf.SpeechEncoderDecoderModel, hf.SpeechEncoderDecoderConfig, encoder)
    model, config, encoder = kinds
    writes = DECODERS[decoder](vocab_size=50, is_decoder=True, add_cross_attention=True)
    config = config.from_encoder_decoder_configs(encoder, writes, pad_token_id=0, decoder_start_token_id=1)
    torch.manual_seed(0)
    model = model(config)
    if of_images:
        model.encoder.pooler.requires_grad_(False)  # as its refusal has it
    else:
        model.encoder.requires_grad_(False)
    texts = [[3 + row, 4, 5, 2] for row in range(24)]
    heard = Dataset.from_dict({"input_values": torch.randn(24, 40).tolist(), "labels": texts})
    assert trains(made(tmp_path, images(labels=texts) if of_images else heard, model=model))


class OfSeries(DopplerTrainer):
    def compute_per_sample_loss(self, model, inputs):
        found = model(past_values=inputs["past_values"]).prediction_outputs
        return (found - inputs["future_values"]).square().mean(dim=(1, 2))


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_of_series_that_makes_rows_of_channels_is_told_what_trains(tmp_path, adapted):
    def forecast(channels):
        sizes = dict(context_length=8, patch_length=4, patch_stride=4, d_model=8, ffn_dim=8, prediction_length=2)
        layers = dict(num_attention_heads=2, num_hidden_layers=1, norm_type="layernorm", loss="mse")
        return hf.PatchTSTForPrediction(hf.PatchTSTConfig(**sizes, **layers, num_input_channels=channels))

    def series(channels):
        past, future = (torch.randn(24, length, channels).tolist() for length in (8, 2))
        return Dataset.from_dict({"past_values": past, "future_values": future})

    def on(*targets):
        return get_peft_model(forecast(2), LoraConfig(r=2, target_modules=[*targets]))

    model = on("q_proj", "v_proj") if adapted else forecast(2)
    told("no-per-sample-gradient", tmp_path, series(2), model=model, cls=OfSeries)
    if not adapted:
        model.model.encoder.layers.requires_grad_(False)
    assert trains(made(tmp_path, series(2), model=on("projection") if adapted else model, cls=OfSeries))
    assert trains(made(tmp_path, series(1), model=forecast(1), cls=OfSeries))  # a record of each channel


class OfBoxes(DopplerTrainer):
    """Boxes and their classes, of each image some, as detection has them; a loss of the user's own."""

    def compute_per_sample_loss(self, model, inputs):
        found = model(inputs["pixel_values"]).logits
        return torch.stack(
            [(row - boxes["boxes"].mean(dim=0)).square().mean() for row, boxes in zip(found, inputs["labels"])]
        )


def test_labels_that_are_dictionaries_train_with_a_loss_of_ones_own(tmp_path):
    boxes = [{"boxes": torch.rand(1 + row % 3, 4), "class_labels": torch.arange(1 + row % 3)} for row in range(24)]
    rows = Rows([{"pixel_values": torch.randn(3, 8, 8), "labels": each} for each in boxes])
    model = hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, num_labels=4))

    def collator(rows):
        pixels, labels = ([row[name] for row in rows] for name in ("pixel_values", "labels"))
        return {"pixel_values": torch.stack(pixels), "labels": labels}

    assert trains(made(tmp_path, rows, model=model, cls=OfBoxes, remove_unused_columns=False, collator=collator))


def test_weights_in_channels_last_train_as_in_any_order(tmp_path):
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = hf.ViTForImageClassification(hf.ViTConfig(**IMAGE)).to(memory_format=order)
        data = images(labels=[0, 1] * 12) if not found else data
        trainer = made(tmp_path / str(order), data, model=model, noise_seed=1)
        assert trains(trainer)
        found.append(weights(trainer))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_model_that_is_split_over_gpus_in_one_process_is_told_to_be_launched(tmp_path, monkeypatch):
    wrapped = nn.DataParallel(tiny_bert())
    told("wrapped-model", tmp_path, text_data(), match=r"model\.module\b.* `accelerate launch`", model=wrapped)
    assert trains(made(tmp_path, text_data(), model=wrapped.module, collator=pad))
    args = arguments(tmp_path)
    args._n_gpu = 2
    with refused("several-gpus"):
        DopplerTrainer(tiny_bert(), args, pad, text_data())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # as of two that are visible
    told("several-gpus", tmp_path, text_data(), match="CUDA_VISIBLE_DEVICES=0", use_cpu=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert arguments(tmp_path, use_cpu=False).n_gpu == 1


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        *thorough((["bert"], [], r"\[1, 1\].*\[11, 14\]")),
        (["classifier"], ["bert.pooler"], r"\[16, 16\].*\[2, 16\]"),
    ],
)
def test_a_checkpoint_of_other_parameters_is_told_what_differs(tmp_path, then, now, words):
    def trainer(frozen, *, source=None, folder="out", steps=4):
        model = tiny_bert() if source is None else hf.AutoModelForSequenceClassification.from_pretrained(source)
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        return trainer_of(
            tmp_path / folder, model=model, save_strategy="steps", save_steps=2, max_steps=steps, base_optimizer="adam"
        )

    trainer(then, steps=2).train()
    checkpoint = str(tmp_path / "out" / "out" / "checkpoint-2")
    with refused("other-parameters-trained", match=words):
        trainer(now).train(resume_from_checkpoint=checkpoint)
    resumed = trainer(then)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == 4
    anew = trainer(now, source=checkpoint, folder="anew", steps=2)
    anew.train()
    assert anew.state.global_step == 2
