"""What a private run tells its user: a summary before, ε along the way, the ledger with every checkpoint and at the end.

And the budget guard: the run stops before a step that would overrun the target.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from doppler_hf.filters import noise_gain
from doppler_hf.plan import PrivacyPlan
from doppler_hf.privacy import LEDGER_NAME, PoissonSampler, PrivacyLedger
from doppler_hf.training_args import DopplerTrainingArguments


class PrivacyCallback(TrainerCallback):
    """Keeps the ledger of a run, prints its summary, and stops it at the end of its budget.

    Args:
        plan: Returns the run's plan; called when training begins.

    Attributes:
        fallbacks: Layers without a rule in the engine, by name, and how their gradient is had.
        checkpoint: The folder from which the next run is resumed, or None.
        ledger: What has been spent; None before training.
    """

    def __init__(self, plan: Callable[[], PrivacyPlan]) -> None:
        self._plan = plan
        self._sampler: PoissonSampler | None = None
        self._affordable_steps = 0
        self.fallbacks: dict[str, str] = {}
        self.checkpoint: str | None = None
        self.ledger: PrivacyLedger | None = None

    def watch(self, sampler: PoissonSampler) -> None:
        """Tell this sampler which epoch it is in."""
        self._sampler = sampler

    def epsilon(self) -> float:
        """Return an upper bound on ε spent so far; 0 before training."""
        return 0.0 if self.ledger is None else self.ledger.epsilon()

    def on_train_begin(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the ledger, or take over the one of the run that is resumed; print the summary."""
        plan = self._plan()
        # A second run of the same trainer goes on from what the first one released, whether resumed or not.
        earlier = [self.ledger] if self.ledger is not None else []
        if self.checkpoint is not None:
            earlier += ledgers_of(Path(self.checkpoint))
        ledger = plan.open_ledger(args)
        if earlier:
            ledger.resume(max(earlier, key=lambda ledger: ledger.steps_run), from_step=state.global_step)
        self.ledger = ledger  # Only now: a refusal must not lose what was spent before.
        remaining = plan.steps - state.global_step
        self._affordable_steps = self.ledger.affordable_steps(remaining)
        if state.is_world_process_zero:
            print_summary(plan, self.ledger, model=kwargs["model"], resumed_at=state.global_step, fallbacks=self.fallbacks)
            if self._affordable_steps < remaining:
                print(
                    f"The budget allows {self._affordable_steps} of the {remaining} steps left, because steps of the "
                    "earlier run count: training will stop there."
                )
        if remaining > 0 and self._affordable_steps == 0:
            raise ValueError(
                f"The privacy budget is spent: ε = {self.ledger.epsilon():.4g} of target_epsilon = "
                f"{plan.target_epsilon}. Raise target_epsilon to go on."
            )

    def on_epoch_begin(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say to the sampler which epoch begins."""
        if self._sampler is not None:
            self._sampler.set_epoch(state.global_step // self._sampler.steps_per_epoch)

    def on_pre_optimizer_step(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the release: from here on the private gradient is out."""
        assert self.ledger is not None
        self.ledger.record_step()
        self._affordable_steps -= 1

    def on_step_end(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop when the next step would overrun the budget."""
        if self._affordable_steps <= 0 and state.global_step < state.max_steps:
            control.should_training_stop = True

    def on_log(self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the ledger as far as the run has got, so that a crash does not lose what was spent."""
        if self.ledger is not None and state.is_world_process_zero:
            self.ledger.save(args.output_dir)

    def on_save(self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the ledger into the checkpoint."""
        if self.ledger is not None and args.should_save:
            self.ledger.save(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            self.ledger.save(args.output_dir)

    def on_train_end(
        self, args: DopplerTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the final ledger beside the model, and say what was spent."""
        if self.ledger is not None and state.is_world_process_zero:
            self.ledger.save(args.output_dir)
            print(
                f"Privacy spent: ε = {self.epsilon():.4g} at δ = {self.ledger.target_delta:.3g} after "
                f"{self.ledger.steps_run} steps; see {Path(args.output_dir) / LEDGER_NAME}."
            )


def ledgers_of(checkpoint: Path) -> list[PrivacyLedger]:
    """Return the ledgers of a checkpoint: its own, and that of its run, which may have gone on after it.

    Raises:
        ValueError: Neither exists, so nobody knows what has been spent.
    """
    folders = (checkpoint, checkpoint.parent)
    ledgers = [PrivacyLedger.load(folder) for folder in folders if (folder / LEDGER_NAME).exists()]
    if not ledgers:
        raise ValueError(
            f"There is no {LEDGER_NAME} in {checkpoint} or the folder above it, so it is unknown what the run has spent. "
            "Train from the start, or put the ledger back."
        )
    return ledgers


def print_summary(
    plan: PrivacyPlan, ledger: PrivacyLedger, *, model: Any, resumed_at: int, fallbacks: Mapping[str, str]
) -> None:
    """Print what is about to be done to the data, as a table."""
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    final = ledger.epsilon(further_steps=plan.steps - resumed_at)
    target = "" if plan.target_epsilon is None else f" (target {plan.target_epsilon:g})"
    rows = (
        ("training examples N", f"{plan.num_examples:,}"),
        ("expected batch size B", f"{plan.expected_batch_size:,}"),
        ("sampling rate q", f"{plan.sample_rate:.4g}"),
        ("steps T", f"{plan.steps:,}" + (f", resumed at {resumed_at:,}" if resumed_at else "")),
        ("noise multiplier σ", f"{plan.noise_multiplier:.4g}"),
        ("clip norm C", f"{plan.max_grad_norm:g} ({ledger.clipping}, {ledger.clipping_granularity})"),
        ("noise per coordinate σC/B", f"{plan.noise_std:.3g}"),
        ("ε at the end", f"{final:.4g}{target}, by {plan.accountant}" if ledger.private else "∞: NOT PRIVATE"),
        ("δ", f"{plan.delta:.3g}"),
        ("filter", f"{plan.low_pass_filter}, noise power × {noise_gain(plan.low_pass_filter):.3g}"),
        ("trainable parameters", f"{trainable:,} of {sum(p.numel() for p in parameters):,}"),
    )
    table = Table(title="Private training", show_header=False)
    for row in rows:
        table.add_row(*row)
    for how, (number, first) in counted(fallbacks).items():
        table.add_row(f"without a rule: {number}, such as" if number > 1 else "without a rule", f"{first} ({how})")
    console = Console()
    console.print(table)
    if ledger.train_loss_reported:
        console.print("The training loss in the logs is not private; report_train_loss='none' leaves it out.")


def counted(fallbacks: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Return, for each way in which layers are treated, how many there are and the first one's name."""
    groups: dict[str, list[str]] = {}
    for name, how in fallbacks.items():
        groups.setdefault(how, []).append(name)
    return {how: (len(names), names[0]) for how, names in groups.items()}
