"""`DopplerTrainer`: Transformers' `Trainer` with an optimizer that sees only private gradients.

This is one training step from top to bottom, in `Trainer`'s own loop. `get_batch_samples` takes the random batch, which
`get_train_dataloader` has cut into `gradient_accumulation_steps` pieces, each a list of micro-batches. The callback
(`run.callback`) reserves the step in the ledger. `training_step` clips and sums each micro-batch's per-sample gradients, and
after the last piece it adds noise and puts the result into `p.grad`. This is the privacy boundary. The callback counts
the release. Transformers logs the norm of `p.grad`, calls `DopplerOptimizer.step`, schedules, evaluates
(`run.reporting.evaluation`) and saves (`run.saving.saving`).

The trainer holds the run (`run.private_run`), which owns everything private: sampler, engine, mechanism and ledger.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from transformers import DefaultDataCollator, Trainer, default_data_collator

from doppler_hf.deprecated import with_earlier_attributes
from doppler_hf.errors import NO_KTO, Refusal
from doppler_hf.preflight import order as preflight
from doppler_hf.preflight.user_errors import explain_gradients_in_a_loss, explain_removed_columns
from doppler_hf.privacy.batching.collators import Collator, collate_one_by_one, collate_uniform_columns, collate_without
from doppler_hf.privacy.ledger.file import WriterLock
from doppler_hf.privacy.loss_bounds import LossBound, default_bound
from doppler_hf.privacy.losses import Losses, as_losses, losses_of_class, without_adapters
from doppler_hf.run.callback import PrivacyCallback, end_run
from doppler_hf.run.digests import note_shards
from doppler_hf.run.optimizer import first_learning_rate, optimizer_of, terms_shown
from doppler_hf.run.own_code import overrides
from doppler_hf.run.planning.plan import Trial, planned_steps
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes.processes import on_process_0, process_end_explained
from doppler_hf.run.reporting.evaluation import EvaluatingTrainer
from doppler_hf.run.reporting.logged_loss import tensorboard_outside_output_dir
from doppler_hf.run.resuming.checkpoints import given_checkpoint, step_of_checkpoint, whole_checkpoint
from doppler_hf.run.resuming.earlier_ledgers import NOTHING, Previous, continued_ledger
from doppler_hf.run.saving.saving import SavingTrainer
from doppler_hf.run.search.interrupted_searches import interrupted_in
from doppler_hf.run.search.search import default_objective, search, trial_of
from doppler_hf.run.weights.trained_openly import noted_as_trained
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.arguments import allow_private_arguments, shown_with


@with_earlier_attributes
class DopplerTrainer(EvaluatingTrainer, SavingTrainer):
    """`Trainer` with differential privacy: the same arguments, loop, callbacks, checkpoints and hub methods.

    Sequence, image and token classification, causal, masked and seq2seq language models, question answering, multiple
    choice, semantic segmentation and CTC have a built-in per-sample loss. For another task, override
    `compute_per_sample_loss`. With `args.disable_dp` every method behaves as in `Trainer`, except that the gradient of
    several micro-batches is always that of one large batch: `Trainer` leaves out a division for models such as BERT. And
    `eval_loss` is always a mean over the evaluated rows or tokens: `Trainer` counts others, too, for models such as GPT-2.

    Args:
        model: As in `Trainer`. The arguments that are not listed here are those of `Trainer` too, in the same order.
        args: `DopplerTrainingArguments`.
        train_dataset: As in `Trainer`, but it must have a length.
        optimizers: Leave it out in a private run: `args` define the optimizer, and you may override `create_scheduler`.

    Raises:
        ValueError: If something would break the guarantee: an iterable training set, `compute_loss_func`, your own optimizer
            or a scheduler made for it, or a model with layers that mix records.

    Example:
        >>> trainer = DopplerTrainer(model=model, args=args, train_dataset=train, processing_class=tokenizer)
        >>> trainer.train()
    """

    args: DopplerTrainingArguments
    optimizer: Any
    lr_scheduler: Any
    model_wrapped: Any
    # The number of consecutive rows of the model's input that belong to one loss of `compute_per_sample_loss`.
    rows_per_loss = 1
    # The training set before a trainer of TRL has rewritten its rows.
    _train_dataset_as_given: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        preflight.check_class(cls, ours=DopplerTrainer)

    def __init__(
        self,
        model: Any = None,
        args: DopplerTrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *others: Any,
        **options: Any,
    ) -> None:
        preflight.check_class(type(self), ours=DopplerTrainer)  # A base class may have an __init_subclass__ of its own.
        if any(kind.__name__ == "KTOConfig" for kind in type(args).__mro__):
            raise Refusal("no-kto", NO_KTO)
        if not isinstance(args, DopplerTrainingArguments):
            raise Refusal(
                "not-our-arguments",
                f"args must be DopplerTrainingArguments; got {type(args).__name__}. Use that class, or a class that "
                "combines it with another, such as Seq2SeqTrainingArguments.",
            )
        self._was_disabled = args.disable_dp
        self._run: PrivateRun | None = None
        self._trial_of_search: Trial | None = None
        self._locks: dict[Path, WriterLock] = {}
        self._of_class: Losses | None = None
        self._ignore_keys: list[str] | None = None
        self.evaluations_of_training_data: list[dict[str, float]] = []
        preflight.check_before_trainer(args, model=model, train_dataset=train_dataset)
        with allow_private_arguments(args):
            if others:
                super().__init__(model, args, data_collator, train_dataset, *others, **options)
            else:
                # The arguments are passed by name, because the next class may be another library's trainer, whose arguments
                # have another order.
                options |= {"data_collator": data_collator, "train_dataset": train_dataset}
                super().__init__(model, args, **options)
        if not args.disable_dp:
            preflight.check_new_trainer(self)

    # Notebooks then show the arguments of Transformers' `__init__`.
    __init__.__wrapped__ = Trainer.__init__  # type: ignore[attr-defined]

    @property
    def privacy(self) -> PrivateRun:
        """The current private run, or the last one. Before the first call of `train`, the run that would begin.

        It has the run's `ledger`, `epsilon()`, and every number of the plan in `statement`.
        """
        if self.args.disable_dp:
            raise AttributeError("privacy: a run with disable_dp=True is not private")
        self._run = self._run or self._new_run()
        return self._run

    @property
    def _datasets_of_records(self) -> list[Any]:
        """The training set, and what it was made of where the trainer has rewritten its rows."""
        return [each for each in (self.train_dataset, self._train_dataset_as_given) if each is not None]

    def _new_run(self, *, previous: Previous = NOTHING) -> PrivateRun:
        preflight.check_before_run(self)
        num_trained = self.get_num_trainable_parameters()
        return PrivateRun(
            self.args, self.train_dataset, num_trained=num_trained, previous=previous, loss_bound=self._loss_bound(),
            mixed_precision=self.accelerator.mixed_precision, trial=self._trial_of_search,
            interrupted=interrupted_in(self.args.output_dir),
        )  # fmt: skip

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer` does. `resume_from_checkpoint=True`, or "true", skips incomplete checkpoints."""
        resume_from_checkpoint = given_checkpoint(resume_from_checkpoint)
        if not self.args.disable_dp:
            if not self._was_disabled:
                preflight.check_training(self)
            given = resume_from_checkpoint
            resume_from_checkpoint = on_process_0(lambda: whole_checkpoint(given, output_dir=self.args.output_dir))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _inner_training_loop(self, batch_size: int | None = None, **kwargs: Any) -> Any:
        # No other method of Transformers wraps the loop with the final model: `train` may still build it or load into it.
        checkpoint = kwargs.get("resume_from_checkpoint")
        preflight.check_beginning(self, checkpoint=checkpoint)
        if self.args.disable_dp:
            openly_on, is_resumed = self._datasets_of_records, checkpoint is not None
            with noted_as_trained(self.model, openly_on=openly_on, is_resumed=is_resumed):
                return super()._inner_training_loop(batch_size, **kwargs)
        self._ignore_keys = kwargs.get("ignore_keys_for_eval")
        # An earlier run's wrapped model, optimizer and schedule belong to its model and arguments, so Transformers rebuilds
        # them, as after `model_init`. An optimizer that the user has made since is not wrapped yet, and is kept.
        self.model_wrapped = self.model
        if isinstance(self.optimizer, AcceleratedOptimizer):
            self.optimizer = self.lr_scheduler = None
        self._prepare_model()
        note_shards(self.model.parameters())  # Other weights may have been loaded since FSDP cut the model.
        with contextlib.ExitStack() as running:
            running.enter_context(noted_as_trained(self.model, openly_on=()))
            on_process_0(lambda: running.enter_context(self._lock_of(self.args.output_dir)))
            run = running.enter_context(self._begun(checkpoint))
            running.enter_context(self._events_passed_to(run))
            if self.args.report_train_loss == "raw":
                callbacks = self.callback_handler.callbacks
                running.enter_context(tensorboard_outside_output_dir(callbacks, output_dir=self.args.output_dir))
            running.enter_context(self.raw_loss_kept_from_own_log())
            running.enter_context(shown_with(self.args, run.shown))
            running.enter_context(process_end_explained())
            running.enter_context(explain_removed_columns(self.args, self.train_dataset))
            running.enter_context(explain_gradients_in_a_loss())
            running.push(functools.partial(self._ended, run))
            running.enter_context(self.saved_if_interrupted())
            output = super()._inner_training_loop(batch_size, **kwargs)
        if self.is_world_process_zero():
            self.draw_training_curve(run)
        return output

    @contextlib.contextmanager
    def _begun(self, checkpoint: str | None) -> Iterator[PrivateRun]:
        """Plan a run and hold it. If it is refused, go back to the run before, whose ledger still counts."""
        before = self._run
        ledger, model = (None, None) if before is None else (before.ledger, before.trained_model)
        ledger = continued_ledger(ledger, checkpoint, folder=str(self.args.output_dir), model=self.model)
        # Plan again: the arguments may have changed since the last run, and what that run spent counts.
        run = self._run = self._new_run(previous=Previous(checkpoint, step_of_checkpoint(checkpoint), ledger, model))
        try:
            with run:
                yield run
        finally:
            if before is not None and before.ledger is not None and run.ledger is None:
                self._run = before

    def _ended(self, run: PrivateRun, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        end_run(run, self.args, self.state, model=self.model, error=error)

    @contextlib.contextmanager
    def _events_passed_to(self, run: PrivateRun) -> Iterator[None]:
        """Pass Transformers' events to the run in the block, after all other callbacks, since these may change things."""
        handler = self.callback_handler
        callback = self._privacy_callback = PrivacyCallback(
            run, trainer=self, check_begun=functools.partial(preflight.check_begun, self),
            check_callbacks=functools.partial(preflight.check_callbacks, self),
        )  # fmt: skip
        handler.add_callback(callback)
        try:
            yield
        finally:
            handler.callbacks = [each for each in handler.callbacks if each is not callback]

    def set_initial_training_values(self, args: DopplerTrainingArguments, dataloader: DataLoader[Any]) -> Any:
        """Let Transformers count its steps, compare them with the plan, and attach the engine to the model."""
        values = super().set_initial_training_values(args, dataloader)
        if not args.disable_dp:
            run = self.privacy
            preflight.check_loader(run, dataloader)
            theirs = planned_steps(args, run.sampler)
            assert values[-1] == theirs, "Transformers plans a different number of steps than was accounted for"
            # The plan may have a few steps less: it leaves out final steps in which only some groups would take part.
            values = (*values[:-1], run.statement.steps_planned)
            preflight.check_before_engine(run, self)
            run.attach(self.model, self._losses, rows_per_loss=self.rows_per_loss, sharding=self._sharding)
            preflight.check_with_engine(run, self)
        return values

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # This is Transformers' last method before callbacks open the ledger: model, optimizer and schedule are final.
        prepared = super()._prepare_for_training(*args, **kwargs)
        if not self.args.disable_dp:
            preflight.check_before_first_step(self.privacy, self)
            self._privacy_callback.note_checked_code()
            self.callback_handler.train_dataloader = self.privacy.other_batches()
        return prepared

    # --- left of the privacy boundary ---------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return a loader of random batches, each as `gradient_accumulation_steps` lists of micro-batches.

        While a run reserves these batches for its steps, it returns ordinary batches of other rows to look at.
        """
        if self.args.disable_dp or self.train_dataset is None:
            return super().get_train_dataloader()
        if self._run is not None and (self._run.is_running or self._run.sampler.is_reserved):
            return self._run.other_batches()
        dataset, collator = self.train_dataset, self._training_collator()
        # These are the first two helpers that Transformers' `_get_dataloader` calls.
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        preflight.check_data(self.privacy, self, dataset=dataset, collator=collator)
        return self.privacy.loader(dataset, collator, model=self.model)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Remove what the model does not take, and the column of users, which no model takes, of every data set."""
        column = self.args.privacy_unit_column
        if column is not None and column in (dataset.column_names or ()):
            dataset = dataset.remove_columns(column)
        if not self.args.disable_dp and self.args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            preflight.check_columns(self, dataset, taken=self._signature_columns, description=description)
        return super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """Return a collator of rows that still have the columns that `_remove_unused_columns` takes from tables."""
        collator = super()._get_collator_with_removed_columns(data_collator, description)
        column = self.args.privacy_unit_column
        return collator if column is None else functools.partial(collate_without, collator=collator, column=column)

    def _training_collator(self) -> Collator:
        collator = inner = self.data_collator
        while isinstance(inner, functools.partial):
            inner = inner.func
        if inner is default_data_collator or type(inner) is DefaultDataCollator:
            return functools.partial(collate_one_by_one, collator=collator)
        # Collators derived from Transformers' ones, and torch's, take the columns of the first row for those of all rows.
        by_first = any(kind.__module__ == default_data_collator.__module__ for kind in type(inner).__mro__)
        by_first |= inner is default_collate
        return functools.partial(collate_uniform_columns, collator=collator) if by_first else collator

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the pieces of one batch, and no count of tokens, since no loss may be scaled by it."""
        if not self._goes_on_privately():
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        run = self.privacy
        self._privacy_callback.refuse_changed_code()
        # A callback may have changed the arguments since Transformers computed `num_batches` from them.
        return run.draw(epoch_iterator, number=run.sampler.pieces, step=self.state.global_step), None

    def _goes_on_privately(self) -> bool:
        """Return whether a run is private, after undoing what callbacks that were added during it may have changed."""
        if self._run is not None and self._run.is_running:
            self._run.terms.keep(self.args)
            self._privacy_callback.stay_last()
        return not self.args.disable_dp

    def compute_per_sample_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Float[Tensor, " batch"]:
        """Return one loss per record. Override it for a task without a rule in `privacy.losses`.

        Each loss must depend only on its own record: take no mean over the batch or over the batch's tokens. Call `model`
        once, with the whole micro-batch. If each record has several consecutive rows of input, set `rows_per_loss`. Pad text
        on the right: padding on the left shifts absolute positions by an amount that depends on the other records.

        Args:
            model: The model, in training mode.
            inputs: One collated micro-batch, on the model's device.

        Returns:
            Losses, shape (batch,), attached to the graph. Or a pair (losses, weights), where the weights, shape (batch,),
            are from 0 to 1 and multiply the *clipped* gradients. With clipping="automatic" a factor in the loss has no
            effect.

        Raises:
            ValueError: If there is no rule for the model's class.
        """
        self._of_class = losses_of_class(model, inputs, base_model=without_adapters(self.model))
        return self._of_class.values

    def _losses(self, inputs: Any) -> Losses:
        # Sensitivity: the checks, too, look at what a user's `_prepare_inputs` makes of a batch.
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            losses = as_losses(self.compute_per_sample_loss(self.model, inputs))
        of_class, self._of_class = self._of_class, None
        # Go by the tensor and not by the trainer's class: code of the user's own may return the built-in losses unchanged.
        if of_class is None or of_class.values is not losses.values:
            return losses
        return losses._replace(is_cross_entropy=of_class.is_cross_entropy)

    @property
    def has_own_loss(self) -> bool:
        """Whether code other than the rule for the model's class computes the losses; it may use labels differently."""
        is_inherited = type(self).compute_per_sample_loss is DopplerTrainer.compute_per_sample_loss
        return not is_inherited or overrides(self, "compute_per_sample_loss")

    def _loss_bound(self) -> LossBound:
        return default_bound(without_adapters(self.model), has_own_loss=self.has_own_loss)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Float[Tensor, ""]:
        """Add a list of micro-batches to the step. After the last list of a batch, put the private gradient into `p.grad`.

        Returns:
            With report_train_loss="raw", the list's share of the step's mean loss, as in `Trainer`. Otherwise the private
            mean loss of the step for the last list, if the run has one, and else 0.
        """
        if not self._goes_on_privately():
            self.note_who_divides(model, inputs, num_items_in_batch)
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        run = self.privacy
        losses = run.add_piece(inputs)
        private_loss: Tensor | None = None
        if run.is_complete:  # Accelerate has wrapped the optimizer by now.
            private_loss = run.release(self.optimizer.optimizer, step=self.state.global_step)
        if len(losses) and run.reports_raw_loss:
            # Lists have different numbers of rows, so each has its share of the batch's mean.
            return losses.float().sum() / max(1, run.num_rows)
        return torch.zeros((), device=self.args.device) if private_loss is None else private_loss

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as Transformers does, and warn if `eval_dataset` has rows of the training set."""
        is_single = eval_dataset is not None and not isinstance(eval_dataset, dict | str)
        # If eval_dataset is a dictionary, Transformers calls this method with each set.
        if not self.args.disable_dp and is_single:
            preflight.check_before_evaluation(self, eval_dataset, name="eval_dataset")
        return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as Transformers does, and warn if `test_dataset` has rows of the training set."""
        if not self.args.disable_dp:
            preflight.check_before_evaluation(self, test_dataset, name="test_dataset")
        return super().predict(test_dataset, *args, **kwargs)

    # --- right of the privacy boundary --------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the `DopplerOptimizer` of `args`: Transformers' weight-decay groups, filter, base optimizer and GaLore."""
        if self.args.disable_dp:
            return super().create_optimizer(model)
        run = self.privacy
        trained = self.model if model is None else model
        if self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(trained))
            self.optimizer = optimizer_of(self.args, trained, run=run, decayed=decayed)
        preflight.check_optimizer(self.optimizer)
        self.optimizer.noise_std = run.settled_noise_std
        made = f"DopplerOptimizer ({self.args.base_optimizer})"
        run.shown.update(terms_shown(run, self.optimizer), learning_rate=first_learning_rate(self.optimizer), optim=made)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        # This is Transformers' only method that scales `p.grad`. The private gradient keeps the scale of its noise, whatever
        # `max_grad_norm` a callback has set since. Only its norm is logged.
        return super()._clip_grad_norm(model) if self.args.disable_dp else self._get_grad_norm(model)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count nothing in a private run: Transformers' count depends on the lengths of sampled records, and is saved."""
        return super().floating_point_ops(inputs) if self.args.disable_dp else 0

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Leave out the callback by which sentence-transformers' trainer writes its model card, unless `disable_dp` is set.

        # Privacy: that card shows records of the training set, and statistics of them without noise.
        """
        if self.args.disable_dp:
            super().add_model_card_callback(default_args_dict)

    def hyperparameter_search(
        self,
        hp_space: Any = None,
        compute_objective: Any = None,
        n_trials: float = 20,
        direction: Any = "minimize",
        backend: Any = None,
        hp_name: Any = None,
        resume_from_checkpoint: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Search for settings, and save the model of the best trial into `output_dir`; `target_epsilon` covers all trials.

        The number of trials is random and stays secret, and `n_trials` is its expected value. `hp_space` gets an object with
        `suggest_float`, `suggest_int` and `suggest_categorical`, which draw at random, and returns the arguments that a
        trial gets. Trials are compared by their metrics on `eval_dataset`, which has to be other people's data.

        A search that was interrupted in this `output_dir` continues, if it was called with the same arguments. With
        `resume_from_checkpoint=False` another search begins, and the ε of both add up; with True there has to be one.

        Returns:
            Transformers' `BestRun`. The trainer then has the best model.

        Raises:
            ValueError: If the call, or settings that `hp_space` draws, would break the guarantee. No ε is spent then.
        """
        others = kwargs | {"backend": backend, "hp_name": hp_name}
        if self.args.disable_dp and resume_from_checkpoint is not None:
            others["resume_from_checkpoint"] = resume_from_checkpoint
        terms = {"hp_space": hp_space, "direction": direction}
        if self.args.disable_dp:
            return super().hyperparameter_search(compute_objective=compute_objective, n_trials=n_trials, **terms, **others)
        objective = compute_objective or functools.partial(default_objective, direction=direction)
        preflight.check_search(self, **terms, n_trials=n_trials, others=others)
        before, self._run = self._run, None
        try:
            preflight.check_objective(self, objective)
            self.get_train_dataloader()  # checks the data
            plan = self.privacy
        finally:
            self._run = before
        trial = trial_of(self, plan.statement, n_trials=n_trials)
        preflight.check_trials(self, hp_space=hp_space, plan=plan.statement, trial=trial)
        for note in plan.notes:
            print(f"{'warning':<14} {note}")
        return search(self, compute_objective=objective, trial=trial, plan=plan, resume=resume_from_checkpoint, **terms)
