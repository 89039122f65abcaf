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
from typing import Any

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import has_length

from doppler_hf.callbacks import PrivacyCallback
from doppler_hf.data import check_token_budget, collate_piece, lengths_of
from doppler_hf.galore_args import GaloreArguments, target_parameters
from doppler_hf.optim import DopplerOptimizer
from doppler_hf.per_sample_loss import per_sample_losses
from doppler_hf.plan import PrivacyPlan
from doppler_hf.privacy import ClippedGradients, GaussianMechanism, PoissonSampler, check_per_sample_gradients
from doppler_hf.training_args import DopplerTrainingArguments


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

    def __init__(self, model: Any = None, args: DopplerTrainingArguments | None = None, **kwargs: Any) -> None:
        if not isinstance(args, DopplerTrainingArguments):
            raise ValueError(f"args must be DopplerTrainingArguments, got {type(args).__name__}.")
        super().__init__(model=model, args=args, **kwargs)
        self._plan: PrivacyPlan | None = None
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
            self._plan = PrivacyPlan.from_arguments(self.args, sampler=self._poisson_sampler())
        return self._plan

    # --- left of the privacy boundary -------------------------------------------------------------------------------

    def _poisson_sampler(self, lengths: list[int] | None = None) -> PoissonSampler:
        return PoissonSampler(
            num_examples=len(self.train_dataset),
            expected_batch_size=self.get_total_train_batch_size(self.args),
            micro_batches=self.args.gradient_accumulation_steps,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            lengths=lengths,
            seed=self.args.noise_seed,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of Poisson draws: `gradient_accumulation_steps` items a draw, each a list of micro-batches."""
        if self.args.disable_dp or self.train_dataset is None:
            return super().get_train_dataloader()
        # The host's `_get_dataloader` ends in `accelerator.prepare`, which shards any batch sampler and repeats examples
        # to even the shards out: an example could then count twice. The two helpers that it starts with are its own.
        dataset, collator = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        lengths, max_tokens = lengths_of(self.train_dataset), self.args.max_tokens_per_micro_batch
        sampler = self._poisson_sampler(lengths)
        if max_tokens is not None:
            check_token_budget(lengths, max_tokens=max_tokens)
        self.privacy.watch(sampler)
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=functools.partial(collate_piece, collator=collator, max_tokens=max_tokens),
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
        """Return one loss per example. Override it for a task that `doppler_hf.per_sample_loss` has no rule for.

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
            The mean loss of the piece over the number of pieces, so that a step's sum is a mean, as in the host.
        """
        if self.args.disable_dp:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        loss = torch.zeros((), device=self.args.device)
        losses = [self._add_micro_batch(micro_batch) for micro_batch in inputs]
        if losses:  # None in an empty piece: models of transformers cannot be called with an empty batch.
            loss = torch.cat(losses).float().mean() / self.current_gradient_accumulation_steps
        self._pieces_left -= 1
        if self._pieces_left == 0:
            self._privatize()
        return loss

    def _losses(self, inputs: Any) -> Float[Tensor, " batch"]:
        with self.compute_loss_context_manager():
            return self.compute_per_sample_loss(self.model, inputs)

    def _add_micro_batch(self, inputs: dict[str, Any]) -> Float[Tensor, " batch"]:
        losses = self._losses(self._prepare_inputs(inputs))
        self._clipped.backward(losses)
        return losses.detach()

    def _privatize(self) -> None:
        # What the optimizer will only read in a subspace needs no more noise than that has coordinates. The subspaces come
        # from the gradients of earlier steps, which are private.
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
        if self.args.disable_dp or self.optimizer is not None:
            return super().create_optimizer(model)
        trained = self.model if model is None else model
        decayed = set(self.get_decay_parameter_names(trained))
        galore, projected = GaloreArguments.parse(self.args.optim_args), {}
        if self.args.optim_target_modules is not None:
            projected = target_parameters(trained, self.args.optim_target_modules)
        named = [(name, p) for name, p in trained.named_parameters() if p.requires_grad]
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
            low_pass_filter=self.privacy_plan().low_pass_filter,
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
        if self.args.disable_dp:
            return super()._inner_training_loop(**kwargs)
        # Autocast and placement as for training, but no DDP around the model: it would all-reduce raw gradients only
        # for them to be thrown away, and `prepare` leaves alone what has been prepared.
        self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self._synchronize_replicas()
        self.privacy.checkpoint = kwargs.get("resume_from_checkpoint")
        self._plan = None  # The arguments may have changed since the last run.
        plan = self.privacy_plan()
        self._mechanism = GaussianMechanism(
            noise_multiplier=plan.noise_multiplier,
            max_grad_norm=plan.max_grad_norm,
            expected_batch_size=plan.expected_batch_size,
            seed=self.args.noise_seed,
        )
        with contextlib.ExitStack() as self._while_training:
            return super()._inner_training_loop(**kwargs)

    def _synchronize_replicas(self) -> None:
        """Give every process the weights of process 0, as DDP would."""
        if self.args.world_size > 1:
            for tensor in itertools.chain(self.model.parameters(), self.model.buffers()):
                torch.distributed.broadcast(tensor.data, src=0)

    def _attach_engine(self, dataloader: DataLoader[Any]) -> None:
        """Hold the engine against plain autograd, attach it to the model, and run it once.

        Nothing about the examples that this takes is released: the outcome depends on the architecture alone.
        """
        with torch.random.fork_rng():  # Dropout of these runs must not shift the user's random numbers.
            if self.args.grad_sample_self_check:
                check_per_sample_gradients(
                    self.model,
                    self._losses,
                    self._first_examples(2, dataloader),
                    engine=self.args.grad_sample_engine,
                    norm_rule=self.args.grad_sample_norm_rule,
                    # Batches of one and of two are rounded differently.
                    tolerance=0.1 if self.args.bf16 or self.model.dtype == torch.bfloat16 else 1e-3,
                )
            self._clipped = self._while_training.enter_context(
                ClippedGradients(
                    self.model,
                    max_grad_norm=self.privacy_plan().max_grad_norm,
                    clipping=self.args.clipping,
                    granularity=self.args.clipping_granularity,
                    engine=self.args.grad_sample_engine,
                    norm_rule=self.args.grad_sample_norm_rule,
                )
            )
            # As in training, dropout included: a layer that the engine cannot do is refused now.
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            self.model.train()
            self._clipped.backward(self._losses(self._first_examples(3, dataloader)))
        self._clipped.reset()
        self.privacy.fallbacks = self._clipped.fallbacks
        saved = self.model.state_dict().keys()
        for name, buffer in self.model.named_buffers():
            if name in saved and not torch.equal(buffer, buffers[name]):
                raise ValueError(
                    f"The forward pass writes the buffer {name!r}, which is saved with the model but neither clipped nor "
                    "noised. Replace the layer by one that keeps no statistics of the data."
                )

    def _first_examples(self, number: int, dataloader: Any) -> dict[str, Any]:
        examples = [dataloader.dataset[index % self.privacy_plan().num_examples] for index in range(number)]
        # Whatever the budget of tokens, in one micro-batch: cut into single examples it would prove nothing.
        (micro_batch,) = dataloader.collate_fn(examples, max_tokens=None)
        return self._prepare_inputs(micro_batch)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count nothing in a private run: the host's count follows the lengths of the examples drawn, and is saved."""
        return super().floating_point_ops(inputs) if self.args.disable_dp else 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the host does; add ε so far to evaluations, and leave the training loss out if asked to."""
        if not self.args.disable_dp:
            if any(name.startswith("eval_") for name in logs):
                logs["epsilon"] = self.privacy.epsilon()
            if self.args.report_train_loss == "none":
                logs.pop("loss", None)
                logs.pop("train_loss", None)
        super().log(logs, start_time)
