"""`DopplerTrainer`: HF's `Trainer`, whose optimizer sees private gradients only.

One training step, from top to bottom: `PoissonSampler` draws and cuts into `gradient_accumulation_steps` pieces, which
`collate_piece` turns into micro-batches (`get_train_dataloader`); each micro-batch's per-example gradients are clipped and
summed (`training_step`); after the last one, noise turns the sum into `p.grad` (`_privatize`). There the privacy boundary
lies: the stock loop then logs the norm of `p.grad`, calls `DopplerOptimizer.step`, schedules, evaluates and saves.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length

from doppler_hf.filters import LowPassFilter
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.privacy import GaussianMechanism, PoissonSampler
from doppler_hf.privacy.batching.micro_batches import (
    MicroBatch,
    WeightedExamples,
    check_token_budget,
    collate_piece,
    lengths_of,
    units_of,
)
from doppler_hf.privacy.losses.host_losses import per_sample_losses
from doppler_hf.privacy.noise.private_loss import PrivateLoss
from doppler_hf.run.engine import attached_engine
from doppler_hf.run.filter_choice import chosen_filter, filter_in_words
from doppler_hf.run.gradient_recorder import GradientRecorder
from doppler_hf.run.ledger_callback import PrivacyCallback
from doppler_hf.run.model_card import add_privacy_section, name_optimizer
from doppler_hf.run.plan import PrivacyPlan
from doppler_hf.run.weight_filter_callback import WeightFilterCallback
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.galore import GaloreArguments, target_parameters


class DopplerTrainer(Trainer):
    """`Trainer` with differential privacy: the same arguments, loop, callbacks, checkpoints and hub methods.

    Sequence, image and token classification, causal, masked and seq2seq language models have a loss per example; another
    task overrides `compute_per_sample_loss`. With `args.disable_dp` every method is the stock one.

    Args:
        args: `DopplerTrainingArguments`.
        **kwargs: As `Trainer`. `train_dataset` must have a length.

    Raises:
        ValueError: What cannot be private, by name: an iterable training set, `compute_loss_func`, an optimizer of one's
            own, a model with layers that mix examples.

    Example:
        >>> trainer = DopplerTrainer(model=model, args=args, train_dataset=train, processing_class=tokenizer)
        >>> trainer.train()
    """

    args: DopplerTrainingArguments
    optimizer: Any
    _doppler_optimizer: DopplerOptimizer

    def __init__(self, model: Any = None, args: DopplerTrainingArguments | None = None, **kwargs: Any) -> None:
        if not isinstance(args, DopplerTrainingArguments):
            raise ValueError(f"args must be DopplerTrainingArguments, got {type(args).__name__}.")
        super().__init__(model=model, args=args, **kwargs)
        self._plan: PrivacyPlan | None = None
        self._weight_filter: WeightFilterCallback | None = None
        if args.weight_filter is not None:
            # Ahead of the privacy callback: a run that it refuses to resume must not stand in the ledger.
            self._weight_filter = WeightFilterCallback(LowPassFilter.parse(args.weight_filter))
            self.add_callback(self._weight_filter)
        if not args.disable_dp:
            self._refuse_what_cannot_be_private()
            self.privacy = PrivacyCallback(self.privacy_plan)
            self.add_callback(self.privacy)

    def _refuse_what_cannot_be_private(self) -> None:
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func sees the whole batch, so an example's gradient could depend on the others. Override "
                "compute_per_sample_loss instead, which returns one loss per example."
            )
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise ValueError(
                "An optimizer of your own would bypass low_pass_filter and base_optimizer. Leave `optimizers` to its "
                "scheduler alone, (None, scheduler), and set base_optimizer."
            )
        if self.train_dataset is not None and not has_length(self.train_dataset):
            raise ValueError(
                f"{type(self.train_dataset).__name__} has no length, so it cannot be Poisson-sampled. Load it without "
                "streaming."
            )

    def privacy_plan(self) -> PrivacyPlan:
        """Return what the run does to the data and what that costs; computed once, before the first step."""
        if self._plan is None:
            self._plan = PrivacyPlan.from_arguments(
                self.args, sampler=self._poisson_sampler(), records_raw=self._records_raw()
            )
        return self._plan

    # --- left of the privacy boundary -------------------------------------------------------------------------------

    def _poisson_sampler(self, lengths: list[int] | None = None) -> PoissonSampler:
        column = self.args.privacy_unit_column
        return PoissonSampler(
            num_examples=len(self.train_dataset),
            expected_batch_size=self.get_total_train_batch_size(self.args),
            micro_batches=self.args.gradient_accumulation_steps,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            lengths=lengths,
            units=None if column is None else units_of(self.train_dataset, column=column),
            max_examples_per_unit=self.args.max_examples_per_unit,
            seed=self.args.noise_seed,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of Poisson draws: `gradient_accumulation_steps` items a draw, each a list of micro-batches."""
        if self.args.disable_dp or self.train_dataset is None:
            return super().get_train_dataloader()
        # The host's `_get_dataloader` ends in `accelerator.prepare`, which shards any batch sampler and repeats examples
        # to even the shards out: an example could then count twice. The two helpers that it starts with are its own.
        dataset, collator = self.train_dataset, self.data_collator
        lengths, max_tokens = lengths_of(dataset), self.args.max_tokens_per_micro_batch
        sampler = self._poisson_sampler(lengths)
        if self.args.privacy_unit_column is not None:
            dataset = dataset.remove_columns(self.args.privacy_unit_column)
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        if max_tokens is not None:
            check_token_budget(lengths, max_tokens=max_tokens)
        self.privacy.watch(sampler)
        is_weighted = sampler.weights is not None
        return DataLoader(
            dataset if sampler.weights is None else WeightedExamples(dataset, sampler.weights),
            batch_sampler=sampler,
            collate_fn=functools.partial(collate_piece, collator=collator, max_tokens=max_tokens, is_weighted=is_weighted),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return one draw's pieces. Their tokens are not counted: no loss may be scaled by them."""
        if self.args.disable_dp:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        pieces = list(itertools.islice(epoch_iterator, num_batches))
        self._pieces_left = len(pieces)
        return pieces, None

    def compute_per_sample_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Float[Tensor, " batch"]:
        """Return one loss per example. Override it for a task that `doppler_hf.privacy.losses.host_losses` has no rule for.

        Each entry must depend on its own example alone: no mean over the batch or over the batch's tokens. `model` must
        be called once, with the whole micro-batch. Text is padded on the right: a model with absolute positions counts
        padding on the left, and that follows the other examples.

        Args:
            model: The model, in training mode.
            inputs: One micro-batch, as the collator makes it, on the model's device.

        Returns:
            Losses, shape (batch,), attached to the graph.

        Raises:
            ValueError: A task without a rule, by the model's class.
        """
        base_model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        return per_sample_losses(model, inputs, base_model=base_model)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Float[Tensor, ""]:
        """Add one piece of a draw to the clipped sum; after the draw's last one, put the private gradient into `p.grad`.

        Args:
            model: The model.
            inputs: The piece, a list of micro-batches; without privacy one batch, as in the host.
            num_items_in_batch: As in the host; without effect here.

        Returns:
            The mean loss of the piece over the number of pieces, so that a step's sum is a mean, as in the host. With
            `report_train_loss="private"` the private mean of the whole step, with its last piece.
        """
        if self.args.disable_dp:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        loss = torch.zeros((), device=self.args.device)
        losses = [self._add_micro_batch(micro_batch) for micro_batch in inputs]
        if losses and self.args.report_train_loss == "raw":
            # None in an empty piece: models of transformers cannot be called with an empty batch.
            loss = torch.cat(losses).float().mean() / self.current_gradient_accumulation_steps
        self._pieces_left -= 1
        if self._pieces_left == 0:
            self._privatize()
            if self._private_loss is not None:
                loss = self._private_loss.release(step=self.state.global_step)
        return loss

    def _losses(self, inputs: Any) -> Float[Tensor, " batch"]:
        with self.compute_loss_context_manager():
            return self.compute_per_sample_loss(self.model, inputs)

    def _add_micro_batch(self, micro_batch: MicroBatch) -> Float[Tensor, " batch"]:
        losses = self._losses(self._prepare_inputs(micro_batch.inputs))
        weights = None if micro_batch.weights is None else micro_batch.weights.to(losses.device)
        self._clipped.backward(losses, weights=weights)
        if self._private_loss is not None:
            self._private_loss.add(losses.detach(), weights=weights)
        return losses.detach()

    def _privatize(self) -> None:
        # What the optimizer will only read in a subspace needs no more noise than that has coordinates. The subspaces come
        # from the gradients of earlier steps, which are private.
        for recorder in self._recorders():
            if recorder.record_raw:  # The plan then says that nothing is private.
                recorder.record_raw_gradient(self._clipped.sums, self._mechanism.expected_batch_size)
        subspaces = self._doppler_optimizer.subspaces()
        named = dict(self.model.named_parameters())
        gradients = self._mechanism.privatize(
            self._clipped.sums,
            step=self.state.global_step,
            subspaces={name: subspaces[parameter] for name, parameter in named.items() if parameter in subspaces},
        )
        for name, gradient in gradients.items():
            named[name].grad = gradient.to(named[name].dtype)
        self._clipped.reset()

    # --- right of the privacy boundary ------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the `DopplerOptimizer` of `args`: HF's weight-decay groups, the filter, the base optimizer, and GaLore."""
        if self.args.disable_dp:
            return super().create_optimizer(model)
        if self.optimizer is not None:  # A second run goes on with its states, under a noise of its own.
            self._doppler_optimizer.noise_std = self.privacy_plan().noise_std
            return self.optimizer
        trained = self.model if model is None else model
        decayed = set(self.get_decay_parameter_names(trained))
        galore, projected = GaloreArguments.parse(self.args.optim_args), {}
        if self.args.optim_target_modules is not None:
            projected = target_parameters(trained, self.args.optim_target_modules)
        named = [(name, p) for name, p in trained.named_parameters() if p.requires_grad]
        dimension = sum(p.numel() for _, p in named)
        low_pass_filter = chosen_filter(self.args, plan=self.privacy_plan(), dimension=dimension)
        self.privacy.filter_words = filter_in_words(self.args, low_pass_filter)
        groups = (
            {
                "params": [p for name, p in named if (name in decayed, name in projected) == (decays, is_projected)],
                "weight_decay": self.args.weight_decay if decays else 0.0,
                **({"rank": galore.rank} if is_projected else {}),
            }
            for is_projected in (True, False)
            for decays in (True, False)
        )
        self.optimizer = self._doppler_optimizer = DopplerOptimizer(
            [group for group in groups if group["params"]],
            lr=self.args.learning_rate,
            low_pass_filter=low_pass_filter,
            base=self.args.base_optimizer,
            beta2=self.args.adam_beta2,
            eps=self.args.adam_epsilon,
            floor=self.args.adam_bc_floor,
            noise_std=self.privacy_plan().noise_std,
            update_proj_gap=galore.update_proj_gap,
            scale=galore.scale,
            basis_change=galore.basis_change,
            projector=galore.projector,
            projector_source=galore.projector_source,
        )
        return self.optimizer

    # --- the host's frame -------------------------------------------------------------------------------------------

    def set_initial_training_values(self, args: DopplerTrainingArguments, dataloader: DataLoader[Any]) -> Any:
        """Let the host count its steps, and hold them against the plan that the noise was computed for."""
        values = super().set_initial_training_values(args, dataloader)
        if not args.disable_dp:
            assert values[-1] == self.privacy_plan().steps, "the host plans another number of steps than was accounted"
            self._attach_engine(dataloader)
        return values

    def _inner_training_loop(self, **kwargs: Any) -> Any:
        # The host's only frame around the loop in which the model is the final one (`train` may still make it, and
        # load a checkpoint into it).
        if self._weight_filter is not None:
            self._weight_filter.checkpoint = kwargs.get("resume_from_checkpoint")
        if self.args.disable_dp:
            return super()._inner_training_loop(**kwargs)
        # Autocast and placement as for training, but no DDP around the model: it would all-reduce raw gradients only
        # for them to be thrown away, and `prepare` leaves alone what has been prepared.
        self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self._synchronize_replicas()
        self._plan = plan = self._plan_from(kwargs.get("resume_from_checkpoint"))
        with contextlib.ExitStack() as self._while_training:
            self._mechanism = self._gaussian_mechanism(plan.noise_multiplier, plan.max_grad_norm, draw_ahead=True)
            self._private_loss = None
            if plan.loss_noise_multiplier is not None:
                of_loss = self._gaussian_mechanism(plan.loss_noise_multiplier, self.args.per_sample_max_loss)
                self._private_loss = PrivateLoss(of_loss, device=self.args.device)
            return super()._inner_training_loop(**kwargs)

    def _plan_from(self, checkpoint: str | None) -> PrivacyPlan:
        """Plan anew: the arguments may have changed since the last run, and what that one spent counts."""
        self.privacy.checkpoint = checkpoint
        earlier = self.privacy.earlier_ledger()
        state = None if checkpoint is None else Path(checkpoint) / TRAINER_STATE_NAME
        return PrivacyPlan.from_arguments(
            self.args,
            sampler=self._poisson_sampler(),
            records_raw=self._records_raw(),
            spent=() if earlier is None else earlier.history,
            first_step=TrainerState.load_from_json(str(state)).global_step if state is not None and state.exists() else 0,
        )

    def _gaussian_mechanism(self, noise_multiplier: float, max_norm: Any, *, draw_ahead: bool = False) -> GaussianMechanism:
        return self._while_training.enter_context(
            GaussianMechanism(
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_norm,
                expected_batch_size=self.privacy_plan().expected_batch_size,
                generator=self.args.noise_generator,
                floating_point_safe=self.args.floating_point_safe,
                draw_ahead=draw_ahead,
                seed=self.args.noise_seed,
            )
        )

    def _synchronize_replicas(self) -> None:
        """Give every process the weights of process 0, as DDP would."""
        if self.args.world_size > 1:
            for tensor in itertools.chain(self.model.parameters(), self.model.buffers()):
                torch.distributed.broadcast(tensor.data, src=0)

    def _attach_engine(self, dataloader: Any) -> None:
        def first_examples(number: int) -> dict[str, Any]:
            examples = [dataloader.dataset[index % len(dataloader.dataset)] for index in range(number)]
            # Whatever the budget of tokens, in one micro-batch: cut into single examples it would prove nothing.
            (micro_batch,) = dataloader.collate_fn(examples, max_tokens=None)
            return self._prepare_inputs(micro_batch.inputs)

        self._clipped = self._while_training.enter_context(
            attached_engine(self.model, self.args, losses_of=self._losses, first_examples=first_examples)
        )
        self.privacy.fallbacks = self._clipped.fallbacks

    def _recorders(self) -> list[GradientRecorder]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, GradientRecorder)]

    def _records_raw(self) -> bool:
        return any(recorder.record_raw for recorder in self._recorders())

    def _weights_applied(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._weight_filter is None else self._weight_filter.applied()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate and predict as the host does, with the filtered weights where there is a filter on them."""
        with self._weights_applied():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as the host does, the filtered weights where there is a filter on them, and the ledger beside the model."""
        with self._weights_applied():
            super().save_model(output_dir, _internal_call=_internal_call)
        # So the host saves checkpoints. Its `on_save` comes only after it has pushed them.
        is_checkpoint = _internal_call and output_dir is not None
        folder = self.args.output_dir if output_dir is None else output_dir
        if is_checkpoint and self._weight_filter is not None:
            self._weight_filter.add_to_checkpoint(folder, self.args)
        if is_checkpoint and not self.args.disable_dp:
            self.privacy.add_to_checkpoint(folder, self.args, self.state)
        elif not self.args.disable_dp:
            self.privacy.save_beside_model(folder, self.state)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as the host does, without privacy.

        Raises:
            ValueError: With privacy.
        """
        if not self.args.disable_dp:
            raise ValueError(
                "hyperparameter_search trains on the same data again and again: every trial would cost its own ε, and the "
                "choice among them is not accounted for. Search with disable_dp=True on public data, or start one run for "
                "each setting and add their ε up."
            )
        return super().hyperparameter_search(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count nothing in a private run: the host's count follows the lengths of the examples drawn, and is saved."""
        return super().floating_point_ops(inputs) if self.args.disable_dp else 0

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the host's model card, with the optimizer that there was, and what the privacy ledger says."""
        super().create_model_card(*args, **kwargs)
        if not self.args.disable_dp and self.privacy.ledger is not None and self.is_world_process_zero():
            card = Path(self.args.output_dir) / "README.md"
            weight_filter = "" if self.args.weight_filter is None else f"; on the weights: {self.args.weight_filter}"
            name_optimizer(
                card, f"{self.args.base_optimizer} of doppler_hf; filter: {self.privacy.filter_words}{weight_filter}"
            )
            add_privacy_section(card, self.privacy.ledger)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the host does; add ε so far to evaluations, and leave the training loss out if asked to."""
        if not self.args.disable_dp:
            if any(name.startswith("eval_") for name in logs):
                logs["epsilon"] = self.privacy.epsilon()
            if self.args.report_train_loss == "none":  # zeros
                logs.pop("loss", None)
                logs.pop("train_loss", None)
            for recorder in self._recorders():
                recorder.add_estimates(logs)
        super().log(logs, start_time)
