"""The callback that passes Transformers' events to a private run. A trainer adds it for the duration of `train`.

The callback also guards the budget: steps are reserved in the ledger before they are computed, and the run stops before a
step that would exceed the target. Only process 0 writes ledgers.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Final

from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState

from doppler_hf.errors import Refusal
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.ledger.ledger import set_aside
from doppler_hf.privacy.ledger.terms import earlier_in_words
from doppler_hf.privacy.losses import without_adapters
from doppler_hf.run.digests import note_shards
from doppler_hf.run.interruptions import Terminated, reason_in_words
from doppler_hf.run.optimizer import learning_rate_in_words
from doppler_hf.run.private_run import PrivateRun, callbacks_removed
from doppler_hf.run.processes.processes import COMPARED_EVERY, on_process_0, refuse_different_replicas
from doppler_hf.run.reporting.logged_loss import BoundWatch, forget_losses
from doppler_hf.run.reporting.other_runs import remember_run
from doppler_hf.run.reporting.summary import print_end, print_interruption, print_start
from doppler_hf.run.weights.lineage import adapters_trained_by_others
from doppler_hf.run.weights.merges import is_base_partial
from doppler_hf.training_args import DopplerTrainingArguments

# The methods that a step calls on the trainer, and the attributes that it reads there.
_CALLED: Final = (
    "compute_per_sample_loss", "compute_loss", "compute_loss_context_manager", "training_step", "get_batch_samples",
    "_prepare_inputs", "_prepare_input", "_clip_grad_norm", "_get_grad_norm",
)  # fmt: skip
_READ: Final = ("args", "model", "optimizer", "compute_loss_func", "label_smoother")


class PrivacyCallback(TrainerCallback):
    """Opens the ledger of a run, prints its summary, counts its steps, and stops it at the end of its budget.

    Args:
        run: The run.
        trainer: The trainer. The callback must be the last one in its list when it is made.
        check_begun: A function that is called once, after the other callbacks were told that the run begins.
        check_callbacks: A function that is called when the list of callbacks has changed.
    """

    def __init__(
        self, run: PrivateRun, *, trainer: Any, check_begun: Callable[[], None], check_callbacks: Callable[[], None]
    ) -> None:
        self._run, self._trainer = run, trainer
        self._check_begun, self._check_callbacks = check_begun, check_callbacks
        self._handler = trainer.callback_handler
        self._checked_callbacks: list[Any] = []
        self._checked_code: dict[str, tuple[Any, ...]] = {}
        self._bound_watch: BoundWatch | None = None  # It watches a private training loss.

    def note_checked_code(self) -> None:
        """Note the code with which the checks before the first step were made."""
        self._checked_code, self._checked_callbacks = _code_of(self._trainer), [*self._handler.callbacks]

    def on_train_begin(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Open a ledger, or continue the ledger of an earlier run, and print the summary."""
        run, step, model = self._run, state.global_step, kwargs["model"]
        run.terms.refuse_changes(args)
        self.refuse_changed_code()
        self._check_begun()
        _refuse_another_control(control)
        # Transformers has wrapped the optimizer by now (accelerate's AcceleratedOptimizer).
        optimizer = kwargs["optimizer"].optimizer
        ledger = run.begin(model, step=step)
        chosen = " (auto)" if args.low_pass_filter == "auto" else ""
        run.words = {
            "rate": learning_rate_in_words(args, optimizer),
            "filter": f"{optimizer.low_pass_filter}{chosen}",
        }
        self._bound_watch = BoundWatch(run.statement, step=step) if run.statement.train_loss == "private" else None
        # Privacy: the logs of a checkpoint of an earlier version hold losses that were raw then.
        if any(each.statement.train_loss == "raw" for each in ledger.runs):
            forget_losses(state.log_history)
        aside = on_process_0(functools.partial(_save_first, ledger, args.output_dir))
        run.settle()
        if state.is_world_process_zero:
            counted = ledger.runs[-1].steps_before
            remaining = run.statement.steps_planned - step
            add_up = "If that run used the same data, its ε and the ε of this run add up."
            unknown = [] if ledger.earlier or counted else adapters_trained_by_others(model)
            notes = {
                f"The adapter {', '.join(unknown)} was already trained (it changes the model's output), and no ledger on "
                "this machine covers it. If it was trained on the same data, its ε adds to the ε of this run.": unknown,
                f"The ledger of an earlier run in {args.output_dir} was renamed to {aside}. {add_up}": aside,
                f"This run continues the ledger of the model's earlier run, so the {counted} steps of that run count, too. "
                "If you train on different data, make a new trainer with another output_dir.": step == 0 and counted,
                earlier_in_words(ledger): ledger.earlier,
                "The base of the adapter is quantized or sharded. If you merge the adapter into the whole base and train on "
                "with the same data, that run will not know of this one: add up their ε.": is_base_partial(model),
                "The earlier run was complete, and this run may depend on its results, so it counts as a plan of its own "
                "and its ε is added.": ledger.is_repeated and remaining > 0,
                f"All {step} steps of this run were already done, so nothing was trained. To continue, set a larger "
                "max_steps or num_train_epochs"
                + ("." if args.target_epsilon is None else ", and a larger target_epsilon."): remaining <= 0,
                f"The budget allows {run.affordable} of the {remaining} remaining steps, because "
                f"{_why_fewer(counted, step)}. Training will stop after {'it' if run.affordable == 1 else 'them'}, before "
                "the learning rate has come to the end of its schedule.": (run.affordable < remaining),
            }
            due = [*run.notes, *(note for note, is_due in notes.items() if is_due)]
            print_start(run, args, model=model, notes=due, callbacks=self._handler.callbacks)

    def stay_last(self) -> None:
        """Stop if this callback, or Transformers' `DefaultFlowCallback`, is no longer in the list; else go to its end.

        After each event this callback undoes what the other callbacks have changed, also those that were added later.
        """
        # Transformers calls the trainer's handler of callbacks, which may be another one by now.
        handler = self._trainer.callback_handler
        there = handler.callbacks
        if self not in there or not any(isinstance(each, DefaultFlowCallback) for each in there):
            raise callbacks_removed()
        if there[-1] is not self:
            handler.callbacks = [*(each for each in there if each is not self), self]

    def refuse_changed_code(self) -> None:
        """Stop if code that the checks before the first step have seen was removed or replaced, such as by a callback."""
        self.stay_last()
        trainer, there = self._trainer, self._trainer.callback_handler.callbacks
        if there != self._checked_callbacks:
            self._check_callbacks()
            self._checked_callbacks = [*there]
        # Sensitivity: a loss that is set now might read the batch. And a loss that has no effect would not be trained.
        now = _code_of(trainer)
        for name, parts in self._checked_code.items():
            if len(parts) != len(now[name]) or any(a is not b for a, b in zip(parts, now[name], strict=True)):
                end = "This step is not counted" if self._run.is_running else "No ε is spent"
                raise Refusal(
                    "code-replaced",
                    f"{name} was replaced during the run, probably by a callback. A private run keeps the code that was "
                    f"checked before its first step, and other code may break the guarantee. {end}. Set {name} before "
                    "train(), or leave it as it is.",
                )
        if not hasattr(trainer.accelerator.state, "mixed_precision"):
            raise another_arguments()

    def on_substep_end(self, args: DopplerTrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo changes of arguments, as after every event."""
        self._run.terms.keep(args)

    on_optimizer_step = on_save = on_substep_end

    def on_evaluate(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Note the weights, since other callbacks keep the best ones so far, or those of an epoch, at these events."""
        self._run.terms.keep(args)
        self._run.remember_between_saves(kwargs["model"], writes=state.is_world_process_zero)

    on_epoch_end = on_evaluate

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Tell the sampler the step of its next batch."""
        self._run.terms.keep(args)
        self._run.begin_epoch(step=state.global_step)

    def on_step_begin(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Reserve steps on disk before the first of them is computed; no process can release a step without process 0."""
        self._run.terms.keep(args)
        self.refuse_changed_code()
        _refuse_another_control(control)
        self._warn_of_more_steps(state)
        ledger = self._run.reserve()
        if ledger is not None and state.is_world_process_zero:
            ledger.save(args.output_dir)

    def _warn_of_more_steps(self, state: TrainerState) -> None:
        planned = self._run.statement.steps_planned
        if state.max_steps > planned:
            warnings.warn(
                f"state.max_steps was changed from {planned} to {state.max_steps} during the run. This has no effect: noise "
                "and ε were computed for the planned steps. Set max_steps before train().",
                stacklevel=2,
            )
            state.max_steps = planned

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the release of the private gradient."""
        self._run.terms.keep(args)
        self._run.count_release()

    def on_step_end(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop if the next step would exceed the budget, and compare the processes now and then."""
        _refuse_another_control(control)
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
            missing = run.statement.steps_planned - state.global_step
            if missing > 0 >= run.affordable:
                steps = f"{missing:,} step{'s' * (missing > 1)}"
                print(f"The run ended {steps} early, because {_why_fewer(run.ledger.steps_run, state.global_step)}.")
            if args.load_best_model_at_end and state.best_global_step is None and _is_never_a_number(state, args):
                print(
                    "load_best_model_at_end has loaded nothing, because "
                    f"metric_for_best_model={args.metric_for_best_model!r} was NaN in every evaluation. "
                    "The model has the weights of the last step. Check compute_metrics, or set another metric."
                )
            run.is_little_said = print_end(run.ledger, args, logs=state.log_history)


def _save_first(ledger: PrivacyLedger, output_dir: str) -> str | None:
    """Save a new ledger in place of that of another run, and return the name under which the other one is kept, if any."""
    aside = set_aside(output_dir, unless=lambda there: there.is_prefix_of(ledger))
    ledger.save(output_dir)
    return None if aside is None else aside.name


def _is_never_a_number(state: TrainerState, args: DopplerTrainingArguments) -> bool:
    """Return whether the metric for the best model was NaN in each evaluation of the run, and there was one."""
    key = f"eval_{str(args.metric_for_best_model).removeprefix('eval_')}"
    found = [log[key] for log in state.log_history if key in log]
    return bool(found) and all(value != value for value in found)


def _why_fewer(counted: int, step: int) -> str:
    """Return why a budget does not pay for all planned steps, if so many steps count at a step."""
    if counted > step:
        return f"steps that were made {'after the checkpoint' if step else 'before'} count, too"
    return "sampling began a new round, which costs more ε than going on with the earlier one"


def _code_of(trainer: Any) -> dict[str, tuple[Any, ...]]:
    """Return by its name what a step calls and reads: of the trainer, of its class, and of its model."""
    own, classes = vars(trainer), type(trainer).__mro__
    code = {
        f"trainer.{name}": (own.get(name), *(vars(cls)[name] for cls in classes if name in vars(cls))) for name in _CALLED
    }
    code |= {f"trainer.{name}": (getattr(trainer, name),) for name in _READ}
    models = [trainer.model, without_adapters(trainer.model)]
    code["trainer.model.forward"] = tuple(each for model in models for each in (vars(model).get("forward"), type(model)))
    # Transformers keeps a loss that is set as model.loss_function under this name.
    code["trainer.model.loss_function"] = tuple(vars(model).get("_loss_function") for model in models)
    return code


def _refuse_another_control(control: Any) -> None:
    """Refuse what a callback has returned in place of the control, since Transformers passes it on as the control."""
    if not isinstance(control, TrainerControl):
        raise Refusal(
            "callback-returns",
            f"A callback has returned a {type(control).__name__} from one of its events. Transformers would take it for the "
            "TrainerControl and fail. Return control, or nothing.",
        )


def another_arguments() -> Refusal:
    """Return the error of a trainer whose accelerator was reset by arguments that were made later."""
    return Refusal(
        "accelerator-reset",
        "The accelerator of this trainer was reset, because other TrainingArguments were made after the trainer. "
        "Make the trainer again after them. Training would fail, as it does with Trainer.",
    )


def end_run(
    run: PrivateRun, args: DopplerTrainingArguments, state: TrainerState, *, model: Any, error: BaseException | None = None
) -> None:
    """Record, on disk too, the model as the run has left it, whether the run was completed or interrupted."""
    if run.ledger is None and isinstance(error, KeyboardInterrupt | Terminated) and state.is_world_process_zero:
        print(f"\n{reason_in_words(error)} before the first step. No ε was spent, and checkpoints are as they were.")
    if not run.is_running or run.ledger is None:
        return
    speaks, run.is_running = run.covers_weights_of(model), False
    # If there are several processes, only one may have failed, so nothing here waits for the others.
    if run.leave(model, speaks=speaks, writes=state.is_world_process_zero, together=False):
        run.ledger.save(args.output_dir)
    if not run.ledger.runs[-1].is_closed:
        run.ledger = run.ledger.as_written()  # Count as the file does, with all reserved steps.
        if state.is_world_process_zero:
            print_interruption(run.ledger, args, error=error)
    if run.statement.search is None:  # a search is remembered as a whole
        remember_run(run, folder=str(args.output_dir))
