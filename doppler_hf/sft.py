"""`DopplerSFTTrainer`: TRL's `SFTTrainer`, on top of `DopplerTrainer` in place of `Trainer`.

TRL prepares the data row by row, and evaluates. The loss is computed in `privacy.losses`: the mean over a record's own
labelled tokens (the completion, the assistant's turns, or all). One row is one record.
"""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from transformers.hf_argparser import HfArg
from transformers.trainer_utils import has_length
from trl import SFTConfig, SFTTrainer
from trl.data_utils import is_conversational, is_conversational_from_value

from doppler_hf import trl_checks
from doppler_hf.deprecated import with_earlier_arguments
from doppler_hf.errors import Refusal
from doppler_hf.run.saving.saving import with_privacy_section
from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments, checks

_NOT_PRIVATE: Final = {
    "packing": "a row would hold several texts, and a text could span two rows, so ε would not protect one text",
    "loss_type": "the loss of a record is always the mean negative log-likelihood of its own tokens",
    **trl_checks.NOT_PRIVATE,
}
_READ: Final = ("messages", "input_ids")  # columns that TRL reads alone
_MASK: Final = "completion_mask"  # a column of TRL's in data sets that are tokenized already


# TRL's class is the first base class, so that its defaults hold and its `super()` calls reach ours.
@with_earlier_arguments
@checks.with_known_arguments
@dataclass
class DopplerSFTConfig(SFTConfig, DopplerTrainingArguments):
    """Arguments of `DopplerSFTTrainer`: `SFTConfig` with its defaults, plus `DopplerTrainingArguments`."""

    learning_rate: float | None = HfArg(
        default=None, help="As in DopplerTrainingArguments, but with disable_dp the default is TRL's 2e-5."
    )
    max_grad_norm: float | None = HfArg(default=None, help="As in DopplerTrainingArguments.")
    non_private_learning_rate = SFTConfig.learning_rate

    def __post_init__(self) -> None:
        """Check the arguments, as TRL and `DopplerTrainingArguments` do."""
        super().__post_init__()
        self._check_further()

    def check(self) -> None:
        """Check the arguments again, as `DopplerTrainingArguments` does."""
        super().check()
        self._check_further()

    def _check_further(self) -> None:
        if not self.disable_dp:
            trl_checks.refuse_arguments(self, _NOT_PRIVATE)


class DopplerSFTTrainer(SFTTrainer, DopplerTrainer):
    """`SFTTrainer` with differential privacy: the same data sets, chat templates, adapters and arguments.

    With `args.disable_dp` every method is TRL's. The arguments and their order are those of `SFTTrainer`.

    Raises:
        ValueError: If something would break the guarantee, as in `DopplerTrainer`; also for images, and for a loss that
            balances experts.

    Example:
        >>> args = DopplerSFTConfig(output_dir="out", target_epsilon=8.0, max_length=512)
        >>> trainer = DopplerSFTTrainer(model=model, args=args, train_dataset=train, processing_class=tokenizer)
    """

    args: DopplerSFTConfig
    create_model_card = with_privacy_section(SFTTrainer.create_model_card)

    def __init__(
        self,
        model: Any,
        args: DopplerSFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *others: Any,
        **options: Any,
    ) -> None:
        evaluated = others[0] if others else options.get("eval_dataset")
        with trl_checks.private_init(self, args, DopplerSFTConfig, train_dataset=train_dataset, eval_dataset=evaluated):
            _refuse_completion_without_prompt(args, train_dataset)
            given = inspect.signature(SFTTrainer).bind_partial(model, args, data_collator, train_dataset, *others, **options)
            _refuse_without_texts(given.arguments)
            _refuse_unused_formatting(given.arguments)
            _refuse_no_chat_template(given.arguments)
            super().__init__(model, args, data_collator, train_dataset, *others, **options)
        if not self.args.disable_dp:
            _warn_of_rows_left_out(self.args, given=train_dataset, kept=self.train_dataset)
        if self.args.chat_template_path is not None and not self.args.disable_dp:
            trl_checks.refuse_new_tokens_of_tied_embeddings(self.model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, but without figures of training batches, which have no noise."""
        trl_checks.without_training_figures(self)
        super().log(logs, start_time)


def _refuse_completion_without_prompt(args: Any, train_dataset: Any) -> None:
    """Refuse `completion_only_loss` where TRL ignores it: it knows no prompt, and would train every token."""
    columns = {*next(iter(train_dataset or ()), ())}
    if args.completion_only_loss and not args.disable_dp and not ({"prompt", "completion"} <= columns or _MASK in columns):
        raise Refusal(
            "no-effect",
            "The argument completion_only_loss=True has no effect, because train_dataset has no columns 'prompt' and "
            "'completion', so all tokens would be trained. Add these columns. For the answers in conversations, set "
            "assistant_only_loss=True in its place.",
        )


def _refuse_without_texts(given: Mapping[str, Any]) -> None:
    """Refuse data sets without a column that TRL reads, unless the user's own function or rows take its place."""
    args, formats = given["args"], given.get("formatting_func")
    if args.disable_dp or (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return
    for name, data_set, columns in trl_checks.columns_of(given):
        is_pair = {"prompt", "completion"}.issubset(columns)
        if "prompt" in columns and not is_pair and "input_ids" not in columns:
            raise Refusal(
                "prompt-without-completion",
                f"{name} has a column 'prompt' and no column 'completion'; it has the columns {', '.join(columns)}. TRL "
                "reads 'prompt' only together with 'completion'. Rename the column of the answers to 'completion'. To train "
                "on the texts of another column, such as 'messages', remove or rename the column 'prompt'.",
            )
        if formats or is_pair or not {args.dataset_text_field, *_READ}.isdisjoint(columns):
            continue
        if not is_conversational_from_value(next(iter(data_set), {})):
            raise Refusal(
                "no-texts",
                f"{name} has no column {args.dataset_text_field!r}; it has the columns {', '.join(columns)}. If one of them "
                "has the texts, set dataset_text_field to its name. Otherwise name columns 'prompt' and 'completion', or "
                "'messages' for conversations, or pass a formatting_func.",
            )


def _refuse_unused_formatting(given: Mapping[str, Any]) -> None:
    """Refuse a `formatting_func` whose texts TRL would not read, because the rows have other columns that it prefers."""
    args = given["args"]
    if args.disable_dp or given.get("formatting_func") is None or (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return
    field = args.dataset_text_field
    for name, data_set, columns in trl_checks.columns_of(given):
        row: dict[str, Any] = next(iter(data_set), {})
        preferred = {
            "the columns 'prompt' and 'completion'": {"prompt", "completion"}.issubset(columns),
            "the column 'input_ids'": "input_ids" in columns,
            "the conversations in its rows": is_conversational(row) or is_conversational_from_value(row),
            # TRL writes the texts of the function to this column, whatever the name of the column that it reads.
            f"the column {field!r}, which dataset_text_field names": field != "text",
        }
        if read := next((each for each, is_read in preferred.items() if is_read), None):
            raise Refusal(
                "no-effect",
                f"The argument formatting_func has no effect on {name}, because TRL reads {read} in place of its texts. "
                f"Call the function yourself: data = data.map(lambda row: {{{field!r}: formatting_func(row)}}, "
                "remove_columns=data.column_names). Or leave formatting_func out, to train on what TRL reads.",
            )


def _refuse_no_chat_template(given: Mapping[str, Any]) -> None:
    """Refuse `assistant_only_loss` without the chat template that marks the assistant's turns."""
    args, tokenizer = given["args"], given.get("processing_class")
    if args.disable_dp or not args.assistant_only_loss or tokenizer is None or args.chat_template_path is not None:
        return
    if getattr(tokenizer, "chat_template", None) is None:
        raise Refusal(
            "no-chat-template",
            "The argument assistant_only_loss=True needs a chat template that marks the turns of the assistant, and the "
            "tokenizer has none. Set tokenizer.chat_template to a template with {% generation %} around these turns, or set "
            "chat_template_path to the file of such a template.",
        )


def _warn_of_rows_left_out(args: Any, *, given: Any, kept: Any) -> None:
    """Tell of the rows of which TRL has cut off all trained tokens, and refuse a run without rows."""
    if given is None or not (has_length(given) and has_length(kept)) or len(kept) == len(given):
        return
    reason = f"because max_length={args.max_length} cuts off all of their tokens that would be trained"
    if len(kept) == 0:
        raise Refusal("all-rows-left-out", f"TRL left out all rows of train_dataset, {reason}. Raise max_length.")
    if args.process_index == 0:
        count = f"{len(given) - len(kept):,} of the {len(given):,} rows"
        warnings.warn(f"TRL left out {count} of train_dataset, {reason}. To train on them, raise max_length.", stacklevel=3)
