"""Write synthetic texts with labels: fine-tune a causal model privately on labelled texts, and sample from it.

    accelerate launch scripts/synthesize.py --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_dir reviews \
        --labels negative,positive --lora_r 8 --target_epsilon 8 --num_samples 5000 --output_dir out

The trained model is saved in `output_dir`, and the synthetic texts in `output_dir/synthetic`. The same command once more
continues what was interrupted: training from its latest checkpoint, and sampling after the texts that are already written.
Once the model is finished, it is not trained again, and further texts cost no further ε.

Every field of `SynthesisArguments`, `LoraArguments` and `DopplerTrainingArguments` may stand in a recipe or follow it as a
flag; the flag wins. One row of the data is one record, which ε covers, unless `privacy_unit_column` names users.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import DataCollatorForSeq2Seq, set_seed
from transformers.hf_argparser import HfArg
from transformers.trainer_utils import get_last_checkpoint

# Python puts the folder of a script on the path, and not the one above it, in which the package and `scripts` are.
sys.path.insert(0, str(Path(__file__).parents[1]))

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.errors import Refusal
from doppler_hf.run.processes.processes import on_process_0
from scripts.causal_lm import CausalLMArguments
from scripts.training.arguments import one_line_errors, parse_args, refuse_unused_fields
from scripts.training.data_sources import selected
from scripts.training.finished_model import finished_labels, noted_histogram, training_settings, write_record
from scripts.training.label_histogram import check_epsilon, noisy_histogram
from scripts.training.labelled_texts import (
    checked_text,
    label_names,
    label_reader,
    numbers_of_samples,
    parse_proportions,
    prompt_of,
)
from scripts.training.language_model import load_model, load_rows
from scripts.training.lora import LoraArguments, add_lora
from scripts.training.samples import Sampling, sample
from scripts.training.synthetic_card import write_dataset


@dataclass
class SynthesisArguments(CausalLMArguments):
    """The language model, the labelled texts to train it on, and the texts to sample from it."""

    label_column: str = HfArg(default="label", help="The column that holds the label.")
    labels: str | None = HfArg(
        default=None,
        help="All labels, comma separated. They become public. By default the class names of the label column.",
    )
    num_samples: int = HfArg(default=1000, help="How many synthetic texts to write.")
    proportions: str | None = HfArg(
        default=None,
        help="Parts of the labels, e.g. negative=1,positive=3; by default all labels get equally many texts. Do not take "
        "the proportions of the private data: ε does not cover them.",
    )
    histogram_epsilon: float | None = HfArg(
        default=None,
        help="Take the proportions of the private data, from counts with noise. This ε is added to that of training.",
    )
    temperature: float = HfArg(default=1.0, help="Temperature of sampling.")
    top_p: float = HfArg(default=1.0, help="Sample from the likeliest tokens that have this probability together.")
    sampling_batch_size: int = HfArg(default=64, help="How many texts to sample at once.")
    sampling_seed: int = HfArg(default=0, help="Seed of sampling. Another one gives other texts, in another synthetic_dir.")
    min_words: int = HfArg(default=3, help="Shorter synthetic texts are left out.")
    synthetic_dir: str | None = HfArg(
        default=None, help="Folder of the synthetic texts; by default the folder synthetic in output_dir."
    )

    def __post_init__(self) -> None:
        """Refuse a histogram without an ε, and proportions that it would overrule."""
        super().__post_init__()
        if self.histogram_epsilon is not None:
            check_epsilon(self.histogram_epsilon)
            refuse_unused_fields(self, "proportions", beside="histogram_epsilon")


# These arguments say what to sample, and may change once the model is finished.
OF_SAMPLING = {
    "histogram_epsilon", "min_words", "num_samples", "proportions", "sampling_batch_size", "sampling_seed", "synthetic_dir",
    "temperature", "top_p", "validation_split",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Train and save, unless that is done; then sample."""
    with one_line_errors():
        # Arguments
        args, lora_args, training_args = parse_args(SynthesisArguments, LoraArguments, DopplerTrainingArguments, argv=argv)
        set_seed(training_args.seed)  # for new weights; noise and draws do not follow it
        out = Path(training_args.output_dir)
        sampling = Sampling(
            temperature=args.temperature,
            top_p=args.top_p,
            batch_size=args.sampling_batch_size,
            min_words=args.min_words,
            max_length=args.max_seq_length,
            seed=args.sampling_seed,
        )

        # With other settings than those of the model in `out`, no ε is spent by mistake: the run is refused.
        of_data = {name: value for name, value in vars(args).items() if name not in OF_SAMPLING}
        settings = training_settings(training_args, **of_data, **vars(lora_args))
        # One process decides for all: another one might read the record before it is written.
        names = on_process_0(lambda: finished_labels(out, settings))

    if names is None:
        names = train(args, lora_args, training_args, settings)
    elif training_args.process_index == 0:
        print(f"The model in {out} is finished and is not trained again. To train another one, give another --output_dir.")

    # Sampling, on one process, from the saved model.
    # Privacy: nothing from here on reads the private data, so that it costs no further ε. The exception is the histogram of
    # labels, whose ε the card adds.
    if training_args.process_index == 0:
        with one_line_errors():
            parts: Mapping[str, float] = parse_proportions(names, args.proportions)
            if args.histogram_epsilon is not None:
                read = functools.partial(read_labels, args, names, training_args.privacy_unit_column)
                parts = noisy_histogram(out, names, epsilon=args.histogram_epsilon, read=read)
            numbers = numbers_of_samples(args.num_samples, parts)
            folder = out / "synthetic" if args.synthetic_dir is None else Path(args.synthetic_dir)
            samples = sample(out, folder, numbers, sampling, device=training_args.device, dtype=args.dtype)
            write_dataset(
                folder,
                samples,
                names,
                model=out,
                # A path on this computer is not for readers of the card.
                base=Path(args.model_name_or_path).name
                if Path(args.model_name_or_path).is_dir()
                else args.model_name_or_path,
                sampling=sampling,
                # Privacy: also without the flag, since --proportions may be numbers that somebody read in the histogram.
                histogram_epsilon=noted_histogram(out),
            )
        print(f"{len(samples.texts):,} synthetic texts are in {folder}. Its README.md says what ε covers.")


def read_labels(
    args: SynthesisArguments, names: Sequence[str], unit_column: str | None
) -> tuple[list[str], list[Any] | None]:
    """Return the labels of the private records, and the user of each, or None if ε covers records."""
    rows = selected(load_rows(args), (args.text_column, args.label_column), unit_column)["train"]
    name_of = label_reader(rows.features[args.label_column], names)
    return [name_of(label) for label in rows[args.label_column]], None if unit_column is None else [*rows[unit_column]]


def train(
    args: SynthesisArguments,
    lora_args: LoraArguments,
    training_args: DopplerTrainingArguments,
    settings: dict[str, Any],
) -> list[str]:
    """Train the model and save it in `output_dir`; return the names of the labels."""
    out = Path(str(training_args.output_dir))
    with one_line_errors():
        if not training_args.do_train:
            raise Refusal(
                "no-finished-model",
                f"do_train is off, and there is no finished model in {out}. Give the folder of one, or leave it on.",
            )
        # Data and model. All that a mistake in the arguments of sampling can break is checked before training.
        columns = (args.text_column, args.label_column)
        splits = selected(load_rows(args), columns, training_args.privacy_unit_column)
        feature = splits["train"].features[args.label_column]
        names = label_names(feature, args.labels)
        numbers_of_samples(args.num_samples, parse_proportions(names, args.proportions))
        name_of = label_reader(feature, names)
        model, tokenizer = load_model(args)
        model = add_lora(model, lora_args, task_type="CAUSAL_LM")
        max_length = min(args.max_seq_length, tokenizer.model_max_length)
        prompts = {name: prompt_of(name, tokenizer, shorter_than=max_length) for name in names}

        # The label is in the prompt, and the text is trained. Prompt and text are made into tokens separately, because the
        # prompt alone is what the model gets when it writes.
        def tokenize(rows: dict[str, list[Any]]) -> dict[str, Any]:
            inputs, labels = [], []
            for text, label in zip(rows[args.text_column], rows[args.label_column], strict=True):
                prompt = prompts[name_of(label)]
                ids = tokenizer(f" {checked_text(text)}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
                inputs.append([*prompt, *ids][:max_length])
                labels.append([*(-100 for _ in prompt), *ids][:max_length])
            return {"input_ids": inputs, "attention_mask": [[1] * len(ids) for ids in inputs], "labels": labels}

        with training_args.main_process_first(desc="tokenize"):
            tokenized = splits.map(tokenize, batched=True, remove_columns=[*columns])

    # Trainer, training, and what it leaves in `output_dir`
    trainer = DopplerTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),  # pads labels with -100
    )
    checkpoint = training_args.resume_from_checkpoint
    if checkpoint is None and out.is_dir() and get_last_checkpoint(str(out)) is not None:
        checkpoint = True  # the last one that was written completely
    if trainer.is_world_process_zero():
        write_record(out, settings, labels=None)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        write_record(out, settings, labels=names)
    return names


if __name__ == "__main__":
    main()
