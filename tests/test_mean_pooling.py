"""The mean head loads any encoder, sees no padding, and saves and loads like every model."""

import pytest
import torch
from transformers import BertForMaskedLM, BertModel

from doppler_hf.mean_pooling import MeanPoolingForSequenceClassification, refuse_new_layers
from tests.support.refusals import refused
from tests.support.tiny import pad, text_data, tiny_bert


@pytest.fixture
def folder(tmp_path):
    tiny_bert().bert.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def logits(model, examples):
    inputs = pad(examples)
    inputs.pop("labels")
    with torch.no_grad():
        return model(**inputs).logits


def test_encoder_is_loaded_and_the_head_reads_its_mean(folder):
    model = MeanPoolingForSequenceClassification.from_encoder(folder, num_labels=3).eval()
    encoder = BertModel.from_pretrained(folder).eval()
    (example,) = text_data(1)
    ids = torch.tensor([example["input_ids"]])
    with torch.no_grad():
        mean = encoder(ids).last_hidden_state.mean(dim=1)
        standardized = (mean - mean.mean()) / mean.var(correction=0).add(1e-5).sqrt()
        expected = model.classifier(standardized)
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert expected.shape == (1, 3)
    assert not any("pooler" in name for name, _ in model.named_parameters())


def test_a_checkpoint_with_another_head_gives_its_encoder(tmp_path):
    masked_lm = BertForMaskedLM(tiny_bert().config)
    masked_lm.save_pretrained(tmp_path)
    model = MeanPoolingForSequenceClassification.from_encoder(tmp_path, num_labels=2)
    found = model.encoder.state_dict()
    assert all(torch.equal(found[name], weights) for name, weights in masked_lm.bert.state_dict().items())


def test_padding_changes_nothing(folder):
    model = MeanPoolingForSequenceClassification.from_encoder(folder, num_labels=2).eval()
    examples = list(text_data(6))
    together = logits(model, examples)
    for row, example in zip(together, examples, strict=True):
        torch.testing.assert_close(row, logits(model, [example])[0], atol=1e-5, rtol=1e-5)


def test_saves_and_loads_itself_and_changes_its_head(folder, tmp_path):
    model = MeanPoolingForSequenceClassification.from_encoder(folder, num_labels=2)
    model.save_pretrained(tmp_path / "saved")
    loaded = MeanPoolingForSequenceClassification.from_encoder(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True))
    wider = MeanPoolingForSequenceClassification.from_encoder(tmp_path / "saved", num_labels=5, ignore_mismatched_sizes=True)
    assert wider.classifier.out_features == 5


def test_a_checkpoint_without_some_layers_is_refused_and_the_class_that_saved_it_loads_it(tmp_path):
    model = MeanPoolingForSequenceClassification(tiny_bert().config)
    model.save_pretrained(tmp_path)
    _, found = BertModel.from_pretrained(tmp_path, output_loading_info=True)
    with refused("checkpoint-without-weights", match=rf"{tmp_path}.* \d+ .*embeddings\."):
        refuse_new_layers(found["missing_keys"], str(tmp_path))
    again = MeanPoolingForSequenceClassification.from_encoder(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    refuse_new_layers(["pooler.dense.weight"], "a folder")  # which is part of the head
