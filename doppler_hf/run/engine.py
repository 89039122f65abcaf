"""The engine before the first step: compare it with plain autograd, attach it, and run it once.

Nothing about the examples that this uses is released: the outcome depends on the architecture alone.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.privacy import ClippedGradients, PrivacyStatement, check_per_sample_gradients
from doppler_hf.training_args import DopplerTrainingArguments


@contextlib.contextmanager
def attached_engine(
    model: Any,
    args: DopplerTrainingArguments,
    *,
    statement: PrivacyStatement,
    losses_of: Callable[[Mapping[str, Any]], Float[Tensor, " batch"]],
    first_examples: Callable[[int], dict[str, Any]],
) -> Iterator[ClippedGradients]:
    """Attach the engine of `args` to a model for the duration of the block.

    Args:
        model: The model to be trained, a `PreTrainedModel` or a `PeftModel`.
        args: The arguments: which engine, and whether to compare it with autograd.
        statement: The clipping and the clip norm that the ledger states.
        losses_of: A function that calls the model and returns one loss per example of a micro-batch.
        first_examples: A function that returns a micro-batch of that many examples of the training set.

    Raises:
        ValueError: If the model cannot be trained privately, by the name of the layer or buffer at fault.
    """
    with torch.random.fork_rng():  # Dropout in these passes must not shift the user's random numbers.
        if args.grad_sample_self_check:
            check_per_sample_gradients(
                model,
                losses_of,
                first_examples(2),
                engine=args.grad_sample_engine,
                # Batches of one and of two are rounded differently.
                tolerance=0.1 if args.bf16 or model.dtype == torch.bfloat16 else 1e-3,
            )
    with ClippedGradients(
        model,
        max_grad_norm=statement.per_sample_max_grad_norm,
        clipping=statement.clipping,
        granularity=statement.clipping_granularity,
        engine=args.grad_sample_engine,
    ) as clipped:
        with torch.random.fork_rng():
            run_once(clipped, model, losses_of=losses_of, inputs=first_examples(3))
        yield clipped


def run_once(
    clipped: ClippedGradients,
    model: nn.Module,
    *,
    losses_of: Callable[[Mapping[str, Any]], Float[Tensor, " batch"]],
    inputs: dict[str, Any],
) -> None:
    """Run the engine once as in training, dropout included, so that a model that it cannot train is refused now.

    Raises:
        ValueError: If a layer has no per-sample gradients, or the forward pass writes a buffer that is saved.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    clipped.backward(losses_of(inputs))
    clipped.reset()
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved and not torch.equal(buffer, buffers[name]):
            raise ValueError(
                f"The forward pass writes the buffer {name!r}, which is saved with the model but neither clipped nor "
                "noised. Replace the layer by one that keeps no statistics of the data."
            )
