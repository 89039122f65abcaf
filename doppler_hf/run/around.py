"""What a `DopplerTrainer` does around its steps: where the model lies, and what is evaluated, saved and logged."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput

from doppler_hf.disk import space_for
from doppler_hf.privacy.batching.micro_batches import PrivateLoader
from doppler_hf.run import refusals
from doppler_hf.run.checkpoints import begin_checkpoint
from doppler_hf.run.gradient_recorder import recorders_in
from doppler_hf.run.ledger_callback import PrivacyCallback
from doppler_hf.run.model_card import with_columns_in_one_order
from doppler_hf.run.own_loss import mean_and_outputs
from doppler_hf.run.parameters import look_again_at_what_is_trained
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.rehearsal import rehearse
from doppler_hf.run.sharded_states import whole_state, with_whole_states
from doppler_hf.run.sharding import Sharding, hidden_from_trainer
from doppler_hf.training_args import DopplerTrainingArguments


def apart(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as safetensors takes it: each value in one piece, and tied weights once for each of their names."""
    seen: set[int] = set()

    def own(value: Any) -> Any:
        is_tied = (place := value.untyped_storage().data_ptr()) in seen
        seen.add(place)
        return value.clone(memory_format=torch.contiguous_format) if is_tied else value.contiguous()

    return {name: own(value) for name, value in state.items()}


def add_baselines(output: EvalLoopOutput, *, prefix: str, is_own_loss: bool) -> None:
    """Add to an evaluation (in place) what always naming the most frequent label of its set, or the mean, reaches."""
    labels = output.label_ids
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or not len(labels):
        return
    if f"{prefix}_accuracy" in output.metrics and labels.dtype.kind in "iu":
        _, counts = np.unique(labels, return_counts=True)
        output.metrics[f"{prefix}_majority_class_accuracy"] = float(counts.max() / len(labels))
    if labels.dtype.kind == "f" and not is_own_loss:  # of a regression: several classes have a row each
        output.metrics[f"{prefix}_mean_label_loss"] = float(labels.astype(np.float64).var())


def with_privacy_section(inherited: Callable[..., None]) -> Callable[..., None]:
    """Return a trainer's `create_model_card`, whose card then names our optimizer and has a section on privacy."""

    def create_model_card(self: "AroundSteps", *args: Any, **kwargs: Any) -> None:
        """Write Transformers' model card, with the optimizer in use and a section on privacy."""
        history = self.state.log_history
        # Transformers writes a row of its table in the order of its own keys, and a checkpoint's are sorted.
        self.state.log_history = with_columns_in_one_order(history)
        try:
            inherited(self, *args, **kwargs)
        finally:
            self.state.log_history = history
        if self.is_world_process_zero():
            self._ledger_keeper.complete_card(self.args, model=self.model)

    return create_model_card


class AroundSteps(Trainer):
    """`Trainer` without its steps: `DopplerTrainer` makes these and sets the attributes, so that it reads top to bottom."""

    args: DopplerTrainingArguments
    optimizer: Any
    lr_scheduler: Any
    model_wrapped: Any
    _run: PrivateRun | None
    _ignore_keys: list[str] | None  # of the evaluations of a training
    _sharding: Sharding
    _ledger_keeper: PrivacyCallback
    compute_per_sample_loss: Callable[..., Any]
    default_per_sample_loss: ClassVar[Callable[..., Any]]

    # --- where the model lies -----------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make Transformers' accelerator, which is not told of the shards of frozen weights; see `run.sharding`."""
        with contextlib.nullcontext() if self.args.disable_dp else hidden_from_trainer(self.args) as plugin:
            super().create_accelerator_and_postprocess()
        self._sharding = Sharding(plugin, device=self.args.device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self._sharding.is_asked_for:  # otherwise it may not fit there as a whole
            super()._move_model_to_device(model, device)

    def _prepare_model(self) -> None:
        self._sharding.cut(self.model)
        # Autocast and placement as for training, but no DDP around the model: it would all-reduce raw gradients, which are
        # discarded. `prepare` does not change a model that has been prepared.
        placement = False if self._sharding.is_asked_for else None
        self.accelerator.prepare_model(self.model, device_placement=placement, evaluation_mode=True)

    def _forget_earlier_training(self) -> None:
        """Let Transformers build anew, as after `model_init`, what it keeps of an earlier training.

        The optimizer is of the parameters and arguments of that training, and `model_wrapped` is its model.
        """
        if isinstance(self.optimizer, AcceleratedOptimizer):  # and not one that the user has made since
            self.optimizer = self.lr_scheduler = None
        self.model_wrapped = self.model

    # --- what is evaluated, saved and logged --------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch: as Transformers, or the mean of your own `compute_per_sample_loss`.

        It is called in evaluations, and with `disable_dp` in the training, too.
        """
        own = type(self)
        if own.compute_per_sample_loss is own.default_per_sample_loss:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            return mean_and_outputs(self.compute_per_sample_loss, model, inputs)
        mean = self.compute_per_sample_loss(model, dict(inputs)).mean()
        # Transformers takes a loss of a model that can count the items of all micro-batches to be a share of their mean.
        is_share = num_items_in_batch is not None and self.model_accepts_loss_kwargs
        return mean / self.current_gradient_accumulation_steps if is_share else mean

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Evaluate and predict as Transformers does, and add what always naming one label reaches."""
        if self._sharding.is_asked_for:
            self._prepare_model()
        with self._ledger_keeper.evaluating(self.args, model=self.model):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if not self.args.disable_dp:
            is_own_loss = type(self).compute_per_sample_loss is not type(self).default_per_sample_loss
            add_baselines(output, prefix=metric_key_prefix, is_own_loss=is_own_loss)
        return output

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # Transformers' last method before callbacks open the ledger: model, optimizer and schedule are final.
        prepared = super()._prepare_for_training(*args, **kwargs)
        if not self.args.disable_dp:
            refusals.refuse_another_optimizer(self.optimizer.optimizer)
            refusals.refuse_other_parameters(self.optimizer.optimizer, self.model)
            if self.args.rehearse:
                rehearse(self, ignore_keys=self._ignore_keys)
        return prepared

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Transformers does, and the ledger beside the model.

        Without a ledger that speaks for the model, the trainer sets aside one that lies there and speaks for other weights.
        """
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        # This is how Transformers saves checkpoints. It calls `on_save` only after it has pushed them.
        step = self.state.global_step if _internal_call and output_dir is not None else None
        keeper, is_first = self._ledger_keeper, self.args.process_index == 0  # which alone writes
        with contextlib.ExitStack() as saving:
            if self._run is not None:
                saving.enter_context(self._run.unwatched())
            saving.enter_context(space_for("the model", folder=folder))
            if is_first:
                saving.enter_context(keeper.beside_model(folder, self.args, model=self.model, checkpoint_step=step))
            look_again_at_what_is_trained(self.model)  # which no process could do alone
            if step is not None and is_first:
                begin_checkpoint(folder)
            super().save_model(output_dir, _internal_call=_internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # Transformers' only method that all processes call before it saves on process 0 alone.
        if self._sharding.is_cut:
            state_dict = whole_state(self.model)
        if state_dict is None and not isinstance(self.model, PreTrainedModel) and not hasattr(self.model, "peft_config"):
            state_dict = apart(self.model.state_dict())
        super()._save(output_dir, state_dict=state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Transformers' only method around a whole checkpoint: optimizer, schedule and state have no public one.
        with space_for("a checkpoint", folder=Path(self.args.output_dir)):
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # Checkpoints are those of a plain run, and resume on any number of processes.
        with with_whole_states(self.optimizer.optimizer) if self._sharding.is_cut else contextlib.nullcontext():
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        # Two states of a generator tell how many numbers were drawn between them: the sizes of draws, and their lengths.
        if self.args.disable_dp:
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.args.disable_dp:
            super()._load_rng_state(checkpoint)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as Transformers does, without privacy only."""
        refusals.refuse_search(self.args)
        return super().hyperparameter_search(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count nothing in a private run: Transformers' count depends on the lengths of the examples drawn, and is saved."""
        return super().floating_point_ops(inputs) if self.args.disable_dp else 0

    def num_examples(self, dataloader: Any) -> int:
        """Count the units of a private run: Transformers logs and saves this, and how many rows a unit has is private."""
        if isinstance(dataloader, PrivateLoader):
            return self.private_run.sampler.num_units
        return super().num_examples(dataloader)

    create_model_card = with_privacy_section(Trainer.create_model_card)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as Transformers does, with ε, and without the training loss if it is not reported."""
        self._ledger_keeper.complete_log(logs, model=self.model)
        for recorder in recorders_in(self.callback_handler.callbacks):
            recorder.add_estimates(logs)
        super().log(logs, start_time)
