"""What a private run does in every step: a draw's sum of clipped gradients, its release, and their count in the ledger.

The way of an example from left to right: `begin` the draw of a step, `reserve` the step in the ledger, `add_piece` for each
of the draw's pieces, `release` their sum beneath noise, then `count_release`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate.utils import send_to_device
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import AllocationSampler, ClippedGradients, PrivacyLedger
from doppler_hf.privacy.batching.micro_batches import MicroBatch
from doppler_hf.privacy.batching.sampling import OfStep
from doppler_hf.privacy.noise import GaussianMechanism, PrivateLoss
from doppler_hf.privacy.randomness import fill_generators
from doppler_hf.run.checks.loss import TrainedLoss
from doppler_hf.run.sharding import Sharding
from doppler_hf.shards import in_shards
from doppler_hf.training_args import DopplerTrainingArguments


@dataclass(eq=False, kw_only=True)
class Steps:
    """The steps of one run, one after another: the only object that they need."""

    args: DopplerTrainingArguments
    sampler: AllocationSampler
    clipped: ClippedGradients  # attached to the model
    loss: TrainedLoss
    has_odds: bool  # whether the rule for the model's class has −log p of one right class
    mechanism: GaussianMechanism
    private_loss: PrivateLoss | None
    sharding: Sharding
    dummy: MicroBatch  # of weight 0, for the passes in which other processes have more
    reports_raw_loss: bool
    ledger: PrivacyLedger | None = field(default=None, init=False)  # once the run has begun it
    affordable: int = field(default=0, init=False)  # the number of further steps that the budget allows
    # Of the draw that was begun last: whether `p.grad` is the mechanism's, on the device how many examples had no finite
    # gradient, and in how many passes other processes have more.
    is_released: bool = field(default=False, init=False)
    num_non_finite: int | Tensor = field(default=0, init=False)
    num_dummies: int = field(default=0, init=False)
    _pieces_left: int = field(default=0, init=False)
    _fillings: int = field(default=0, init=False)
    _is_warned: bool = field(default=False, init=False)

    def reserve(self) -> PrivacyLedger | None:
        """Reserve the next portion of steps, if the last one is used up, and return the ledger if it must be saved now."""
        assert self.ledger is not None
        self.clipped.refuse_other_parameters()  # which a callback may have frozen: before a step is counted
        return self.ledger if self.ledger.reserve(at_most=self.affordable) else None

    def fill_generators(self) -> None:
        """Fill the global generators with secret words, whatever has seeded them."""
        self._fillings += 1
        fill_generators(self.args.noise_seed, rank=self.args.process_index, step=self._fillings)

    def begin(self, pieces: Sequence[OfStep], *, step: int) -> None:
        """Begin a batch of pieces from the loader, none at its end, for a step, counted from 0.

        Sums of an unfinished one are dropped, and never released.
        """
        # Sensitivity: part of another draw would let an example count twice.
        if len(pieces) not in (0, self.sampler.micro_batches):
            raise ValueError(
                f"gradient_accumulation_steps must stay {self.sampler.micro_batches} during a private run, got "
                f"{len(pieces)} pieces of a batch. Set it before train()."
            )
        # Sensitivity: a unit takes part only in the turns of its group, and the noise of a turn covers the steps until the
        # next.
        other = next((piece.step for piece in pieces if piece.step != step), step)
        if other != step:
            raise RuntimeError(
                f"A batch for step {other} was taken at step {step}, so a record could take part more often than is "
                "accounted for. Leave the order of steps to the trainer."
            )
        passes = sum(map(len, pieces))
        self._pieces_left = len(pieces)
        self.num_dummies = self.sharding.most_passes(passes) - passes if self.sharding.is_asked_for else 0
        self.clipped.reset()
        self.is_released = False
        if self.private_loss is not None:
            self.private_loss.reset()

    @property
    def is_complete(self) -> bool:
        """Whether all pieces of the batch were added. Counted here: any callback may change accelerate's own flag."""
        return self._pieces_left == 0

    def add_piece(self, piece: Sequence[MicroBatch]) -> Float[Tensor, " rows"]:
        """Clip the gradient of each example of the next piece, add it to the sum of the draw, and return the losses."""
        if self.is_complete:
            raise ValueError(
                "Each piece of a batch must be added once, got one more. Call super().training_step once in yours, or "
                "override compute_per_sample_loss instead."
            )
        self._pieces_left -= 1  # first: a piece that has failed half-way is not added again
        self.fill_generators()
        losses = [self._add_clipped(micro_batch) for micro_batch in piece]
        return torch.cat(losses) if losses else torch.zeros(0, device=self.args.device)

    def _add_clipped(self, micro_batch: MicroBatch) -> Float[Tensor, " rows"]:
        # From pinned memory, and while the device computes: Transformers' own move waits for all that it has yet to do.
        losses = self.loss.of_examples(send_to_device(micro_batch.inputs, self.args.device, non_blocking=True))
        # Sensitivity: what is clipped to C is a row, or the mean of K. An example with more rows would contribute more.
        if len(losses) != micro_batch.size:
            # Not their numbers: the size of a draw is private, and messages end in logs.
            raise ValueError(
                "The losses of a micro-batch must be one for each of its examples, got "
                f"{'more' if len(losses) > micro_batch.size else 'fewer'}. Let the collator return one row for each "
                "example, and compute_per_sample_loss one loss."
            )
        size, weights = micro_batch.size // micro_batch.rows_each, None
        if micro_batch.weight != 1.0:
            weights = torch.full((size,), micro_batch.weight, device=losses.device)
        # By what was computed and not by the class: code of the user's own may return the loss of the model's class.
        is_cross_entropy = self.has_odds and self.loss.is_of_class(losses)
        self.clipped.backward(losses, weights=weights, views=micro_batch.rows_each, is_cross_entropy=is_cross_entropy)
        if self.private_loss is not None:
            self.private_loss.add(losses.detach().unflatten(0, (size, -1)).mean(dim=1), weights=weights)
        return losses.detach()

    def release(self, optimizer: DopplerOptimizer, *, step: int) -> Float[Tensor, ""] | None:
        """Turn the sum of the draw into the private gradient in `p.grad`, and return the private loss, if there is one."""
        for _ in range(self.num_dummies):  # another process has more micro-batches, and all gather the weights
            # Sensitivity: of weight 0, each term of a sum is 0·v of a finite v, or left out. So neither sums nor loss
            # change, and what is released is the same, in every bit, whether the pass is made or not.
            self._add_clipped(self.dummy)
        # Sensitivity: the noise covers contributions of norm C, of the same C.
        assert self.clipped.max_grad_norm == self.mechanism.max_grad_norm
        shards = {name: value for name, value in self.clipped.parameters.items() if isinstance(value, DTensor)}
        private = self.mechanism.privatize(self.clipped.sums, step=step, shards=shards)
        for name, gradient in private.items():
            parameter = self.clipped.parameters[name]
            gradient = gradient.to(parameter.dtype)
            parameter.grad = in_shards(gradient, like=parameter) if name in shards else gradient
        optimizer.noise_std = self.mechanism.noise_std(step)
        self.is_released, self.num_non_finite = True, self.clipped.num_non_finite
        self.clipped.reset()
        return None if self.private_loss is None else self.private_loss.release(step=step)

    def count_release(self) -> None:
        """Count one step as released, if its gradient is the mechanism's."""
        if self.ledger is None or not self.is_released:
            raise RuntimeError(
                "The gradient of a private step must come from DopplerTrainer.training_step, got one from elsewhere, "
                "without noise. Call super().training_step in yours, or override compute_per_sample_loss instead."
            )
        # Read here, where Transformers reads the loss: within a step nothing waits for the device.
        if self.reports_raw_loss and not self._is_warned and self.num_non_finite:
            self._is_warned = True
            warnings.warn(
                "Some examples have a gradient that is not finite, and contribute nothing. Look for missing values (NaN) in "
                "the data, and for losses that overflow or divide by zero. This warning is not private. It appears only "
                "with report_train_loss='raw'.",
                stacklevel=2,
            )
        self.ledger.record_step()
        self.affordable -= 1
