"""The engine of per-sample gradients in a run: what model it refuses, and that it is attached and checked."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from doppler_hf.privacy import ClippedGradients, PrivacyStatement
from doppler_hf.privacy.batching.probe import Probes
from doppler_hf.privacy.clipping.as_in_training import moved
from doppler_hf.privacy.clipping.plain_autograd import Losses
from doppler_hf.privacy.clipping.sharded_sums import ShardedSums
from doppler_hf.privacy.losses import without_adapters
from doppler_hf.run.halving import Rows
from doppler_hf.run.in_step import InStep
from doppler_hf.run.start_check import CheckLoss, Moment, StartCheck
from doppler_hf.training_args import DopplerTrainingArguments


@contextlib.contextmanager
def attached_engine(
    model: Any,
    args: DopplerTrainingArguments,
    *,
    statement: PrivacyStatement,
    losses_of: Losses,
    check_loss: CheckLoss,
    probes: Probes,
    rows_per_loss: int,
    in_step: InStep | None,
    sharded_sums: ShardedSums | None,
    moments: Sequence[Moment],
) -> Iterator[tuple[ClippedGradients, Rows | None]]:
    """Attach the engine of `args` to a model for the duration of the block; see `PrivateRun.attach`.

    Where the processes share the model's weights, process 0 makes the checks for all: model, data and code are the same.

    Yields:
        The engine, and what the check has found of the rows of a batch; None without a check.

    Raises:
        ValueError: If the model cannot be trained privately, by the name of the layer or tensor at fault.
    """
    refuse_trainable(model)
    refuse_unknown_lengths(model, probes)
    base = without_adapters(model)
    if isinstance(base, PreTrainedModel):
        # The host sets it in the outer config, and a multimodal model reads the inner one. A layer that keeps its past in a
        # cache computes something else at each call, and layers are called more than once.
        base.config.get_text_config().use_cache = args.use_cache
    with ClippedGradients(
        model,
        max_grad_norm=statement.per_sample_max_grad_norm,
        clipping=statement.clipping,
        granularity=statement.clipping_granularity,
        engine=args.grad_sample_engine,
        rows_per_loss=rows_per_loss,
        sharded_sums=sharded_sums,
    ) as clipped:
        usual_rows = args.per_device_train_batch_size
        start = StartCheck(clipped, model, losses_of, probes, in_step, usual_rows=usual_rows, moments=moments)

        def check() -> tuple[Rows | None, bool]:
            return start.run(args, check_loss), clipped.is_checked

        # Of trained weights in shards each process moves the rows that it has.
        with moved(model) if sharded_sums is not None and args.grad_sample_self_check else contextlib.nullcontext():
            if in_step is None:
                rows, _ = check()
            else:
                rows, clipped.is_checked = in_step.on_process_0(check)
        if in_step is not None and not clipped.is_checked:
            # One with a finite loss alone would make more passes later on than those of the others.
            raise ValueError(
                "Examples must have a finite gradient under FSDP, to check before the first step that they are apart, got "
                "some without. Leave grad_sample_self_check out, with which others are looked for."
            )
        yield clipped, rows


def refuse_trainable(model: nn.Module) -> None:
    """Refuse a model of which nothing is trained, or whose trained parameters are complex or have too small a range."""
    trainable = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ValueError("The model must have a trainable parameter, got none. Set requires_grad for some.")
    half = next((name for name, dtype in trainable.items() if dtype == torch.float16), None)
    if half is not None:
        raise ValueError(
            f"Trained parameters must not be in float16, got {half!r}: gradients of single examples leave its range. Load "
            "the model with dtype=torch.float32, or torch.bfloat16."
        )

    # Sensitivity: noise of real numbers would leave the imaginary parts as they are.
    complex_name = next((name for name, dtype in trainable.items() if dtype.is_complex), None)
    if complex_name is not None:
        raise ValueError(
            f"Trained parameters must be real numbers, got {complex_name!r} of type {trainable[complex_name]}. Keep its "
            "real and its imaginary part in the last dimension of a real one, and use torch.view_as_complex in the forward."
        )


def refuse_unknown_lengths(model: nn.Module, probes: Probes) -> None:
    """Refuse positions that depend on the longest example of a batch, if the longest of all is not known."""
    # Sensitivity: such rotary embeddings change for every row of a batch with an example beyond the length of pretraining.
    # The comparison shows that only on such an example, of which there may be one in a million.
    # A word, or one for each kind of layer.
    kinds = [str(vars(module).get("rope_type")) for module in model.modules()]
    changing = [kind for words in kinds for kind in re.findall(r"\w*dynamic\w*|longrope", words)]
    if changing and not probes.knows_largest_batch:
        raise ValueError(
            f"The lengths of all examples must be known for rope_type={changing[0]!r}, whose positions depend on the "
            "longest example of a batch, got a train_dataset without them. Tokenize it beforehand, pad all examples to one "
            "length, or take another rope_type."
        )
