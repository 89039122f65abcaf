"""Train a Vision Transformer on labelled images, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/image_classification.py recipes/image/digits-eps8.yaml [--any_field value]

With `--model_name_or_path` a pretrained model is fine-tuned; without it a small ViT of the given sizes is trained from
scratch. The data comes from the hub (`cifar10`, `mnist`), from scikit-learn (`digits`), or from a folder of parquet files
with `--dataset_dir`. Every field of `ImageArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in the
recipe or follow it as a flag; the flag wins.
"""

from collections.abc import Sequence

from doppler_hf import DopplerTrainer
from doppler_hf.workloads.launch import launch
from doppler_hf.workloads.recipe import KINDS


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    launch(DopplerTrainer, KINDS["images"], argv=argv)


if __name__ == "__main__":
    main()
