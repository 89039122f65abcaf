"""One private training, whose parts are opened and closed together.

The accountant reads the sample rate off the sampler that draws, and the optimizer the size of the noise off the mechanism
that adds it. A `DopplerTrainer` makes a new run each time it trains.
"""

import contextlib
import functools
import secrets
import warnings
from typing import Any, Self, final

import torch
from torch import nn
from transformers import PreTrainedModel

from doppler_hf.filters import NoiseShape
from doppler_hf.privacy import AllocationSampler, ClippedGradients, PrivacyLedger
from doppler_hf.privacy.accounting.accounting import Trainings
from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.privacy.batching.columns import lengths_of, units_of
from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.privacy.batching.micro_batches import Cut, MicroBatch, PrivateLoader
from doppler_hf.privacy.batching.probe import Probe
from doppler_hf.privacy.batching.sampling import digest_of_data
from doppler_hf.privacy.loss_bounds import LossBound
from doppler_hf.privacy.losses import has_one_label, without_adapters
from doppler_hf.privacy.randomness import fill_in_worker, filled_generators
from doppler_hf.run.checks.examples import check_examples
from doppler_hf.run.checks.loss import TrainedLoss
from doppler_hf.run.checks.model import refuse_model
from doppler_hf.run.filter_and_noise import chosen_noise_shape
from doppler_hf.run.plan import NOTHING, Earlier, budget_spent, mechanisms_of, planned_statement
from doppler_hf.run.processes import (
    compare_terms,
    give_all_the_weights_of_process_0,
    on_all_processes,
    on_process_0,
    refuse_processes_that_draw_alone,
)
from doppler_hf.run.round_secrets import RoundSecret
from doppler_hf.run.sharding import Sharding
from doppler_hf.run.steps import Steps
from doppler_hf.training_args import DopplerTrainingArguments


@final
class PrivateRun:
    """Statement, sampler, mechanism, engine and ledger of one private training.

    In the order of use: make the `loader`, `attach` the engine to the model, `begin` the ledger. Call `begin_epoch` in every
    epoch, and in every step what is in `steps`. A `with` statement around it all detaches the engine and ends the mechanism.

    Attributes:
        statement: Every public number of the run, as in its ledger.
        steps: What the run does in every step; None before `attach`, and after the run.
        ledger: The record of what was spent; None before `begin`.
    """

    def __init__(
        self,
        args: DopplerTrainingArguments,
        train_dataset: Any,
        *,
        num_trained: int,
        earlier: Earlier = NOTHING,
        loss_bound: LossBound | None = None,
    ) -> None:
        self.loss_bound = loss_bound or LossBound.guessed()
        self._args, self.train_dataset, self.earlier = args, train_dataset, earlier
        self._resources = contextlib.ExitStack()
        self.steps: Steps | None = None
        self._loader: PrivateLoader | None = None
        self._first_step = earlier.step
        column = args.privacy_unit_column
        self.sampler = AllocationSampler(
            num_examples=len(train_dataset),
            expected_batch_size=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            micro_batches=args.gradient_accumulation_steps,
            # All views of an example are rows of one micro-batch, whose rows are limited.
            micro_batch_size=max(1, args.per_device_train_batch_size // args.augmentation_multiplicity),
            rank=args.process_index,
            world_size=args.world_size,
            lengths=lengths_of(train_dataset),
            units=None if column is None else units_of(train_dataset, column=column),
            max_examples_per_unit=args.max_examples_per_unit,
            keeps_units_whole=args.clip_unit_mean,
            sampling=args.sampling,
            # Rounds that can be reproduced go on where the training stopped; for secret ones see `_take_up_rounds`.
            first_step=self._first_step if args.noise_seed is None else 0,
            seed=args.noise_seed,
        )
        resumed = None if earlier.checkpoint is None or earlier.ledger is None else earlier.ledger.statement
        shape = chosen_noise_shape(args, sampler=self.sampler, num_trained=num_trained, resumed=resumed)
        # Shaped noise protects a unit that takes part at most once in so many steps.
        self.sampler.take_turns(shape.bands)
        self.statement = planned_statement(
            args, sampler=self.sampler, noise_shape=shape, earlier=earlier, default_max_loss=self.loss_bound.value
        )
        self.mechanism, self.private_loss = mechanisms_of(args, self.statement, shape=shape, first_step=self._first_step)
        self._continues_rounds = self._take_up_rounds()
        self.ledger: PrivacyLedger | None = None

    def _take_up_rounds(self) -> bool:
        """Go on with the rounds of the earlier run, if all processes know their turns, and return whether they do."""
        earlier = self.earlier.ledger
        # A step of Poisson sampling is a round of its own, with coins of its own.
        if self.sampler.sampling == "poisson" or earlier is None:
            return False
        allowed_to = functools.partial(earlier.steps_allowed_to, self.statement, from_step=self._first_step)
        if not allowed_to(keeps_rounds=True):
            return False
        kept = self._round_secret(earlier)
        is_of_other_data = kept.is_of_other_data()
        if is_of_other_data:
            warnings.warn(
                "train_dataset has other rows than before, or another order, so that its round begins anew and costs ε. "
                "Resume with the same data, and give shuffle() and splits a seed.",
                stacklevel=2,
            )
        secret = kept.secret()
        if not on_all_processes(secret is not None):
            # After a clean end between two rounds a new one is what would have followed anyway.
            costs = not (earlier.runs[-1].is_closed and allowed_to(keeps_rounds=False))
            if self.statement.private and costs and not is_of_other_data:
                warnings.warn(
                    f"The earlier run's round begins anew and costs ε: its secret is not in {kept.path.parent}. Resume each "
                    "checkpoint once, where it was written.",
                    stacklevel=2,
                )
            return False
        assert secret is not None
        # Sensitivity: from the first turn that was not counted, so that none is taken twice, whatever steps are made again.
        self.sampler.go_on(secret, first_step=self._first_step - earlier.steps_of_rounds)
        return True

    def _round_secret(self, ledger: PrivacyLedger) -> RoundSecret:
        return RoundSecret(ledger.run_id, self._args.process_index, self._args.world_size, self._digest_of_data)

    @functools.cached_property
    def _digest_of_data(self) -> DataDigest:
        # Privacy: rows may be made with random numbers, which must not come from a public seed, nor move those of the user.
        with filled_generators(self._args.noise_seed, rank=self._args.process_index):
            return digest_of_data(self.train_dataset, self.sampler)

    def __enter__(self) -> Self:
        # After the initialization, which the user's seed fixes; before anything random touches an example.
        self._resources.enter_context(filled_generators(self._args.noise_seed, rank=self._args.process_index))
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()
        steps, self.steps = self.steps, None
        if self.ledger is not None and steps is not None and steps.affordable <= 0:
            self._round_secret(self.ledger).forget()

    # --- before the first step ----------------------------------------------------------------------------------------

    def loader(self, dataset: Any, collator: Collator) -> PrivateLoader:
        """Return a loader of this run's draws; see `PrivateLoader`."""
        args = self._args
        self._loader = PrivateLoader(
            dataset,
            sampler=self.sampler,
            collator=collator,
            cut=Cut(
                args.per_device_train_batch_size, args.max_tokens_per_micro_batch, self.statement.augmentation_multiplicity
            ),
            worker_init_fn=functools.partial(fill_in_worker, seed=args.noise_seed, rank=args.process_index),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        return self._loader

    def attach(self, model: nn.Module, loss: TrainedLoss, *, loader: Any, sharding: Sharding) -> None:
        """Attach the engine of per-sample gradients until the run is closed, and check it on examples of the loader."""
        args, statement = self._args, self.statement
        if self._loader is None or loader is not self._loader:
            raise ValueError(
                "get_train_dataloader must return the loader of this run, whose sampler is accounted for, got another one. "
                "Return super().get_train_dataloader(), made anew for each training, and change batches in data_collator."
            )
        refuse_processes_that_draw_alone(args.world_size)
        if args.world_size > 1:
            compare_terms(statement, args, model, data=self._digest_of_data)
            give_all_the_weights_of_process_0(model)
        probe = Probe(loader, checks_numbers=args.grad_sample_self_check)
        if not loss.is_own:
            probe.refuse_ignored_labels()
        refuse_model(model, args, probe)
        base = without_adapters(model)
        if isinstance(base, PreTrainedModel):
            # A layer that keeps its past in a cache computes something else at each call.
            base.config.get_text_config().use_cache = args.use_cache
        dummy = MicroBatch(probe.collated([probe.longest]), size=1, weight=0.0)
        clipped = ClippedGradients(
            model,
            max_grad_norm=statement.per_sample_max_grad_norm,
            clipping=statement.clipping,
            granularity=statement.clipping_granularity,
            engine=args.grad_sample_engine,
            rows_per_loss=loss.rows_each,
        )
        self._resources.enter_context(clipped)
        self.steps = Steps(
            args=args,
            sampler=self.sampler,
            clipped=clipped,
            loss=loss,
            has_odds=has_one_label(base, dummy.inputs.get("labels")),
            mechanism=self.mechanism,
            private_loss=self.private_loss,
            sharding=sharding,
            dummy=dummy,
            reports_raw_loss=statement.train_loss == "raw",
        )
        check_examples(clipped, model, loss, probe, args)

    def unwatched(self) -> contextlib.AbstractContextManager[None]:
        """Let parts of the model be called outside a training step, as some adapters ask for when they are saved."""
        return contextlib.nullcontext() if self.steps is None else self.steps.clipped.unwatched()

    @property
    def settled_noise_std(self) -> float:
        """The noise per coordinate of the mean gradient in the last step; of shaped noise that of the first ones is less."""
        return self.mechanism.noise_std(max(self._first_step, self.statement.steps_planned))

    def begin(self, *, step: int, others: Trainings | None = None) -> PrivacyLedger:
        """Open the ledger, or continue the earlier one from this step on, and let `steps` count in it.

        The ledger also records what `others`, trainings under other ledgers, have spent on the weights. A refusal leaves the
        run without one.
        """
        assert self.ledger is None, "a run begins once"
        assert self.steps is not None, "a run begins once its engine is attached"
        statement, earlier = self.statement, self.earlier.ledger
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
        # The ledger that is saved is that of process 0. By the name of its run each process finds its own secret again.
        run_id = on_process_0(lambda: secrets.token_hex(8))
        if earlier is None:
            ledger = PrivacyLedger.open(statement, earlier=others, run_id=run_id)
        else:
            ledger = earlier.resume(
                statement, from_step=step, continues_rounds=self._continues_rounds, earlier=others, run_id=run_id
            )
        remaining = max(0, statement.steps_planned - step)
        affordable = ledger.affordable_steps(min(remaining, ledger.runs[-1].steps_allowed))
        target = self._args.target_epsilon
        # A finished run that is resumed spends nothing more, but its ledger would speak for a target that it has overrun.
        is_overrun = target is not None and ledger.private and ledger.epsilon() > target
        if (remaining > 0 and affordable == 0) or is_overrun:
            raise budget_spent(ledger.epsilon(), self._args)
        if statement.private and statement.sampling == "allocation":
            self._round_secret(ledger).keep(self.sampler.secret)
        if earlier is not None:
            self._round_secret(earlier).forget()  # whose rounds this run goes on with, or nobody can
        self.ledger = self.steps.ledger = ledger
        self.steps.affordable = affordable
        return ledger

    def begin_epoch(self, *, step: int) -> None:
        """Tell the sampler at which step its next draw is; a resumed run drops those before the checkpoint."""
        dropped = step % self.sampler.steps_per_epoch if step == self._first_step else 0
        self.sampler.begin_at(step - dropped)
