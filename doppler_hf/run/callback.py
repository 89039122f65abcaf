"""The callback that passes Transformers' events to a private run. A trainer adds it for the duration of `train`.

The callback also guards the budget: steps are reserved in the ledger before they are computed, and the run stops before a
step that would exceed the target. Only process 0 writes ledgers.
"""

from typing import Any

from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from doppler_hf.privacy.ledger.ledger import set_aside
from doppler_hf.privacy.ledger.terms import earlier_in_words
from doppler_hf.run.digests import note_shards
from doppler_hf.run.lineage import adapters_trained_by_others
from doppler_hf.run.logged_loss import BoundWatch, forget_losses
from doppler_hf.run.optimizer import learning_rate_in_words
from doppler_hf.run.private_run import PrivateRun, callbacks_removed
from doppler_hf.run.processes import COMPARED_EVERY, refuse_different_replicas
from doppler_hf.run.summary import print_end, print_interruption, print_start
from doppler_hf.training_args import DopplerTrainingArguments


class PrivacyCallback(TrainerCallback):
    """Opens the ledger of a run, prints its summary, counts its steps, and stops it at the end of its budget.

    Args:
        run: The run.
        handler: The trainer's handler of all callbacks.
    """

    def __init__(self, run: PrivateRun, *, handler: CallbackHandler) -> None:
        self._run, self._handler = run, handler
        self._bound_watch: BoundWatch | None = None  # watches a private training loss

    def on_train_begin(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Open a ledger, or continue the ledger of an earlier run, and print the summary."""
        run, step, model = self._run, state.global_step, kwargs["model"]
        run.terms.refuse_changes(args)
        self.stay_last()
        # Transformers has wrapped the optimizer by now (accelerate's AcceleratedOptimizer).
        optimizer = kwargs["optimizer"].optimizer
        ledger = run.begin(model, step=step, output_dir=args.output_dir)
        chosen = " (auto)" if args.low_pass_filter == "auto" else ""
        run.words = {
            "rate": learning_rate_in_words(args, optimizer),
            "filter": f"{optimizer.low_pass_filter}{chosen}",
        }
        self._bound_watch = BoundWatch(run.statement, step=step) if run.statement.train_loss == "private" else None
        # Privacy: the logs of a checkpoint of an earlier version hold losses that were raw then.
        if any(each.statement.train_loss == "raw" for each in ledger.runs):
            forget_losses(state.log_history)
        if state.is_world_process_zero:
            aside = set_aside(args.output_dir, unless=lambda there: there.is_prefix_of(ledger))
            ledger.save(args.output_dir)
            counted = ledger.runs[-1].steps_before
            remaining = run.statement.steps_planned - step
            add_up = "If that run used the same data, its ε and the ε of this run add up."
            unknown = [] if ledger.earlier or counted else adapters_trained_by_others(model)
            notes = {
                f"The adapter {', '.join(unknown)} was already trained (it changes the model's output), and no ledger on "
                "this machine covers it. If it was trained on the same data, its ε adds to the ε of this run.": unknown,
                f"The ledger of an earlier run in {args.output_dir} was renamed to {aside and aside.name}. {add_up}": aside,
                f"This run continues the ledger of the model's earlier run, so the {counted} steps of that run count. If "
                "you "
                "train on different data, make a new trainer with another output_dir.": step == 0 and counted,
                earlier_in_words(ledger): ledger.earlier,
                "The earlier run was complete, and this run may depend on its results, so it counts as a plan of its own "
                "and "
                "its ε is added.": ledger.is_repeated and remaining > 0,
                f"All {step} steps of this run were already done, so nothing was trained. To continue, set a larger "
                "max_steps or num_train_epochs"
                + ("." if args.target_epsilon is None else ", and a larger target_epsilon."): remaining <= 0,
                f"The budget allows {run.affordable} of the {remaining} remaining steps, because earlier steps count. "
                "Training will stop after them.": run.affordable < remaining,
            }
            due = [*run.notes, *(note for note, is_due in notes.items() if is_due)]
            print_start(run, args, model=model, notes=due, callbacks=self._handler.callbacks)

    def stay_last(self) -> None:
        """Stop if this callback, or Transformers' `DefaultFlowCallback`, is no longer in the list; else go to its end.

        After each event this callback undoes what the other callbacks have changed, also those that were added later.
        """
        there = self._handler.callbacks
        if self not in there or not any(isinstance(each, DefaultFlowCallback) for each in there):
            raise callbacks_removed()
        if there[-1] is not self:
            self._handler.callbacks = [*(each for each in there if each is not self), self]

    def on_substep_end(self, args: DopplerTrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo changes of arguments, as after every event."""
        self._run.terms.keep(args)

    on_optimizer_step = on_evaluate = on_save = on_epoch_end = on_substep_end

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Tell the sampler the step of its next batch."""
        self._run.terms.keep(args)
        self._run.begin_epoch(step=state.global_step)

    def on_step_begin(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Reserve steps on disk before the first of them is computed; no process can release a step without process 0."""
        self._run.terms.keep(args)
        ledger = self._run.reserve()
        if ledger is not None and state.is_world_process_zero:
            ledger.save(args.output_dir)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the release of the private gradient."""
        self._run.terms.keep(args)
        self._run.count_release()

    def on_step_end(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop if the next step would exceed the budget, and compare the processes now and then."""
        self._run.terms.keep(args)
        self._run.sampler.is_reserved &= not control.should_training_stop
        if self._run.affordable <= 0 and state.global_step < state.max_steps:
            control.should_training_stop = True
            # Evaluate and save as Transformers does after the last step of its plan.
            control.should_evaluate |= args.eval_strategy == "steps" and args.eval_delay <= state.global_step
            control.should_save |= args.save_strategy == "steps"
        if args.world_size > 1 and (
            state.global_step % COMPARED_EVERY == 0 or control.should_save or state.global_step >= state.max_steps
        ):
            refuse_different_replicas(kwargs["model"], step=state.global_step)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Say once if the private training loss is close to its bound."""
        if self._run.is_running:
            self._run.terms.keep(args)
        if self._bound_watch is not None and self._run.is_running and logs is not None:
            words = self._bound_watch.words_on(logs, step=state.global_step)
            if words and state.is_world_process_zero:
                print(words)

    def on_train_end(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Close the ledger next to the model, and print what was spent."""
        run, model = self._run, kwargs["model"]
        note_shards(model.parameters())
        run.leave(model, speaks=run.covers_weights_of(model), writes=state.is_world_process_zero)
        if run.ledger is not None and state.is_world_process_zero:
            run.ledger.close()
            run.ledger.save(args.output_dir)
            print_end(run.ledger, args, logs=state.log_history)


def end_run(
    run: PrivateRun, args: DopplerTrainingArguments, state: TrainerState, *, model: Any, error: BaseException | None = None
) -> None:
    """Record, on disk too, the model as the run has left it, whether the run was completed or interrupted."""
    if not run.is_running or run.ledger is None:
        return
    speaks, run.is_running = run.covers_weights_of(model), False
    # If there are several processes, only one may have failed, so nothing here waits for the others.
    if run.leave(model, speaks=speaks, writes=state.is_world_process_zero, together=False):
        run.ledger.save(args.output_dir)
    if not run.ledger.runs[-1].is_closed:
        run.ledger = run.ledger.as_written()  # count as the file does, with all reserved steps
        if state.is_world_process_zero:
            print_interruption(run.ledger, args, error=error)
