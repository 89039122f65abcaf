"""Fine-tune a causal language model on texts, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/causal_lm.py recipes/causal_lm/yelp-gpt2-lora-eps8.yaml [--any_field value]

One row of the data is one example, and so the unit of privacy. Every field of `CausalLMArguments`, `LoraArguments` and
`DopplerTrainingArguments` may stand in the recipe or follow it as a flag; the flag wins. The data comes from the hub, or
from a folder of parquet files with `--dataset_dir`.
"""

import math
from collections.abc import Sequence

from doppler_hf import DopplerTrainer
from doppler_hf.workloads.launch import launch
from doppler_hf.workloads.recipe import KINDS


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    launch(DopplerTrainer, KINDS["causal_lm"], argv=argv, complete=add_perplexity)


def add_perplexity(metrics: dict[str, float]) -> None:
    """Add the perplexity (modified in place)."""
    # The model's own loss: the mean over the tokens of a batch, then over the batches, weighted by their rows.
    try:
        metrics["eval_perplexity"] = math.exp(metrics["eval_loss"])
    except OverflowError:  # of a training that diverged
        metrics["eval_perplexity"] = math.inf


if __name__ == "__main__":
    main()
