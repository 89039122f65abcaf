"""Fine-tune a causal language model on texts, with differential privacy unless `disable_dp: true`.

    accelerate launch scripts/causal_lm.py recipes/causal_lm/yelp-gpt2-lora-eps8.yaml [--any_field value]

One row of the data is one example, and so the unit of privacy. Every field of `CausalLMArguments`, `LoraArguments` and
`DopplerTrainingArguments` may stand in the recipe or follow it as a flag; the flag wins. The data comes from the hub, or
from a folder of parquet files with `--dataset_dir`.
"""

import math
from collections.abc import Sequence

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from doppler_hf.workloads.causal_lm import CausalLMArguments, build
from doppler_hf.workloads.lora import LoraArguments


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, load, train, evaluate, save."""
    with one_line_errors():
        args, lora_args, training_args = parse_args(CausalLMArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        workload = build(args, lora_args, training_args)

    trainer = DopplerTrainer(
        model=workload.model,
        args=training_args,
        train_dataset=workload.train_dataset,
        eval_dataset=workload.eval_dataset,
        data_collator=workload.data_collator,
        processing_class=workload.processing_class,
    )

    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)

    metrics = trainer.evaluate()
    # The model's own loss: the mean over the tokens of a batch, then over the batches, weighted by their rows.
    metrics["eval_perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
