"""Train a small network on wavelet scattering coefficients of images, with differential privacy unless `disable_dp: true`.

    accelerate launch -m scripts.scattering.train recipes/scattering/mnist-scattering-eps3.yaml [--any_field value]

Every field of `ScatteringArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in the recipe or follow it as
a flag; the flag wins. The data comes from where `scripts/image_classification.py` has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import set_seed
from transformers.hf_argparser import HfArg

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.workloads.arguments import refuse_without_effect
from doppler_hf.workloads.data_sources import load_images
from doppler_hf.workloads.images import model_inputs, processor_without_statistics
from doppler_hf.workloads.launch import launch
from doppler_hf.workloads.lora import LoraArguments, add_lora
from doppler_hf.workloads.metrics import accuracy_from_logits
from doppler_hf.workloads.workload import Workload, name_classes
from scripts.scattering.networks import PATHS, STRIDE, Scattering, ScatteringConfig, ScatteringForImageClassification

if TYPE_CHECKING:
    from datasets import DatasetDict


@dataclass
class ScatteringArguments:
    """The network and the images to train it on."""

    dataset_name: str = HfArg(default="cifar10", help="One of cifar10, cifar100, mnist, digits.")
    dataset_dir: str | None = HfArg(
        default=None, help="Local folder with train.parquet and test.parquet; by default the hub."
    )
    image_size: int = HfArg(default=32, help="Side of the images in pixels.")
    num_filters: int = HfArg(default=48, help="Filters of each convolution; 0 for a linear classifier.")
    flip_invariant: bool = HfArg(
        default=False, help="Classify images and their flips from left to right alike. Not for digits."
    )

    def __post_init__(self) -> None:
        """Refuse what a local folder overrules."""
        if self.dataset_dir is not None:
            refuse_without_effect(self, "dataset_name", beside="dataset_dir")


def build(args: ScatteringArguments, lora_args: LoraArguments, training_args: DopplerTrainingArguments) -> Workload:
    """Load the images, compute their coefficients, and build the network."""
    set_seed(training_args.seed)  # for new weights; noise and draws do not follow it
    unit_column = training_args.privacy_unit_column
    splits = load_images(args.dataset_name, args.dataset_dir, unit_column=unit_column)
    label_names = splits["train"].features["label"].names
    config = ScatteringConfig(
        image_size=args.image_size,
        num_channels=len(splits["test"][0]["image"].getbands()),
        num_filters=args.num_filters,
        flip_invariant=args.flip_invariant,
        num_labels=len(label_names),
    )
    model = ScatteringForImageClassification(config)
    name_classes(model, label_names)
    processor = processor_without_statistics(config.image_size, config.num_channels)
    with training_args.main_process_first(desc="scatter"):
        splits = scattered(splits, model_inputs(processor, config.num_channels), config, kept=unit_column)
    return Workload(
        model=add_lora(model, lora_args, task_type=None),
        train_dataset=splits["train"],
        eval_datasets={"eval": splits["test"]},
        processing_class=processor,
        compute_metrics=accuracy_from_logits,
    )


def scattered(
    splits: "DatasetDict", to_pixel_values: Callable[..., dict[str, Any]], config: ScatteringConfig, *, kept: str | None
) -> "DatasetDict":
    """Return the splits as scattering coefficients in half precision, cached by `datasets`, with labels and `kept`."""
    from datasets import Array3D, DatasetDict, Features, Value

    # Not the model's, by whose weights the cache would take each seed for another computation.
    scattering = Scattering(config.image_size)
    side = config.image_size // STRIDE
    features = {"coefficients": Array3D((PATHS * config.num_channels, side, side), "float16"), "labels": Value("int64")}

    def to_coefficients(rows: dict[str, list[Any]]) -> dict[str, Any]:
        inputs = to_pixel_values(rows)
        with torch.no_grad():
            return {"coefficients": scattering(inputs["pixel_values"]).half().numpy(), "labels": inputs["labels"]}

    coefficients = {}
    for name, split in splits.items():
        others = {column: kind for column, kind in split.features.items() if column == kept}
        options = {"batched": True, "batch_size": 64, "features": Features({**features, **others})}
        unused = [column for column in split.column_names if column not in others]
        coefficients[name] = split.map(to_coefficients, remove_columns=unused, desc="Scattering images", **options)
    return DatasetDict(coefficients).with_format("torch")


SCATTERING: Final = (ScatteringArguments, build)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    launch(DopplerTrainer, SCATTERING, argv=argv)


if __name__ == "__main__":
    main()
