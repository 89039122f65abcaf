"""One private training, whose parts are opened and closed together.

The accountant reads the sample rate off the sampler that draws, and the optimizer the size of the noise off the mechanism
that adds it. A `DopplerTrainer` makes a new run each time it trains.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import ClippedGradients, PoissonSampler, PrivacyLedger
from doppler_hf.privacy.accounting import Releases, joint_noise_multiplier
from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.privacy.batching.columns import lengths_of, units_of
from doppler_hf.privacy.batching.micro_batches import MicroBatch, PrivateLoader
from doppler_hf.privacy.batching.probe import Probes
from doppler_hf.privacy.batching.same_data import KnownExamples, known_to_all
from doppler_hf.privacy.batching.sampling import OfStep
from doppler_hf.privacy.clipping.plain_autograd import Losses
from doppler_hf.privacy.clipping.sharded_sums import ShardedSums
from doppler_hf.privacy.clipping.writes import Untouched
from doppler_hf.privacy.generators import Refill, filled_generators
from doppler_hf.privacy.noise import noise_source
from doppler_hf.run.checkpoints import step_of_checkpoint
from doppler_hf.run.choices import chosen_noise_shape
from doppler_hf.run.engine import attached_engine
from doppler_hf.run.gradient_recorder import GradientRecorder, refuse_other_noise
from doppler_hf.run.halving import Halving, Spare, weights_of
from doppler_hf.run.in_step import InStep
from doppler_hf.run.mechanisms import mechanisms_of
from doppler_hf.run.plan import budget_spent, planned_statement
from doppler_hf.run.refusals import refuse_other_parameters, warn_of_non_finite
from doppler_hf.run.replicas import (
    compare_terms,
    give_all_the_weights_of_process_0,
    refuse_processes_that_draw_alone,
)
from doppler_hf.run.start_check import CheckLoss, Moment
from doppler_hf.run.whole_draw import WholeDraw
from doppler_hf.shards import in_shards
from doppler_hf.training_args import DopplerTrainingArguments


@final
class PrivateRun:
    """Statement, sampler, mechanism, engine and ledger of one private training.

    In the order of use: make the `loader`, `attach` the engine to the model, `begin` the ledger, in every epoch
    `begin_epoch`, then for every step `begin_draw`, and for each of its pieces `begin_piece`, `add` the micro-batches and
    `end_piece`. A `with` statement around all of it takes the engine off the model and ends the mechanism.

    Args:
        args: The arguments.
        train_dataset: The private examples.
        expected_batch_size: B, over all processes.
        num_trained: The number of weights that are trained.
        recorders: The callbacks that record gradients.
        checkpoint: The folder from which the run is resumed, or None.
        earlier: The ledger that it continues, or None.

    Attributes:
        checkpoint: As given.
        train_dataset: As given.
        statement: Every public number of the run, as in its ledger.
        sampler: The sampler of the examples.
        mechanism: The mechanism that turns clipped sums into private gradients.
        private_loss: The private training loss; None if there is none.
        adaptive_clip: What moves the clip norm; None if it stays.
        ledger: The record of what was spent; None before `begin`.
        affordable_steps: The number of further steps that the budget allows.
        fill_generators: Fills the global generators with secret words, before each forward pass.

    Raises:
        ValueError: If no noise reaches the target, or the budget is spent.
    """

    def __init__(
        self,
        args: DopplerTrainingArguments,
        train_dataset: Any,
        *,
        expected_batch_size: int,
        num_trained: int,
        recorders: Sequence[GradientRecorder] = (),
        checkpoint: str | None = None,
        earlier: PrivacyLedger | None = None,
    ) -> None:
        self._args, self._earlier, self.checkpoint, self.train_dataset = args, earlier, checkpoint, train_dataset
        self._raw_recorders = [recorder for recorder in recorders if recorder.record_raw]
        self._resources = contextlib.ExitStack()
        self._model: nn.Module | None = None
        self._weights: Untouched | None = None  # of the draw that is being added
        self._clipped: ClippedGradients | None = None
        self._draw: Halving | None = None
        self._pieces = WholeDraw(args.gradient_accumulation_steps)
        self._loader: PrivateLoader | None = None
        self._collate: Callable[..., Any] | None = None  # the loader's, as it was made
        self._is_released = self._is_warned = False
        self._known_examples: KnownExamples | None = None  # where it matters that an example keeps its number
        self._begins_epoch = False
        self.fill_generators = Refill(args.noise_seed, rank=args.process_index)
        column = args.privacy_unit_column
        self.sampler = PoissonSampler(
            num_examples=len(train_dataset),
            expected_batch_size=expected_batch_size,
            micro_batches=args.gradient_accumulation_steps,
            rank=args.process_index,
            world_size=args.world_size,
            lengths=lengths_of(train_dataset),
            units=None if column is None else units_of(train_dataset, column=column),
            max_examples_per_unit=args.max_examples_per_unit,
            keeps_units_whole=args.clip_unit_mean,
            seed=args.noise_seed,
        )
        resumed = earlier.statement if checkpoint is not None and earlier is not None else None
        shape = chosen_noise_shape(args, sampler=self.sampler, num_trained=num_trained, resumed=resumed)
        if recorders:
            refuse_other_noise(shape, clipping_quantile=args.clipping_quantile)
        self.sampler.take_turns(shape.bands)
        self._first_step = step_of_checkpoint(checkpoint)
        self.statement = planned_statement(
            args,
            sampler=self.sampler,
            noise_shape=shape,
            noise_source=noise_source(
                args.noise_generator, floating_point_safe=args.floating_point_safe, seed=args.noise_seed
            ),
            records_raw=bool(self._raw_recorders),
            earlier=earlier,
            first_step=self._first_step,
        )
        self.mechanism, self.private_loss, self.adaptive_clip = mechanisms_of(
            args, self.statement, shape=shape, first_step=self._first_step, earlier=earlier
        )
        self.ledger: PrivacyLedger | None = None
        self.affordable_steps = 0

    def __enter__(self) -> Self:
        # After the initialization, which the user's seed fixes; before anything random touches an example.
        self._resources.enter_context(filled_generators(self._args.noise_seed, rank=self._args.process_index))
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()
        self._clipped = self._draw = self._model = self._weights = None
        self.mechanism.close()

    # --- before the first step ----------------------------------------------------------------------------------------

    def loader(self, dataset: Any, collator: Collator) -> PrivateLoader:
        """Return a loader of this run's draws; see `PrivateLoader`."""
        self._loader = PrivateLoader(
            dataset,
            sampler=self.sampler,
            collator=collator,
            max_tokens=self._args.max_tokens_per_micro_batch,
            fill=self.fill_generators,
            views=self.statement.augmentation_multiplicity,
            num_workers=self._args.dataloader_num_workers,
            pin_memory=self._args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self._args.dataloader_persistent_workers,
            multiprocessing_context=self._args.dataloader_multiprocessing_context,
            prefetch_factor=self._args.dataloader_prefetch_factor,
        )
        self._collate = self._loader.collate_fn
        return self._loader

    def attach(
        self,
        model: nn.Module,
        *,
        losses_of: Losses,
        check_loss: CheckLoss,
        loader: Any,
        rows_per_loss: int,
        in_step: InStep | None,
        sharded_sums: ShardedSums | None,
        moments: Sequence[Moment],
    ) -> None:
        """Check the engine of per-sample gradients on the model, and attach it until the run is closed.

        Args:
            model: The model to be trained.
            losses_of: A function that calls the model and returns one loss per example of a micro-batch.
            check_loss: A function that refuses a model whose own loss of a micro-batch is another one.
            loader: The private loader, of whose examples some are used for the check.
            rows_per_loss: As in `ClippedGradients`.
            in_step: The meetings of processes that share the model's weights; None if each has all of them.
            sharded_sums: As in `ClippedGradients`.
            moments: As in `StartCheck`.

        Raises:
            ValueError: If the model cannot be trained privately, by the name of the layer or buffer at fault, or processes
                would not draw each from its share.
        """
        # Sensitivity: what a wrapper or another collate_fn makes of a draw, no check sees.
        if self._loader is None or loader is not self._loader or loader.collate_fn is not self._collate:
            raise ValueError(
                "get_train_dataloader must return the loader of this run, whose sampler is accounted for, got another one, "
                "or one that collates otherwise. Return super().get_train_dataloader(), made anew for each training, and "
                "change batches in the data_collator."
            )
        refuse_processes_that_draw_alone(self._args.world_size)
        if self._args.world_size > 1:
            compare_terms(self.statement, self._args, model)
            self._known_examples = known_to_all(loader.examples, self.sampler)
            give_all_the_weights_of_process_0(model)
        elif self.sampler.units is not None or self.sampler.groups > 1:
            self._known_examples = KnownExamples(loader.examples)
        probes = Probes(loader)
        engine = attached_engine(
            model,
            self._args,
            statement=self.statement,
            losses_of=losses_of,
            check_loss=check_loss,
            probes=probes,
            rows_per_loss=rows_per_loss,
            in_step=in_step,
            sharded_sums=sharded_sums,
            moments=moments,
        )
        self._model = model
        self._clipped, rows = self._resources.enter_context(engine)
        self._clipped.max_grad_norm = self.mechanism.max_grad_norm  # a resumed run goes on with that of its checkpoint
        # A single example, for passes in which others have a micro-batch and this process has none.
        spare = None if in_step is None else Spare(in_step, probes.copies(1), losses_of)
        self._draw = Halving(self._clipped, fill=self.fill_generators, rows=rows, spare=spare)

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        """Let parts of the model be called outside a training step, as some adapters ask for when they are saved."""
        return contextlib.nullcontext() if self._clipped is None else self._clipped.unwatched()

    @property
    def fallbacks(self) -> Mapping[str, str]:
        """Layers without a rule in the engine, by name, and how their gradient is computed."""
        return {} if self._clipped is None else self._clipped.fallbacks

    @property
    def moving_max_grad_norm(self) -> float | None:
        """The clip norm of the next step, if it moves."""
        return None if self.adaptive_clip is None else self.mechanism.max_grad_norm

    @property
    def settled_noise_std(self) -> float:
        """The noise per coordinate of the mean gradient in the last step; of shaped noise that of the first ones is less."""
        return self.mechanism.noise_std(max(self._first_step, self.statement.steps_planned))

    @property
    def noise_in_words(self) -> str:
        """The noise over time, whether it was chosen, and how often a unit takes part."""
        return ("auto: " if self._args.noise_shape == "auto" else "") + self.statement.noise_shape_in_words

    def releases(self, steps: int) -> Releases:
        """Return what `steps` steps release, from the sampler and the mechanism themselves."""
        rate, groups = self.sampler.sample_rate, self.sampler.groups
        mechanisms = [self.mechanism, *(part.mechanism for part in (self.private_loss, self.adaptive_clip) if part)]
        releases = [mechanism.releases(steps, sample_rate=rate, groups=groups) for mechanism in mechanisms]
        if len(releases) == 1:
            return releases[0]
        return releases[0]._replace(noise_multiplier=joint_noise_multiplier(*(each.noise_multiplier for each in releases)))

    def begin(self, *, step: int) -> PrivacyLedger:
        """Open the ledger, or continue the earlier one from this step on, and count the steps that the budget allows.

        Raises:
            ValueError: If the budget does not allow a single step, or is overrun. The run has no ledger then.
        """
        assert self.ledger is None, "a run begins once"
        statement, earlier = self.statement, self._earlier
        # The statement and the account must describe what the sampler and the mechanism do.
        assert statement.noise_source == self.mechanism.describe()
        assert statement.releases(statement.steps_planned) == self.releases(statement.steps_planned)
        ledger = PrivacyLedger.open(statement) if earlier is None else earlier.resume(statement, from_step=step)
        remaining = max(0, statement.steps_planned - step)
        affordable = ledger.affordable_steps(remaining)
        target = self._args.target_epsilon
        # A finished run that is resumed spends nothing more, but its ledger would speak for a target that it has overrun.
        is_overrun = target is not None and ledger.private and ledger.epsilon() > target
        if (remaining > 0 and affordable == 0) or is_overrun:
            raise budget_spent(ledger.epsilon(), self._args)
        self.ledger, self.affordable_steps = ledger, affordable
        return ledger

    def count_ahead(self) -> PrivacyLedger | None:
        """Reserve the next portion of steps, if the last one is used up, and return the ledger if it must be saved now."""
        assert self.ledger is not None
        return self.ledger if self.ledger.reserve(at_most=self.affordable_steps) else None

    def count_release(self) -> None:
        """Count one step as released.

        Raises:
            RuntimeError: If the gradient of this step is not the mechanism's.
        """
        assert self.ledger is not None
        if not self._is_released:
            raise RuntimeError(
                "The gradient of a private step must come from DopplerTrainer.training_step, got one from elsewhere, "
                "without noise. Call super().training_step in yours, or override compute_per_sample_loss instead."
            )
        self._is_released = False
        self.ledger.record_step()
        self.affordable_steps -= 1

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_epoch(self, *, step: int) -> None:
        """Tell the sampler at which step its next draw is; of a resumed run the host drops those before the checkpoint."""
        dropped = step % self.sampler.steps_per_epoch if step == self._first_step else 0
        self.sampler.begin_at(step - dropped)
        self._begins_epoch = True

    def begin_draw(self, pieces: Sequence[OfStep], *, step: int) -> None:
        """Begin a draw; what was added for one that the host left half done is dropped, and never released.

        Args:
            pieces: Its pieces, as the host has taken them from the loader; none at its end.
            step: Optimizer step, counted from 0.

        Raises:
            ValueError: If `WholeDraw.begin` refuses them, processes have come that the sampler does not know, or examples no
                longer have their numbers.
            RuntimeError: If they were drawn for another step.
        """
        assert self._draw is not None
        refuse_processes_that_draw_alone(self._args.world_size)
        self._pieces.begin(pieces, step=step)
        # Here, since callbacks that shuffle may run after ours at the beginning of an epoch.
        if self._begins_epoch and self._known_examples is not None:
            self._known_examples.refuse_moved()
        self._begins_epoch = False
        self._draw.begin()
        self._weights = None
        self._is_released = False
        if self.private_loss is not None:
            self.private_loss.reset()

    def begin_piece(self, piece: Sequence[MicroBatch]) -> None:
        """Take the next piece of the draw; see `WholeDraw.take`."""
        assert self._model is not None
        self._pieces.take(piece)
        # Of a later piece they are as after the one before: looking at them once more would be a quarter of a short piece.
        self._weights = self._weights or Untouched(self._model)

    def add(self, micro_batch: MicroBatch, *, losses_of: Losses) -> Float[Tensor, " rows"]:
        """Clip the gradient of each example of a micro-batch, and add it to the sum of the draw; see `Halving.add`.

        Args:
            micro_batch: The micro-batch; where several rows are clipped together, their loss is the mean.
            losses_of: A function that returns one loss per row, attached to the graph.

        Returns:
            The losses, shape (rows,), detached.
        """
        assert self._draw is not None
        losses = self._draw.add(micro_batch, losses_of=losses_of)
        if self.private_loss is not None:
            means = losses.unflatten(0, (-1, micro_batch.rows_each)).mean(dim=1)
            self.private_loss.add(means, weights=weights_of(micro_batch, like=losses))
        return losses

    def end_piece(self, model: nn.Module, optimizer: DopplerOptimizer, *, step: int) -> Float[Tensor, ""] | None:
        """After the last piece of a draw, turn the sum into the private gradient in `p.grad`.

        Args:
            model: The model, without wrappers.
            optimizer: Its optimizer, which is told the size of the noise.
            step: Optimizer step, counted from 0.

        Returns:
            The private training loss of the step, or None if there is none, or not yet.

        Raises:
            ValueError: If the passes of the piece have written into what is trained, or something else has since the piece
                before, or the optimizer trains what is no parameter of the model.
        """
        assert self._weights is not None
        self._weights.check()
        # Counted here: accelerate's own flag is every callback's to change.
        if not self._pieces.is_complete:
            return None
        assert self._clipped is not None
        assert self._draw is not None
        # Sensitivity: gradients of others, such as learned weights of a loss, are the ordinary ones, without noise.
        refuse_other_parameters(optimizer, model)
        self._draw.complete()
        if self._clipped.num_non_finite and self.statement.train_loss == "raw" and not self._is_warned:
            self._is_warned = True
            warn_of_non_finite()
        # Sensitivity: the noise covers contributions of norm C, of the same C.
        assert self._clipped.max_grad_norm == self.mechanism.max_grad_norm
        for recorder in self._raw_recorders:  # The statement then says that nothing is private.
            recorder.record_raw_gradient(self._clipped.sums, self.mechanism.expected_batch_size)
        # A gradient that the optimizer reads in a subspace only needs no more noise than that has coordinates. The
        # subspaces are computed from the gradients of earlier steps, which are private.
        parameters, subspaces = dict(model.named_parameters()), optimizer.subspaces()
        bases = {name: subspaces[parameter] for name, parameter in parameters.items() if parameter in subspaces}
        private = self.mechanism.privatize(self._clipped.sums, step=step, subspaces=bases, places=self._clipped.places)
        for name, gradient in private.items():
            parameters[name].grad = in_shards(gradient.to(parameters[name].dtype), like=parameters[name])
        optimizer.noise_std = self.mechanism.noise_std(step)
        if self.adaptive_clip is not None:
            self.mechanism.rescale(self.adaptive_clip.release(self._clipped.num_within.to(self._args.device), step=step))
            self._clipped.max_grad_norm = self.mechanism.max_grad_norm
        self._is_released = True
        self._draw.begin()
        return None if self.private_loss is None else self.private_loss.release(step=step)
