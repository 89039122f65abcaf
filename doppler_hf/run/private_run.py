"""One private run: its plan, its parts, its steps and its ledger.

A `DopplerTrainer` makes a new run each time it trains, and holds it. All other code is given the run, or asks the trainer
for it. The constructor plans the run, `loader` and `attach` make the parts that need the data and the model, and `begin`
opens the ledger. Then in every step:

    draw           seed the generators, take the pieces of a random batch and start their sum
    reserve        reserve the step in the ledger, before an example is computed
    add_piece      clip the gradient of each example, and add it to the sum
    release        put the sum, with noise, into `p.grad`
    count_release  count the step

A `with` statement around the run detaches the engine and ends the mechanism.
"""

import contextlib
import copy
import functools
import itertools
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np
import torch
from accelerate.utils import send_to_device
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from doppler_hf.errors import Failure, Refusal
from doppler_hf.filters import NoiseShape
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import AllocationSampler, ClippedGradients, PrivacyLedger
from doppler_hf.privacy.accounting.accounting import Trainings
from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.privacy.batching.columns import lengths_of, units_of
from doppler_hf.privacy.batching.cutting import Cut, grid_for, tokens_for
from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.privacy.batching.micro_batches import MicroBatch, PrivateLoader
from doppler_hf.privacy.batching.probe import Probe
from doppler_hf.privacy.batching.sampling import Piece
from doppler_hf.privacy.loss_bounds import LossBound
from doppler_hf.privacy.losses import Losses, without_adapters
from doppler_hf.privacy.randomness import fill_generators, fill_in_worker, filled_generators
from doppler_hf.run.digests import is_known
from doppler_hf.run.other_batches import OtherBatches
from doppler_hf.run.planning.filter_and_noise import chosen_noise_shape
from doppler_hf.run.planning.plan import (
    NO_TIME,
    Trial,
    budget_spent,
    in_digits,
    mechanisms_of,
    planned_batch_size,
    planned_statement,
    refuse_hopeless_target,
)  # fmt: skip
from doppler_hf.run.precision import computes_in_bf16
from doppler_hf.run.processes.processes import broadcast_weights, compare_terms, on_process_0
from doppler_hf.run.processes.sharding import Sharding
from doppler_hf.run.resuming.earlier_ledgers import NOTHING, Previous
from doppler_hf.run.resuming.rounds import Rounds
from doppler_hf.run.weights.lineage import Lineage
from doppler_hf.run.weights.trained_model import TrainedModel
from doppler_hf.shards import in_shards
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import planned_from


def callbacks_removed() -> Refusal:
    """Return the error of a run whose callbacks were removed."""
    return Refusal(
        "callbacks-removed",
        "Some code has removed callbacks that a private run needs: the callback that counts its steps, or "
        "DefaultFlowCallback, which logs, evaluates, saves and stops. Use trainer.remove_callback to remove single "
        "callbacks, and do not replace or empty trainer.callback_handler.callbacks during train().",
    )


# Arguments that are read in each step, so that a new value would change the step, or what is saved after it.
_READ_IN_STEPS: Final = ("disable_dp", "noise_seed", "gradient_accumulation_steps", "max_grad_norm")


class FixedTerms:
    """The values of the arguments from which a run was planned.

    Args:
        args: The arguments at the start of the run.
    """

    def __init__(self, args: DopplerTrainingArguments) -> None:
        names = planned_from(DopplerTrainingArguments)
        self._args, self._values = args, {name: copy.copy(getattr(args, name)) for name in names}
        self._warned: set[str] = set()

    def refuse_changes(self, args: DopplerTrainingArguments) -> None:
        """Refuse changes that a callback has made before the first step, but after the run was planned."""
        for name in self._changed(args):
            raise Refusal(
                "arguments-changed",
                f"{name} was changed from {self._values[name]} to {getattr(args, name)} after the run was planned, so the "
                "change would have no effect. Set it before train(). No ε is spent.",
            )

    def keep(self, args: DopplerTrainingArguments) -> None:
        """Undo changes of arguments that a step reads, and warn once of every changed argument that it has no effect.

        Noise and ε were computed from the values at the start. The run continues with these, since its ε is spent.
        """
        if args is not self._args:
            return  # `PrivacyCallback.refuse_changed_code` stops a run whose arguments were replaced as a whole
        for name in self._changed(args):
            old, new = self._values[name], getattr(args, name)
            if name in _READ_IN_STEPS:
                setattr(args, name, old)
            else:
                self._values[name] = copy.copy(new)
            if (said := f"{name} was changed from {old} to {new} during the run.") not in self._warned:
                self._warned.add(said)
                warnings.warn(
                    f"{said} This has no effect: a run keeps the arguments with which it started. Set it before train().",
                    stacklevel=2,
                )

    def _changed(self, args: DopplerTrainingArguments) -> list[str]:
        return [name for name, value in self._values.items() if getattr(args, name) != value]


@final
class PrivateRun:
    """The only owner of a private run's sampler, engine, mechanism, ledger and secrets.

    Attributes:
        terms: The arguments with which the run was planned.
        mixed_precision: The precision of the accelerator: "no" or "bf16".
        statement: Every public number of the run, as in its ledger.
        ledger: The account of the spent privacy, or None before `begin`.
        is_running: Whether the run is still training.
        notes: Remarks of the checks, which are printed when the run starts.
        words: The learning rate and the filter in words, once they are known.
        is_little_said: Whether a line has said that the model learnt little.
        shown: Names and values that trackers get in addition to the arguments, once they are known.
    """

    # --- the plan -----------------------------------------------------------------------------------------------------

    def __init__(
        self,
        args: DopplerTrainingArguments,
        train_dataset: Any,
        *,
        num_trained: int,
        previous: Previous = NOTHING,
        loss_bound: LossBound | None = None,
        mixed_precision: str = "no",
        trial: Trial | None = None,
        interrupted: Trainings | None = None,
    ) -> None:
        self.loss_bound = loss_bound or LossBound.guessed()
        self.terms, self.mixed_precision = FixedTerms(args), mixed_precision
        # What searches had spent, which were interrupted in this run's folder or in the folder of its search.
        self._trial, self._interrupted = trial, interrupted or {} if trial is None else trial.interrupted
        self._args, self.train_dataset, self.previous = args, train_dataset, previous
        self._resources = contextlib.ExitStack()
        self._first_step = previous.step
        column = args.privacy_unit_column
        self.sampler = AllocationSampler(
            num_examples=len(train_dataset),
            expected_batch_size=planned_batch_size(args),
            pieces=args.gradient_accumulation_steps,
            rank=args.process_index,
            world_size=args.world_size,
            lengths=lengths_of(train_dataset),
            units=None if column is None else units_of(train_dataset, column=column),
            max_examples_per_unit=args.max_examples_per_unit,
            keeps_units_whole=args.clip_unit_mean,
            sampling=args.sampling,
            # Reproducible rounds continue where the earlier run stopped. Secret rounds are continued below.
            first_step=self._first_step if args.noise_seed is None else 0,
            seed=args.noise_seed,
        )
        refuse_hopeless_target(args, self.sampler)
        resumed = None if previous.checkpoint is None or previous.ledger is None else previous.ledger.statement
        shape = chosen_noise_shape(args, sampler=self.sampler, num_trained=num_trained, resumed=resumed, trial=trial)
        # Shaped noise protects a unit that takes part at most once in `bands` steps.
        self.sampler.take_turns(shape.bands)
        self.statement = planned_statement(
            args, sampler=self.sampler, noise_shape=shape, previous=previous, default_max_loss=self.loss_bound.value,
            trial=trial,
        )  # fmt: skip
        self.mechanism, self.private_loss = mechanisms_of(args, self.statement, shape=shape, first_step=self._first_step)
        self._rounds = Rounds(args, train_dataset, self.sampler)
        self._continues_rounds = self._rounds.continue_from(previous, self.statement)
        self.ledger: PrivacyLedger | None = None
        self.trained_model: TrainedModel | None = None
        self.is_running = self.is_little_said = False
        self.notes: list[str] = []
        self.why_not_loaded = ""  # how a model that `from_pretrained` makes would differ, for the model card
        self.pads_each_row_alone = False  # Whether every row has a padded length of its own.
        self.words: dict[str, str] = {}
        self.has_picture = False  # Whether the output folder has a picture of the training.
        self.chosen_step: int | None = None  # The step of the best checkpoint, if its weights were loaded at the end.
        self.shown: dict[str, Any] = {}
        self._loader: PrivateLoader | None = None
        self._engine: ClippedGradients | None = None
        self.affordable = 0  # The number of further steps that the budget allows.
        # These describe the last draw: whether `p.grad` comes from the mechanism, how many examples had no finite gradient
        # (on the device), and how many more passes another process makes.
        self.is_released = False
        self.num_non_finite: int | Tensor = 0
        self.num_empty_passes = 0
        self.num_rows = 0  # The number of rows of the batch that was started last, on this process.
        self._pieces_left = 0
        self._may_compute = False  # Whether the current step is reserved and not yet counted.
        self._fillings = 0
        self._is_warned = False
        self._is_settled = False  # Whether the ledger of this run is saved, so that the run can be resumed.

    @property
    def settled_noise_std(self) -> float:
        """The noise per coordinate of the mean gradient in the last step; shaped noise has less in the first steps."""
        return self.mechanism.noise_std(max(self._first_step, self.statement.steps_planned))

    def __enter__(self) -> Self:
        # Fill the generators after the initialization, which the user's seed fixes, but before an example is computed.
        self._resources.enter_context(filled_generators(self._args.noise_seed, rank=self._args.process_index))
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()
        self.sampler.is_reserved = False
        was_attached, self._engine = self._engine is not None, None
        vars(self).pop("probe", None)  # the probe holds examples
        if self.ledger is None or not was_attached:
            return
        # Nothing was dealt out before the first step, unless the run continues a round. A run whose ledger was not saved
        # cannot be resumed, but the earlier one can.
        has_begun = self._is_settled and (self._continues_rounds or self.ledger.runs[-1].steps_reserved > 0)
        if self.affordable <= 0 or not has_begun:
            self._rounds.secret_of(self.ledger).forget()

    @property
    def digest_of_data(self) -> DataDigest:
        """A digest that tells the training rows, in their order, from other data."""
        return self._rounds.digest_of_data

    def forget_rounds(self) -> None:
        """Forget the secret of the rounds, with which the run could be resumed."""
        if self.ledger is not None:
            self._rounds.secret_of(self.ledger).forget()

    # --- before the first step ----------------------------------------------------------------------------------------

    def loader(self, dataset: Any, collator: Collator, *, model: nn.Module) -> PrivateLoader:
        """Return a loader of this run's random batches, cut into passes for the model's device; see `PrivateLoader`."""
        args = self._args
        self._loader = PrivateLoader(
            dataset,
            sampler=self.sampler,
            collator=collator,
            cut=self._cut_for(model),
            worker_init_fn=functools.partial(fill_in_worker, seed=args.noise_seed, rank=args.process_index),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        return self._loader

    def other_batches(self) -> OtherBatches:
        """Return a loader for callbacks, whose batches are not those of the run."""
        assert self._loader is not None, "the run has a loader"
        return OtherBatches(self._loader, rows=self._args.per_device_train_batch_size, device=self._args.device)

    def _cut_for(self, model: nn.Module) -> Cut:
        args, lengths, views = self._args, self.sampler.lengths, self.statement.augmentation_multiplicity
        rows, tokens = args.per_device_train_batch_size, args.max_tokens_per_micro_batch
        if lengths is None or tokens is not None:
            return Cut(rows, tokens, views, may_exceed=lengths is None)
        # The longest row, or all rows of the largest unit that is clipped as one.
        counts = self.sampler.counts if args.clip_unit_mean and self.sampler.counts is not None else 1
        longest = int(np.max(lengths * counts)) * views
        config = getattr(without_adapters(model), "config", None)
        width = getattr(config.get_text_config(), "hidden_size", None) if isinstance(config, PreTrainedConfig) else None
        return Cut(None, tokens_for(on_cpu=args.device.type == "cpu", rows=rows, longest=longest, width=width), views)

    @property
    def most_rows(self) -> int:
        """The most rows of a micro-batch."""
        most = self.sampler.cut.most_rows(self.sampler.lengths)
        return self.sampler.num_examples if most is None else most

    @property
    def rows_of_longest(self) -> int:
        """How many of the longest rows a micro-batch may have, at least 1."""
        cut, lengths = self.sampler.cut, self.sampler.lengths
        if cut.max_tokens is None or lengths is None:
            return max(1, self.most_rows)
        return max(1, min(self.most_rows, cut.max_tokens // max(1, int(np.max(lengths)))))

    def refuse_another_loader(self, loader: Any) -> None:
        """Refuse a loader that this run has not made."""
        if self._loader is None or loader is not self._loader:
            raise Refusal(
                "another-loader",
                "get_train_dataloader returned a different loader than super().get_train_dataloader() of this run, but ε "
                "holds only for the sampling of that loader. Return super().get_train_dataloader() at each call, and change "
                "batches in data_collator instead.",
            )

    def bring_processes_together(self, model: nn.Module) -> None:
        """Compare the terms of several processes, and give all of them the weights of process 0."""
        if self._args.world_size > 1:
            compare_terms(self.statement, self._args, model, data=self._rounds.digest_of_data)
            broadcast_weights(model)

    @functools.cached_property
    def probe(self) -> Probe:
        """Return a few examples of the loader, for the checks before the first step."""
        assert self._loader is not None, "the run has a loader"
        return Probe(self._loader, checks_numbers=self._args.grad_sample_self_check)

    def attach(
        self, model: nn.Module, losses_of: Callable[[Any], Losses], *, rows_per_loss: int, sharding: Sharding
    ) -> None:
        """Attach the engine of per-sample gradients until the run is closed.

        Args:
            model: The model, on its device.
            losses_of: A function that calls the model with a micro-batch and returns one loss for each of its examples.
            rows_per_loss: As in `ClippedGradients`.
            sharding: The sharding of the model's weights.
        """
        args, statement = self._args, self.statement
        assert self._loader is not None, "the run has a loader"
        self._loader.learn_padding()
        lengths = self.sampler.lengths
        if lengths is not None and computes_in_bf16(model, self.mixed_precision):
            grid = grid_for(on_cpu=args.device.type == "cpu", pieces=args.gradient_accumulation_steps)
            self.pads_each_row_alone = self._loader.pad_each_row_alone(grid)
        base = without_adapters(model)
        if isinstance(base, PreTrainedModel):
            # A layer with a cache of its past would compute something different at each call.
            base.config.get_text_config().use_cache = args.use_cache
        # This micro-batch of weight 0 is for passes that only other processes need.
        self._dummy = MicroBatch(self.probe.collated([self.probe.longest]), size=1, weight=0.0)
        self._losses_of, self._sharding = losses_of, sharding
        engine = ClippedGradients(
            model,
            max_grad_norm=statement.per_sample_max_grad_norm,
            clipping=statement.clipping,
            granularity=statement.clipping_granularity,
            engine=args.grad_sample_engine,
            rows_per_loss=rows_per_loss,
        )
        self._resources.enter_context(engine)
        self._engine = engine
        self.sampler.is_reserved = True  # a callback that reads the loader would take away the batch of a step

    @property
    def engine(self) -> ClippedGradients:
        """The engine of per-sample gradients, from `attach` to the end of the run."""
        assert self._engine is not None, "the engine is attached"
        return self._engine

    def losses_of(self, inputs: Mapping[str, Any]) -> Tensor:
        """Call the attached model with a micro-batch, and return one loss for each of its examples."""
        return self._losses_of(inputs).values

    def weights_of(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the weights of the losses of a micro-batch, attached to their graph, or None if there are none."""
        values, _, weights = self._losses_of(inputs)
        return None if weights is None else weights.to(values) + 0.0 * values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        """Let parts of the model be called outside a training step, as some adapters do when they are saved."""
        return contextlib.nullcontext() if self._engine is None else self._engine.unwatched()

    @property
    def _home(self) -> str | Path:
        """The folder beside which the ledgers of earlier runs are: for a trial that of its search, not its own."""
        return self._args.output_dir if self._trial is None else self._trial.output_dir

    def begin(self, model: nn.Module, *, step: int) -> PrivacyLedger:
        """Open the ledger, or continue the earlier ledger from this step on. After a refusal the run has no ledger."""
        assert self.ledger is None, "a run begins once"
        # Every process must do this, since they may have to join the parts of a weight.
        lineage = Lineage(model, output_dir=self._home, continued=self.previous.ledger)
        ledger, affordable = self._opened(step=step, others=lineage.earlier)
        self.trained_model = TrainedModel(model, lineage, ledger=ledger, previous=self.previous.model, step=step)
        self.ledger, self.affordable, self.is_running = ledger, affordable, True
        return ledger

    def take_up(self, ledger: PrivacyLedger, model: nn.Module, *, words: Mapping[str, str], chosen_step: int | None) -> None:
        """Take up the ledger and the words of a run of the same plan that has ended, before its weights are loaded."""
        assert self.ledger is None, "a run begins once"
        if in_digits(ledger.statement) != in_digits(self.statement):
            raise Refusal(
                "other-plan",
                "This version of doppler_hf computes another plan from these arguments than the ledger has. Continue the "
                "run with the version that began it.",
            )
        lineage = Lineage(model, output_dir=self._home, continued=ledger)
        self.ledger, self.statement, self.words = ledger, ledger.statement, dict(words)
        self.chosen_step = chosen_step
        self.trained_model = TrainedModel(model, lineage, ledger=ledger, previous=None, step=0)

    def _opened(self, *, step: int, others: Trainings) -> tuple[PrivacyLedger, int]:
        """Return the ledger, and the number of steps that its budget allows.

        The ledger also records what `others`, runs with other ledgers, have spent on the weights.
        """
        statement, earlier = self.statement, self.previous.ledger
        others = {**others, **self._interrupted}
        # The statement, and so the account, must describe what sampler and mechanisms do.
        sampler, mechanism, loss = self.sampler, self.mechanism, self.private_loss
        assert (sampler.sample_rate, sampler.sampling) == (statement.sample_rate, statement.sampling)
        assert sampler.turns_of_round == statement.releases(statement.steps_planned).turns
        assert (sampler.groups, mechanism.shape) == (statement.groups, NoiseShape.parse(statement.noise_shape))
        assert (mechanism.noise_multiplier, mechanism.source) == (statement.noise_multiplier, statement.noise_source)
        assert mechanism.max_grad_norm == statement.per_sample_max_grad_norm
        of_loss = None if loss is None else (loss.mechanism.noise_multiplier, loss.mechanism.max_grad_norm)
        assert of_loss in (None, (statement.loss_noise_multiplier, statement.per_sample_max_loss))
        assert (loss is None) == (statement.loss_noise_multiplier is None)
        # Process 0 saves the ledger. From the name of its run, each process finds its own secret again.
        run_id = on_process_0(lambda: secrets.token_hex(8))
        if earlier is None:
            time = None if self._trial is None else NO_TIME
            ledger = PrivacyLedger.open(statement, earlier=others, run_id=run_id, time=time)
        else:
            ledger = earlier.resume(
                statement, from_step=step, continues_rounds=self._continues_rounds, earlier=others, run_id=run_id
            )
        remaining = max(0, statement.steps_planned - step)
        affordable = ledger.affordable_steps(min(remaining, ledger.runs[-1].steps_allowed))
        target = self._args.target_epsilon
        # Resuming a finished run spends nothing more, but its ledger must not claim a target that it has overrun.
        is_overrun = target is not None and ledger.private and ledger.epsilon() > target
        if (remaining > 0 and affordable == 0) or is_overrun:
            assert earlier is not None, "a new run is calibrated to its target"
            # The ledger of the refused run counts steps that will not be made, so the one before says what was spent.
            is_new_round = ledger.runs[-1].steps_allowed > 0 and not self._continues_rounds
            left_for = "" if remaining == 0 else "the new round that it would begin" if is_new_round else "a further step"
            raise budget_spent(earlier, self._args, now=statement, steps=remaining, left_for=left_for)
        if statement.private and statement.sampling == "allocation":
            self._rounds.secret_of(ledger).keep(self.sampler.secret, output_dir=self._args.output_dir)
        return ledger, affordable

    def settle(self) -> None:
        """Forget the secret of the earlier run's rounds, now that the ledger of this run is saved, on every process."""
        self._is_settled = True
        if self.previous.ledger is not None:
            self._rounds.secret_of(self.previous.ledger).forget()  # this run continues its rounds, or nobody can

    # --- in every step ------------------------------------------------------------------------------------------------

    def begin_epoch(self, *, step: int) -> None:
        """Tell the sampler the step of its next batch; a resumed run drops the batches before the checkpoint."""
        dropped = step % self.sampler.steps_per_epoch if step == self._first_step else 0
        self.sampler.begin_at(step - dropped)

    def draw(self, pieces: Iterator[Piece], *, number: int, step: int) -> list[Piece]:
        """Take the pieces of a step's batch and start their sum. Steps count from 0; a spent budget gives no pieces."""
        self._fill_generators()
        # When a finished run is resumed within an epoch, Transformers would make one more step before it stops.
        taken = list(itertools.islice(pieces, number if self.affordable > 0 else 0))
        self.start_batch(taken, step=step)
        return taken

    def _fill_generators(self) -> None:
        """Seed the global generators secretly, whatever has seeded them before."""
        self._fillings += 1
        fill_generators(self._args.noise_seed, rank=self._args.process_index, step=self._fillings)

    def start_batch(self, pieces: Sequence[Piece], *, step: int) -> None:
        """Start the sum of a batch's pieces. The sum of an unfinished batch is dropped, never released.

        `pieces` is empty when the loader is exhausted.
        """
        # Sensitivity: if a step used a part of another draw, an example could count twice.
        assert len(pieces) in (0, self.sampler.pieces), "a step takes all pieces of its batch"
        # Sensitivity: a unit takes part only in the turns of its group, and the noise of a turn covers the steps until the
        # next turn.
        other = next((piece.step for piece in pieces if piece.step != step), step)
        if other != step:
            raise Failure(
                "steps-out-of-order",
                f"The batch of step {other} was used in step {step}, so a record could take part more often than the ledger "
                "counts. Do not change the order of steps or the trainer's step counter, and start the run again with "
                "resume_from_checkpoint=True.",
            )
        passes = sum(map(len, pieces))
        self._pieces_left = len(pieces)
        self.num_rows = sum(micro_batch.size for piece in pieces for micro_batch in piece)
        self.num_empty_passes = self._sharding.most_passes(passes) - passes if self._sharding.is_asked_for else 0
        self.engine.reset()
        self.is_released = False
        if self.private_loss is not None:
            self.private_loss.reset()

    def reserve(self) -> PrivacyLedger | None:
        """Reserve further steps if all reserved steps are used up, and return the ledger if it must be saved now."""
        assert self.ledger is not None
        # Check this before a step is counted, since a callback may have frozen parameters.
        self.engine.refuse_other_parameters()
        self._may_compute = True
        return self.ledger if self.ledger.reserve(at_most=self.affordable) else None

    @property
    def is_complete(self) -> bool:
        """Whether all pieces of the batch were added. The run counts them, since callbacks may change accelerate's flag."""
        return self._pieces_left == 0

    def add_piece(self, piece: Sequence[MicroBatch]) -> Float[Tensor, " rows"]:
        """Clip the gradient of each example of the next piece, add it to the sum of the batch, and return the losses."""
        if self.is_complete:
            raise Refusal(
                "piece-added-twice",
                "Your training_step calls super().training_step more often than gradient_accumulation_steps allows for a "
                "batch. Call it once, or override compute_per_sample_loss instead.",
            )
        if not self._may_compute:  # Privacy: a step that is not reserved would not be counted
            raise callbacks_removed()
        self._pieces_left -= 1  # Count first, so that a piece that fails half-way is not added again.
        self._fill_generators()
        losses = [self._add_clipped(micro_batch) for micro_batch in piece]
        return torch.cat(losses) if losses else torch.zeros(0, device=self._args.device)

    def _add_clipped(self, micro_batch: MicroBatch) -> Float[Tensor, " rows"]:
        # Copy from pinned memory while the device computes. Transformers' own move would wait for the device.
        inputs = send_to_device(micro_batch.inputs, self._args.device, non_blocking=True)
        losses, is_cross_entropy, of_losses = self._losses_of(inputs)
        # Sensitivity: one row is clipped to C, or the mean of K rows. An example with more rows would contribute more.
        if len(losses) != micro_batch.size:
            # The message leaves out the numbers: the size of a draw is private, and messages end up in logs.
            raise Refusal(
                "other-number-of-losses",
                "Expected one loss per row of the micro-batch; compute_per_sample_loss returned "
                f"{'more' if len(losses) > micro_batch.size else 'fewer'}. Make the collator return one row per record, and "
                "compute_per_sample_loss one loss per row.",
            )
        size, shares = micro_batch.size // micro_batch.rows_each, None
        if micro_batch.weight != 1.0:
            # Sensitivity: in a lower precision, which may be torch's default, the shares of a unit could exceed 1 in sum.
            shares = torch.full((size,), micro_batch.weight, dtype=torch.float32, device=losses.device)
        weights = shares
        if of_losses is not None:
            # Sensitivity: each weight is between 0 and 1, so is their mean over rows that are clipped as one, and the
            # product with the share of a unit is at most that share.
            of_rows = of_losses.to(losses.dtype).nan_to_num(nan=0.0).clamp(0.0, 1.0).unflatten(0, (size, -1)).mean(dim=1)
            weights = of_rows if shares is None else shares * of_rows
        self.engine.backward(losses, weights=weights, views=micro_batch.rows_each, is_cross_entropy=is_cross_entropy)
        if self.private_loss is not None:
            self.private_loss.add(losses.detach().unflatten(0, (size, -1)).mean(dim=1), weights=shares)
        return losses.detach()

    def release(self, optimizer: DopplerOptimizer, *, step: int) -> Float[Tensor, ""] | None:
        """Turn the sum of the batch into the private gradient in `p.grad`, and return the private loss, if there is one."""
        for _ in range(
            self.num_empty_passes
        ):  # all processes gather the weights as often as the process with the most passes
            # Sensitivity: with weight 0, each term of a sum is 0·v of a finite v, or left out. So neither sums nor loss
            # change, and what is released is the same, in every bit, whether the pass is made or not.
            self._add_clipped(self._dummy)
        engine, mechanism = self.engine, self.mechanism
        # Sensitivity: the noise covers contributions of norm C, for the same C.
        assert engine.max_grad_norm == mechanism.max_grad_norm
        shards = {name: value for name, value in engine.parameters.items() if isinstance(value, DTensor)}
        private = mechanism.privatize(engine.sums, step=step, shards=shards)
        for name, gradient in private.items():
            parameter = engine.parameters[name]
            gradient = gradient.to(parameter.dtype)
            parameter.grad = in_shards(gradient, like=parameter) if name in shards else gradient
        optimizer.noise_std = mechanism.noise_std(step)
        self.is_released, self.num_non_finite = True, engine.num_non_finite
        self._may_compute = False  # Privacy: without the events that reserve and count steps, there is no other step
        engine.reset()
        return None if self.private_loss is None else self.private_loss.release(step=step)

    @property
    def reports_raw_loss(self) -> bool:
        """Whether the run shows the training loss without noise."""
        return self.statement.train_loss == "raw"

    def count_release(self) -> None:
        """Count one step as released, if its gradient comes from the mechanism."""
        if self.ledger is None or not self.is_released:
            raise Failure(
                "gradient-without-noise",
                "The gradient of this step does not come from DopplerTrainer.training_step, so it has no noise. Call "
                "super().training_step in your training_step, or override compute_per_sample_loss instead.",
            )
        # Read the number here, where Transformers reads the loss, so that nothing waits for the device within a step.
        if self.reports_raw_loss and not self._is_warned and self.num_non_finite:
            self._is_warned = True
            warnings.warn(
                "Some records have a gradient that is not finite, so they contribute nothing. Look for missing values (NaN) "
                "in the data, and for losses that overflow or divide by zero. This warning is not private: it appears only "
                "with report_train_loss='raw'.",
                stacklevel=2,
            )
        self.ledger.record_step()
        self.affordable -= 1
        if self.affordable <= 0:
            self.sampler.is_reserved = False

    # --- what was spent, and on which model ---------------------------------------------------------------------------

    def epsilon(self) -> float:
        """Return the ε of the whole plan, which holds wherever the run ends, or 0 before the first step."""
        return 0.0 if self.ledger is None else self.ledger.epsilon()

    def covers_weights_of(self, model: nn.Module) -> bool:
        """Return whether the ledger covers this model.

        It does if the run has finished with or saved this model, or is still running and nothing else has changed the model.
        """
        if self.ledger is None or self.trained_model is None:
            return False
        if self.is_running:
            return self.trained_model.only_trained_parts_changed(model)
        return is_known(model, self.ledger.models)

    def remember_between_saves(self, model: nn.Module, *, writes: bool) -> None:
        """Let later runs recognise the weights that the model has now, which a callback of the user may keep."""
        if self.ledger is not None and self.trained_model is not None:
            self.trained_model.remember_between_saves(model, self.ledger, writes=writes)

    def leave(self, model: nn.Module, *, speaks: bool, writes: bool, together: bool = True) -> bool:
        """Record the model as the run leaves it; see `TrainedModel.leave`."""
        if self.ledger is None or self.trained_model is None:
            return False
        return self.trained_model.leave(model, self.ledger, speaks=speaks, writes=writes, together=together)
