"""The arguments with which a run began. They are its terms: what is changed later has no effect, which must be said."""

import copy
import warnings
from typing import Final

from doppler_hf.errors import Refusal
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import own_fields

# Transformers' arguments that are read before the first step.
_OF_TRANSFORMERS: Final = (
    "max_grad_norm", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "optim", "optim_args", "optim_target_modules", "bf16", "fp16",
)  # fmt: skip
# Arguments that are read in each step: another value would change what a step does.
_READ_IN_STEPS: Final = ("disable_dp", "noise_seed", "gradient_accumulation_steps")


class FixedTerms:
    """The values of the arguments from which a run was planned.

    Args:
        args: The arguments at the beginning.
    """

    def __init__(self, args: DopplerTrainingArguments) -> None:
        names = (*(field.name for field in own_fields(DopplerTrainingArguments)), *_OF_TRANSFORMERS)
        self._values = {name: copy.copy(getattr(args, name)) for name in names}

    def refuse_changes(self, args: DopplerTrainingArguments) -> None:
        """Refuse changes before the first step, which a callback has made after the run was planned."""
        for name in self._changed(args):
            raise Refusal(
                "arguments-changed",
                f"{name} was changed from {self._values[name]} to {getattr(args, name)} after the run was planned, which "
                "would have no effect. Set it before train(). No ε is spent.",
            )

    def warn_of_changes(self, args: DopplerTrainingArguments) -> None:
        """Say once that a change during the training has no effect; stop before a step that it would change."""
        for name in self._changed(args):
            old, new = self._values[name], getattr(args, name)
            changed = f"{name} was changed from {old} to {new} during the training."
            if name in _READ_IN_STEPS:
                raise Refusal(
                    "arguments-changed",
                    f"{changed} It must stay {old}, since noise and ε were computed from it. This step is not counted. Set "
                    "it before train(), and go on with resume_from_checkpoint=True.",
                )
            warnings.warn(
                f"{changed} This has no effect: a run keeps the arguments with which it began. Set it before train().",
                stacklevel=2,
            )
            if name == "max_grad_norm":  # Transformers reads it in each step
                args.max_grad_norm = old
            self._values[name] = copy.copy(getattr(args, name))

    def _changed(self, args: DopplerTrainingArguments) -> list[str]:
        return [name for name, value in self._values.items() if getattr(args, name) != value]
