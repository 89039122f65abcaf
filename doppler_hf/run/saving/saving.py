"""Save and log for a `DopplerTrainer`: models and checkpoints with their ledger, a card, and ε in every log."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerControl

from doppler_hf.privacy.batching.micro_batches import PrivateLoader
from doppler_hf.privacy.ledger.file import WriterLock
from doppler_hf.privacy.ledger.terms import guarantee_in_words
from doppler_hf.privacy.ledger.weights import weight_files
from doppler_hf.run.digests import note_shards
from doppler_hf.run.interruptions import Terminated, raised_if_terminated
from doppler_hf.run.own_code import overrides
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes.sharded_states import whole_state, with_whole_states
from doppler_hf.run.processes.sharding import ShardedTrainer
from doppler_hf.run.reporting.logged_loss import only_local, pop_losses, show_beside_evaluations
from doppler_hf.run.resuming.checkpoints import step_of_checkpoint
from doppler_hf.run.saving.beside_model import has_part_of, ledger_of_weights_in, ledger_saved_with_model, write_card
from doppler_hf.run.saving.card_part import CARD_NAME
from doppler_hf.run.saving.json_state import writable_state
from doppler_hf.run.saving.renamed_weights import load_renamed
from doppler_hf.run.saving.training_curve import draw_training_curve


def to_safetensors_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state that safetensors accepts: contiguous values, and a copy of a tied weight for each of its names."""
    seen: set[int] = set()
    taken: dict[str, Any] = {}
    for name, value in state.items():
        is_tied = (place := value.untyped_storage().data_ptr()) in seen
        taken[name] = value.clone(memory_format=torch.contiguous_format) if is_tied else value.contiguous()
        seen.add(place)
    return taken


def with_privacy_section(inherited: Callable[..., None]) -> Callable[..., None]:
    """Return a trainer's `create_model_card`, whose card then begins with privacy and keeps what people have written."""

    def create_model_card(self: "SavingTrainer", *args: Any, **kwargs: Any) -> None:
        """Write a model card with what the run knows, and privacy first. Text added by hand to an earlier card stays."""
        card, history = Path(self.args.output_dir) / CARD_NAME, self.state.log_history
        is_ours = self.is_world_process_zero() and not self.args.disable_dp
        run = self._run if self._run is not None and self._run.covers_weights_of(self.model) else None
        # A trainer that has not trained the weights in the folder knows less of them than their ledger.
        there = ledger_of_weights_in(card.parent) if is_ours and run is None else None
        if there is not None and has_part_of(card, there):
            print(
                f"{card} was left as it is: it is the card of the run that trained the weights there, and this trainer has "
                "not trained them. Text that you add to it by hand stays."
            )
            return
        before = card.read_text("utf-8") if card.exists() else ""
        # Transformers writes a row of its table in the order of its own keys, and a checkpoint's are sorted.
        self.state.log_history = with_columns_in_one_order(history)
        try:
            with described_for_card(self.model):
                inherited(self, *args, **kwargs)
        finally:
            self.state.log_history = history
        if is_ours:
            write_card(card, run, self, before=before, ledger=there)

    return create_model_card


@contextlib.contextmanager
def described_for_card(model: nn.Module) -> Iterator[None]:
    """Give a module of the user's own, during the block, what Transformers takes each model to have when it writes a card.

    It reads the base's name from `config`. If the folder has the card of an adapter, such as that of a part of the module,
    it calls `create_or_update_model_card`.
    """
    described = {"config": None, "create_or_update_model_card": lambda folder: None}
    added = {name: value for name, value in described.items() if not hasattr(model, name)}
    vars(model).update(added)
    try:
        yield
    finally:
        for name in added:
            del vars(model)[name]


def with_columns_in_one_order(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a trainer's logs, those of evaluations with the same names in the same order; what one lacks is empty there."""
    names = dict.fromkeys(name for row in log_history if "eval_loss" in row for name in row)
    return [{name: row.get(name, "") for name in names} if "eval_loss" in row else row for row in log_history]


def complete_log(run: PrivateRun, logs: dict[str, float], *, model: nn.Module) -> None:
    """Add ε to a log (in place), and remove a loss that is not reported."""
    # For a model that the ledger does not cover, ε is unknown: the model may have been loaded.
    is_evaluation = any(name.startswith("eval_") for name in logs)
    if run.covers_weights_of(model) if is_evaluation else run.is_running:
        logs["epsilon"] = run.epsilon()
        if run.ledger is not None and run.ledger.earlier is not None:
            logs["epsilon_of_weights"] = logs["epsilon"] + run.ledger.earlier.epsilon
        if run.is_running and "train_runtime" not in logs:  # the plan counts as a whole, from its first step on
            logs["epsilon_planned"] = logs["epsilon"]
    if run.ledger is not None and run.ledger.statement.train_loss == "none":  # the logged losses are all 0
        pop_losses(logs)


class SavingTrainer(ShardedTrainer):
    """`Trainer` that saves a ledger with each model and nothing about sampling; `DopplerTrainer` sets its attributes."""

    optimizer: Any
    control: TrainerControl
    _run: PrivateRun | None
    _locks: dict[Path, WriterLock]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Transformers does, and save the ledger next to the model.

        If the trainer has no ledger that covers the model, it renames a ledger of other weights in the folder.
        """
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        # Transformers saves checkpoints with these arguments. It calls `on_save` only after it has pushed them.
        step = self.state.global_step if _internal_call and output_dir is not None else None
        is_first = self.args.process_index == 0  # only process 0 writes
        with contextlib.ExitStack() as saving:
            if self._run is not None:
                saving.enter_context(self._run.unwatched())
            if is_first:
                saving.enter_context(ledger_saved_with_model(folder, self, checkpoint_step=step))
            note_shards(self.model.parameters())  # all processes do this together
            if step is not None and is_first:  # an old checkpoint there must not count until it is replaced completely
                (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
            super().save_model(output_dir, _internal_call=_internal_call)

    def _lock_of(self, folder: str | Path) -> WriterLock:
        """Return the lock of a folder, always the same object, so that a run does not refuse its own saving."""
        return self._locks.setdefault(Path(folder).resolve(), WriterLock(folder))

    def draw_training_curve(self, run: PrivateRun) -> None:
        """Draw the training that has ended into the output folder, where matplotlib is installed."""
        if run.ledger is not None:
            guarantee = guarantee_in_words(run.ledger, epsilon=run.ledger.epsilon())
            run.has_picture = draw_training_curve(run.ledger, self, guarantee=guarantee)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # This is Transformers' only method that all processes call before process 0 saves.
        if self._sharding.is_cut:
            state_dict = whole_state(self.model)
        if state_dict is None and not isinstance(self.model, PreTrainedModel) and not hasattr(self.model, "peft_config"):
            state_dict = to_safetensors_state(self.model.state_dict())
        super()._save(output_dir, state_dict=state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # This is Transformers' only method around a whole checkpoint: optimizer, schedule and state have no public method.
        for callback in self.callback_handler.callbacks:  # a callback added on resume has no entry in the loaded state
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks.setdefault(type(callback).__name__, {})
        with contextlib.nullcontext() if self.args.disable_dp else writable_state(self):
            super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_renamed(resume_from_checkpoint):
            # Another library's trainer may load into its own model alone, and take no other.
            super()._load_from_checkpoint(resume_from_checkpoint, *(() if model is None else (model,)))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not self._load_renamed(best):
            super()._load_best_model()
        # If somebody has removed the checkpoint, Transformers keeps the last weights. And `best_global_step` may be the step
        # of a better evaluation at which nothing was saved.
        if self._run is not None and weight_files(Path(best)):
            self._run.chosen_step = step_of_checkpoint(best)

    def _load_renamed(self, folder: str) -> bool:
        """Load weights that `save_pretrained` wrote under older names, as for ViT, and return whether the names are older.

        Transformers reads these names only in `from_pretrained`. A resume would skip the weights that it does not find.
        `renamed_weights` reads them into any model.
        """
        model, is_in_parts = self.model, self.args.disable_dp and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if is_in_parts or not isinstance(model, PreTrainedModel) or model._hf_peft_config_loaded:
            return False
        written: set[str] = set()
        for path in Path(folder).glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                written.update(file.keys())
        if written <= model.state_dict().keys():
            return False
        load_renamed(model, folder)
        return True

    @contextlib.contextmanager
    def saved_if_interrupted(self) -> Iterator[None]:
        """Save a checkpoint if an error, Ctrl-C or SIGTERM ends the run, since its steps cost ε."""
        sharding = self._sharding
        sharding.termination.is_asked_for = False
        with raised_if_terminated(sharding.termination if sharding.is_cut else None):
            try:
                yield
                if sharding.is_cut:
                    sharding.most_passes(0)  # SIGTERM may have arrived since the last step began
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                # If there are several processes, only one may fail, and the others do not come here to save. Replicas are
                # equal, so process 0 saves alone. It cannot save sharded weights alone, but after SIGTERM all come here.
                if isinstance(error, Terminated) if sharding.is_cut else self.args.should_save:
                    self._save_what_is_done()
                raise

    def _save_what_is_done(self) -> None:
        """Save a checkpoint of the steps of this run, unless it was interrupted in the middle of an update."""
        run = self._run
        if run is None or run.ledger is None:
            return
        done = run.ledger.steps_run - run.ledger.runs[-1].steps_before
        # In the middle of an update, weights and states belong to two different steps.
        if 0 < done == self.state.global_step - run.previous.step:
            with contextlib.suppress(Exception):
                # If a callback has frozen or unfrozen a layer, no step was made with it, so that all weights are those of
                # the last step. The model can then be trained further, by this trainer too, once the callback is removed.
                run.engine.train_the_same_parameters()
                # A checkpoint that no ledger covers, such as after a callback has replaced a layer or filled a buffer, would
                # only hide an earlier one.
                if run.covers_weights_of(self.model):
                    run.engine.refuse_other_parameters()
                    self._save_checkpoint(self.model, None)

    def store_flos(self) -> None:
        """Add up operations without privacy only: a private run counts none, so process 0 can save a checkpoint alone."""
        if self.args.disable_dp:
            super().store_flos()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # Checkpoints look like those of a run without sharding, and can be resumed on any number of processes.
        with with_whole_states(self.optimizer.optimizer) if self._sharding.is_cut else contextlib.nullcontext():
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        # Two states of a generator tell how many numbers were drawn between them, and so the sizes and lengths of batches.
        if self.args.disable_dp:
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.args.disable_dp:
            super()._load_rng_state(checkpoint)

    def num_examples(self, dataloader: Any) -> int:
        """Count the units of a private run, since Transformers logs and saves this, and the rows of a unit are private."""
        if isinstance(dataloader, PrivateLoader):
            return self.privacy.sampler.num_units
        return super().num_examples(dataloader)

    create_model_card = with_privacy_section(Trainer.create_model_card)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as Transformers does, with ε, and without the training loss if it is not reported.

        A raw loss is removed from `logs`, which scripts save as metrics, and is only shown locally.
        """
        if self._run is not None:
            complete_log(self._run, logs, model=self.model)
        self._log_without_raw_loss(functools.partial(super().log, logs, start_time), logs)

    @contextlib.contextmanager
    def raw_loss_kept_from_own_log(self) -> Iterator[None]:
        """Keep a raw loss during the block from a `log` of the user's own, in a subclass or set on the trainer."""
        run = self._run
        if run is None or not run.reports_raw_loss or not overrides(self, "log"):
            yield
            return
        # Privacy: such a method may print, save or send what it gets, and it need not call `super().log`, which takes the
        # raw loss out of the metrics that scripts save. So the loss is taken out before the method is called.
        of_user, on_trainer = self.log, {name: value for name, value in vars(self).items() if name == "log"}

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            self._log_without_raw_loss(functools.partial(of_user, logs, *args, **kwargs), logs)

        self.log = log  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.__dict__.pop("log", None)
            self.__dict__.update(on_trainer)

    def _log_without_raw_loss(self, log: Callable[[], object], logs: dict[str, float]) -> None:
        """Call `log` with `logs` that lack a raw loss, and show the loss to callbacks on this machine alone."""
        run, handler = self._run, self.callback_handler
        # Privacy: the logs that Transformers keeps, saves and sends never hold a raw loss.
        losses = pop_losses(logs) if run is not None and run.is_running and run.reports_raw_loss else {}
        if not losses:
            log()
            return
        with only_local(handler, output_dir=self.args.output_dir) as local:
            log()
            handler.callbacks = local
            show_beside_evaluations(local, losses)
            public = dict(logs)
            logs.clear()
            logs.update(losses | public)  # the loss comes first, in the same object, which callbacks may change
            try:
                self.control = handler.on_log(self.args, self.state, self.control, logs)
            finally:
                pop_losses(logs)
