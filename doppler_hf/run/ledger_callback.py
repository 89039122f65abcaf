"""The callback for a run's ledger: a summary before training, ε during it, and the ledger with every checkpoint and model.

It also guards the budget: steps are counted in the ledger before they are computed, and the run stops before a step that
would exceed the target. A ledger speaks for the model that its training has left or saved: for others nothing is
claimed, and who trains on from these in its folder continues it. Only process 0 reads and writes ledgers, and only one run
at a time writes that of a folder.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.file import WriterLock
from doppler_hf.privacy.ledger.ledger import latest, set_aside
from doppler_hf.privacy.ledger.record import ModelDigests
from doppler_hf.privacy.ledger.terms import earlier_in_words
from doppler_hf.privacy.ledger.weights import hashes, stamps
from doppler_hf.run.digests import digests_of, is_known, note_shards, untrained_digest
from doppler_hf.run.earlier_ledgers import ledgers_of, ledgers_of_model
from doppler_hf.run.learning_rate import told_of_another_rate
from doppler_hf.run.lineage import Lineage, adapters_trained_by_others
from doppler_hf.run.logged_loss import BoundWatch, forget_losses, take_losses
from doppler_hf.run.model_card import CARD_NAME, HEADING, complete_card, renew_section
from doppler_hf.run.optimizer import first_learning_rate, learning_rate_in_words
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.processes import COMPARED_EVERY, on_process_0, refuse_different_replicas
from doppler_hf.run.steps import Steps
from doppler_hf.run.summary import print_end, print_if_not_learnt, print_interruption, print_start
from doppler_hf.training_args import DopplerTrainingArguments


class PrivacyCallback(TrainerCallback):
    """Keeps the ledger of a run, prints its summary, and stops it at the end of its budget."""

    def __init__(self) -> None:
        self.run: PrivateRun | None = None  # the current one, which the trainer sets
        self._locks: dict[Path, WriterLock] = {}
        self._words: dict[str, str] = {}
        self.ledger: PrivacyLedger | None = None
        self._is_running = False
        self._untrained: str | None = None
        self._trained: weakref.ref[nn.Module] | None = None
        self._lineage: Lineage | None = None  # of the current run, or the last one
        self._left: ModelDigests | None = None  # of the model when that run, or its user, last left it
        self._bound_watch: BoundWatch | None = None  # of a private training loss
        self.seen_by: Sequence[TrainerCallback] = ()  # all callbacks of the trainer, which sets them

    @property
    def steps(self) -> Steps:
        """What the current run does in every step."""
        assert self.run is not None, "a run begins before its steps"
        assert self.run.steps is not None, "and its engine is attached"
        return self.run.steps

    def epsilon(self) -> float:
        """Return the ε that holds for what was trained, wherever it ends: that of the plan. 0 before the first step."""
        return 0.0 if self.ledger is None else self.ledger.epsilon()

    def speaks_for(self, model: nn.Module) -> bool:
        """Return whether the training has left or saved this model, or goes on and has touched what it trains alone."""
        if self._is_running:
            # Privacy: the mechanism changes what is trained. What else changed, such as a buffer that a callback has filled
            # with class means, no noise covers.
            return untrained_digest(model) == self._untrained
        return self.ledger is not None and is_known(model, self.ledger.models)

    def earlier_ledger(self, checkpoint: str | None, *, folder: str, model: nn.Module) -> PrivacyLedger | None:
        """Return the ledger that the next run continues, the same on every process, or None."""

        def read() -> PrivacyLedger | None:
            # A second run of the same trainer continues the ledger of the first one, whether resumed or not.
            earlier = [self.ledger.as_written()] if self.ledger is not None else []
            if checkpoint is not None:
                earlier += ledgers_of(Path(checkpoint))
            if not earlier:
                earlier = ledgers_of_model(Path(folder), model)
            return latest(earlier) if earlier else None

        return on_process_0(read)

    def on_train_begin(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Open the ledger, or continue that of an earlier run, and print the summary."""
        run, step = self.run, state.global_step
        assert run is not None
        # Transformers has wrapped the optimizer by now (accelerate's AcceleratedOptimizer).
        optimizer = kwargs["optimizer"].optimizer
        # On every process: they may have to put the weights of a layer together. And first, as it may refuse.
        is_given = first_learning_rate(optimizer) == args.given_learning_rate
        rate_note = told_of_another_rate(args, run.statement, model=kwargs["model"]) if is_given else ""
        lineage = Lineage(kwargs["model"], output_dir=args.output_dir, continued=run.earlier.ledger)
        ledger = run.begin(step=step, others=lineage.earlier)
        chosen = " (auto)" if args.low_pass_filter == "auto" else ""
        self._words = {
            "rate": learning_rate_in_words(args, optimizer),
            "filter": f"{optimizer.low_pass_filter}{chosen}",
        }
        args.note_learning_rate(first_learning_rate(optimizer))  # a checkpoint's is its own
        # Assigned only once the run has begun: a refusal must not lose the earlier ledger.
        self.ledger = ledger
        self._is_running = True
        # Privacy: weights that something else has trained, and buffers that it has filled, since the training before are no
        # part of what this one begins with. A checkpoint's weights are compared with its ledger, and a new model has none.
        digests = digests_of(kwargs["model"])
        is_trained = any(digests.parameters == known.parameters for known in ledger.models)
        is_same = self._trained is not None and self._trained() is kwargs["model"] and step == 0 and ledger.steps_run > 0
        is_changed = (is_trained or is_same) and not is_known(kwargs["model"], ledger.models)
        self._untrained = None if is_changed else untrained_digest(kwargs["model"])
        self._trained, self._lineage, self._left = weakref.ref(kwargs["model"]), lineage, None
        self._bound_watch = BoundWatch(run.statement, step=step) if run.statement.train_loss == "private" else None
        # Privacy: the logs of a checkpoint of an earlier version hold what was raw then.
        if any(each.statement.train_loss == "raw" for each in ledger.runs):
            forget_losses(state.log_history)
        if state.is_world_process_zero:
            aside = set_aside(args.output_dir, unless=lambda there: there.is_prefix_of(ledger))
            ledger.save(args.output_dir)
            counted = ledger.runs[-1].steps_before
            remaining = run.statement.steps_planned - step
            add_up = "If it used the same data, its ε and that of this run add up."
            unknown = [] if ledger.earlier or counted else adapters_trained_by_others(kwargs["model"])
            notes = {
                rate_note: rate_note,
                f"The adapter {', '.join(unknown)} was already trained (its B is not zero), and no ledger on this machine "
                "speaks for it. If it was trained on the same data, its ε adds to that of this run.": unknown,
                f"The ledger of an earlier training in {args.output_dir} is now {aside and aside.name}. {add_up}": aside,
                f"The ledger of the model's earlier training is continued: its {counted} steps count. For other data, make "
                "a new trainer with another output_dir.": step == 0 and counted,
                earlier_in_words(ledger): ledger.earlier,
                "The run before had ended, and results may have led to this one. It is a plan of its own: its ε is added.": (
                    ledger.is_repeated and remaining > 0
                ),
                f"All {step} steps are done, and none is trained. To go on set a larger max_steps or num_train_epochs"
                + ("." if args.target_epsilon is None else ", and a larger target_epsilon."): remaining <= 0,
                f"The budget allows {self.steps.affordable} of the {remaining} steps left, since earlier ones count. "
                "Training will stop there.": self.steps.affordable < remaining,
            }
            print_start(
                run,
                args,
                model=kwargs["model"],
                words=self._words,
                notes=[note for note, is_due in notes.items() if is_due],
                callbacks=self.seen_by,
            )

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Tell the sampler at which step its next draw is."""
        assert self.run is not None
        self.run.begin_epoch(step=state.global_step)

    def on_step_begin(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Reserve steps, on disk before the first of them is computed: no process releases one without process 0."""
        ledger = self.steps.reserve()
        if ledger is not None and state.is_world_process_zero:
            ledger.save(args.output_dir)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the release of the private gradient, which callbacks can read from here on."""
        self.steps.count_release()

    def writer_lock(self, folder: str | Path) -> WriterLock:
        """Return the lock of a folder: always the same, so that what is saved during a run is not refused by the run."""
        return self._locks.setdefault(Path(folder).resolve(), WriterLock(folder))

    @contextlib.contextmanager
    def beside_model(
        self, folder: Path, args: DopplerTrainingArguments, *, model: nn.Module, checkpoint_step: int | None
    ) -> Iterator[None]:
        """Bind the ledger to the weights that the block saves, and put it beside them, if it speaks for the model.

        A ledger of other weights there is set aside.
        """
        home = folder if checkpoint_step is None else folder.parent
        with self.writer_lock(home) if (home / LEDGER_NAME).exists() else contextlib.nullcontext():
            speaks, before, card = self.speaks_for(model), stamps(folder), folder / CARD_NAME
            yield
            ledger, weights = self.ledger, hashes(folder, unless_as=before)
            # Files are what they were, whatever became of a part of the model that is not in them.
            if ledger is None or not (speaks or ledger.has_saved(weights)):
                if ledger is None and not args.disable_dp:
                    print(
                        f"The model is saved in {folder} without a privacy ledger: this trainer has not trained it. Copy "
                        "the folder in which the one that has trained it saved it, with its ledger."
                    )
                if ledger is not None:
                    print(
                        f"The weights saved in {folder} are not those that the private training left, so that its ledger "
                        "does not speak for them. Save the model before you change it, and what you make of it elsewhere."
                    )
                aside = set_aside(folder, unless=lambda there: not there.unknown_weights(folder))
                if aside is not None:
                    print(f"The ledger in {folder} is now {aside.name}: it does not speak for these weights.")
                if card.exists() and not (folder / LEDGER_NAME).exists():
                    renew_section(card, None)  # which PEFT keeps
                return
            if checkpoint_step is not None:
                ledger.checkpoint(checkpoint_step)
            trained = frozenset() if self._lineage is None else self._lineage.marks_of_trained(model, together=False)
            ledger.speak_for(weights, model=digests_of(model), trained=trained)
            if self._lineage is not None:  # a checkpoint may be merged, too
                self._lineage.remember(model, ledger, marks=trained, writes=True)
            if checkpoint_step is not None:
                ledger.save(args.output_dir)
            set_aside(folder, unless=lambda there: there.is_prefix_of(ledger))
            ledger.save(folder)
            if card.exists() and (hasattr(model, "peft_config") or HEADING in card.read_text("utf-8")):
                renew_section(card, ledger)
            if checkpoint_step is None:
                print(f"The last hash of {folder / LEDGER_NAME}, which speaks for the weights beside it, is {ledger.head}.")

    @contextlib.contextmanager
    def evaluating(self, args: DopplerTrainingArguments, *, model: nn.Module) -> Iterator[None]:
        """Speak for the model after the block, too, if Transformers converts it to evaluate it."""
        # During a training Transformers converts nothing.
        converts = (args.bf16_full_eval or args.fp16_full_eval) and not self._is_running and self.speaks_for(model)
        yield
        if converts:
            self._leave(model, speaks=True, writes=args.process_index == 0)

    @property
    def logs_raw_loss(self) -> bool:
        """Whether the training goes on, and its loss has no noise."""
        return self._is_running and self.ledger is not None and self.ledger.statement.train_loss == "raw"

    def complete_log(self, logs: dict[str, float], *, model: nn.Module) -> None:
        """Add ε to a log (in place), and leave out a loss that is not reported."""
        # Of another model nobody knows what its training has spent: it may have been loaded.
        is_evaluation = any(name.startswith("eval_") for name in logs)
        if self.speaks_for(model) if is_evaluation else self._is_running:
            logs["epsilon"] = self.epsilon()
        if self.ledger is not None and self.ledger.statement.train_loss == "none":  # zeros
            take_losses(logs)

    def complete_card(self, args: DopplerTrainingArguments, *, model: nn.Module) -> None:
        """Add the optimizer and a section on privacy to Transformers' model card, if the ledger speaks for the model."""
        if self.ledger is not None and self.speaks_for(model):
            complete_card(Path(args.output_dir) / CARD_NAME, args, ledger=self.ledger, words=self._words)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Say once if the private training loss is close to its bound."""
        if self._bound_watch is not None and self._is_running and logs is not None:
            words = self._bound_watch.words_on(logs, step=state.global_step)
            if words and state.is_world_process_zero:
                print(words)

    def on_step_end(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop if the next step would exceed the budget, and compare the processes now and then."""
        if self.steps.affordable <= 0 and state.global_step < state.max_steps:
            control.should_training_stop = True
            # As Transformers does after the last step of its plan.
            control.should_evaluate |= args.eval_strategy == "steps" and args.eval_delay <= state.global_step
            control.should_save |= args.save_strategy == "steps"
        if args.world_size > 1 and (
            state.global_step % COMPARED_EVERY == 0 or control.should_save or state.global_step >= state.max_steps
        ):
            refuse_different_replicas(kwargs["model"], step=state.global_step)

    def on_train_end(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Close the ledger beside the model, and print what was spent."""
        note_shards(kwargs["model"].parameters())
        self._leave(kwargs["model"], speaks=self.speaks_for(kwargs["model"]), writes=state.is_world_process_zero)
        if self.ledger is not None and state.is_world_process_zero:
            self.ledger.close()
            self.ledger.save(args.output_dir)
            print_end(self.ledger, args, logs=state.log_history)

    def on_evaluate(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Tell of a model that has learnt little."""
        if self.ledger is not None and state.is_world_process_zero and not self._is_running:
            print_if_not_learnt(kwargs["metrics"])

    def end_run(self, args: DopplerTrainingArguments, state: TrainerState, *, model: nn.Module) -> None:
        """Note, on disk too, the model as the training has left it, by its end or an interruption."""
        if self._is_running and self.ledger is not None:
            speaks, self._is_running = self.speaks_for(model), False
            # Of several processes one may have failed alone: nothing here waits for the others.
            if self._leave(model, speaks=speaks, writes=state.is_world_process_zero, together=False):
                self.ledger.save(args.output_dir)
            if not self.ledger.runs[-1].is_closed:
                self.ledger = self.ledger.as_written()  # as the file counts: with the steps reserved
                if state.is_world_process_zero:
                    print_interruption(self.ledger, args)

    def _leave(self, model: nn.Module, *, speaks: bool, writes: bool, together: bool = True) -> bool:
        """Note the model as the run leaves it, and return whether this process has to save the ledger for it.

        Args:
            model: The trained model.
            speaks: Whether the ledger speaks for it. What its weights have cost is remembered in any case.
            writes: Whether this process writes files.
            together: Whether all processes are here.
        """
        # Before the first step the weights are the user's own, with which another training may begin.
        if self.ledger is None or self._lineage is None or self.ledger.steps_run == 0:
            return False
        digests = digests_of(model)
        if digests == self._left:
            return False
        self._left = digests
        marks = self._lineage.marks_of_trained(model, together=together)
        self._lineage.remember(model, self.ledger, marks=marks, writes=writes)
        return speaks and self.ledger.leave(digests, trained=marks) and writes
