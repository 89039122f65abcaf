"""Fine-tune a language model on conversations, prompts or texts with TRL, privately unless `disable_dp: true`.

    accelerate launch scripts/sft.py recipes/sft/capybara-qwen2.5-lora-eps8.yaml [--any_field value]

One row of the data is one example, and so the unit of privacy. Every field of `SFTArguments`, `LoraArguments` and
`DopplerSFTConfig` may stand in the recipe or follow it as a flag; the flag wins. The data comes from the hub, or from a
folder of parquet files with `--dataset_dir`, in one of TRL's formats: with the column `messages`, the columns `prompt` and
`completion`, or `text`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import set_seed
from transformers.hf_argparser import HfArg

# Python puts the folder of a script on the path, and not the one above it, in which the package and `scripts` are.
sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.training.arguments import one_line_errors, parse_args
from scripts.training.language_model import LanguageModelArguments, load_model, load_rows
from scripts.training.lora import LoraArguments, lora_config


@dataclass
class SFTArguments(LanguageModelArguments):
    """The language model and the rows to train it on."""

    dataset_name: str = HfArg(default="trl-lib/Capybara", help="Name of the data set on the hub.")


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save and evaluate."""
    with one_line_errors():
        # Arguments
        from doppler_hf import DopplerSFTConfig, DopplerSFTTrainer

        args, lora_args, training_args = parse_args(SFTArguments, LoraArguments, DopplerSFTConfig, argv=argv)
        set_seed(training_args.seed)  # for new weights; noise and draws do not follow it

        # Data and model
        rows = load_rows(args)
        model, tokenizer = load_model(args)

    # Trainer, which makes the adapters itself
    trainer = DopplerSFTTrainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        peft_config=lora_config(lora_args, task_type="CAUSAL_LM"),
    )

    # Training, and what it leaves in `output_dir`
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
