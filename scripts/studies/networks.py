"""The networks of the tasks: classifiers that return logits, to which `StudyTrainer` gives a loss per example."""

import itertools
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BitConfig,
    BitForImageClassification,
    EfficientNetConfig,
    EfficientNetForImageClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from doppler_hf.mean_pooling import masked_mean
from scripts.studies.scattering import PATHS, STRIDE

HASHED_WORDS: Final = 4096
Trained = Literal["all", "lora", "bitfit", "head"]


class Classifier(nn.Module):
    """A network of `inputs` alone, which returns logits, shape (batch, classes)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Return logits, and the mean loss if there are labels."""
        return _output(self.network(inputs), labels)


class TopLayers(nn.Module):
    """The last layers of a BERT-like encoder, with a linear classifier on the mean of the token vectors."""

    def __init__(self, layers: nn.ModuleList, *, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.layers = layers
        self.classifier = nn.Linear(hidden_size, num_labels)

    def forward(self, hidden: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Return logits for hidden (batch, length, hidden_size), and the mean loss if there are labels."""
        blocked = (attention_mask == 0)[:, None, None, :] * torch.finfo(hidden.dtype).min
        for layer in self.layers:
            hidden = layer(hidden, blocked)
        pooled = F.layer_norm(masked_mean(hidden, attention_mask), (hidden.shape[-1],))
        return _output(self.classifier(pooled), labels)


def _output(logits: Tensor, labels: Tensor | None) -> SequenceClassifierOutput:
    return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


def perceptron() -> nn.Module:
    """Return a tanh perceptron of 269,322 parameters for 28 x 28 pixels: for its accuracy it has many noisy coordinates."""
    hidden = (nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10))


def mnist_cnn() -> nn.Module:
    """Return the CNN for MNIST of Papernot et al. (*Tempered Sigmoid Activations*, AAAI 2021, Table 1), 26,010 weights."""
    first = (nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1))
    second = (nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))


def linear_on_scattering(side: int, channels: int) -> nn.Module:
    """Return a linear classifier of scattering coefficients, for images of a number of pixels a side."""
    coefficients = PATHS * channels
    # Paths differ in size a hundredfold: every three of a channel are brought to one, by each example alone.
    norm = nn.GroupNorm(coefficients // 3, coefficients, affine=False)
    linear = nn.Linear(coefficients * (side // STRIDE) ** 2, 10)
    nn.init.normal_(linear.weight, std=0.02)  # as a head of Transformers, which the measured one was
    nn.init.zeros_(linear.bias)
    return nn.Sequential(norm, nn.Flatten(), linear)


def hashed_words() -> nn.Module:
    """Return an MLP for counts of hashed words: 131,170 parameters."""
    return nn.Sequential(nn.Linear(HASHED_WORDS, 32), nn.ReLU(), nn.Linear(32, 2))


class OfPixels(nn.Module):
    """An image classifier of transformers, as a network of pixels alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        return self.model(pixel_values=inputs).logits


def digits_vit() -> nn.Module:
    """Return a Vision Transformer of one layer for 8 x 8 pixels."""
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 64, "intermediate_size": 128}
    return OfPixels(ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, num_labels=10)))


def cifar_cnn(num_labels: int, *, width: int = 64, side: int = 32) -> nn.Module:
    """Return a CNN of five layers: four convolutions, each with GroupNorm, a pool and twice the channels, and a head."""
    widths = (3, width, 2 * width, 4 * width, 8 * width)
    blocks = (
        (nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(16, width), nn.ReLU(), nn.AvgPool2d(2))
        for before, width in itertools.pairwise(widths)
    )
    return nn.Sequential(
        *(layer for block in blocks for layer in block), nn.Flatten(), nn.Linear((side // 16) ** 2 * widths[-1], num_labels)
    )


def resnet50() -> nn.Module:
    """Return the ResNet-50 of Kolesnikov et al. (*Big Transfer*, ECCV 2020), with GroupNorm, for ten classes."""
    return OfPixels(BitForImageClassification(BitConfig(num_labels=10)))


def efficientnet() -> nn.Module:
    """Return EfficientNet-B0 for ten classes, with GroupNorm in the place of BatchNorm, which mixes examples."""
    from opacus.validators import ModuleValidator

    b0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "image_size": 32}
    return OfPixels(ModuleValidator.fix(EfficientNetForImageClassification(EfficientNetConfig(num_labels=10, **b0))))


def vit_small() -> nn.Module:
    """Return ViT-small for 32 x 32 pixels in patches of four, and ten classes."""
    sizes = {"image_size": 32, "patch_size": 4, "hidden_size": 384, "intermediate_size": 1536}
    return OfPixels(ViTForImageClassification(ViTConfig(**sizes, num_attention_heads=6, num_labels=10)))


def with_trained(network: nn.Module, trained: Trained) -> Any:
    """Freeze what is not trained, and add adapters if those are.

    Args:
        network: A network, whose head is `classifier` if not all of it is trained.
        trained: all; lora, adapters of rank 8 on all linear layers, and the head; bitfit, biases and the head; or head.
    """
    if trained == "all":
        return network
    if trained == "lora":
        from peft import LoraConfig, get_peft_model

        names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear) and name != "classifier"]
        return get_peft_model(network, LoraConfig(r=8, lora_alpha=16, target_modules=names, modules_to_save=["classifier"]))
    for name, parameter in network.named_parameters():
        parameter.requires_grad = name.startswith("classifier.") or (trained == "bitfit" and name.endswith(".bias"))
    return network
