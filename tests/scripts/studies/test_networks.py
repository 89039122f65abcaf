"""Networks have the sizes that they say, and train what they say."""

import pytest
import torch
from torch.nn import functional as F

from scripts.studies.networks import Classifier, TopLayers, mnist_cnn, perceptron, with_trained


def test_networks_have_the_sizes_that_they_say():
    assert sum(p.numel() for p in perceptron().parameters()) == 269_322
    assert sum(p.numel() for p in mnist_cnn().parameters()) == 26_010


@pytest.mark.parametrize(
    ("trained", "kinds"),
    [
        ("all", {"weight", "bias"}),
        ("head", {"classifier.weight", "classifier.bias"}),
        ("bitfit", {"bias", "classifier.weight"}),
        ("lora", {"lora_A.default.weight", "lora_B.default.weight", "classifier.modules_to_save.default"}),
    ],
)
def test_what_is_trained(bert, trained, kinds):
    network = with_trained(TopLayers(bert.bert.encoder.layer, hidden_size=bert.config.hidden_size, num_labels=2), trained)
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert names
    assert all(any(kind in name for kind in kinds) for name in names)
    assert all(any(kind in name for name in names) for kind in kinds)


def test_a_classifier_returns_what_the_trainer_evaluates():
    network = Classifier(perceptron())
    images, labels = torch.randn(4, 1, 28, 28), torch.tensor([1, 2, 3, 4])
    output = network(images, labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
    assert network(images).loss is None
