"""Evaluations of a `DopplerTrainer`: with your own loss, and beside what always naming one label reaches."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from doppler_hf.privacy.losses import as_losses
from doppler_hf.privacy.token_losses import IGNORED_LABEL
from doppler_hf.run.beside_model import spoken_for_when_converted
from doppler_hf.run.own_code import overrides
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.published_results import is_training_data
from doppler_hf.run.sharding import ShardedTrainer
from doppler_hf.run.summary import print_if_not_learnt


class EvaluatingTrainer(ShardedTrainer):
    """`Trainer` whose evaluations have the loss of each example; `DopplerTrainer` sets the attributes."""

    _run: PrivateRun | None
    compute_per_sample_loss: Callable[..., Any]
    evaluations_of_training_data: list[dict[str, float]]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch: as Transformers, or the mean of your own `compute_per_sample_loss`.

        It is called in evaluations, and with `disable_dp` in the training, too.
        """
        if not overrides(self, "compute_per_sample_loss"):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            return mean_and_outputs(self.compute_per_sample_loss, model, inputs)
        losses = as_losses(self.compute_per_sample_loss(model, dict(inputs)))
        # With disable_dp weights of clipped gradients are weights of losses.
        weights = losses.weights if model.training else None
        mean = (losses.values if weights is None else losses.values * weights).mean()
        # Transformers takes a loss of a model that can count the items of all micro-batches to be a share of their mean.
        is_share = num_items_in_batch is not None and self.model_accepts_loss_kwargs
        return mean / self.current_gradient_accumulation_steps if is_share else mean

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate and predict as Transformers does, and add what always naming one label reaches."""
        if self._sharding.is_asked_for:  # before the first training the model is whole, and on no device
            self._prepare_model()
        run = self._run
        with spoken_for_when_converted(run, self.args, model=self.model):
            output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not self.args.disable_dp:
            is_own_loss = overrides(self, "compute_per_sample_loss")
            add_baselines(output, prefix=metric_key_prefix, is_own_loss=is_own_loss)
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as Transformers does. After a private training say if the model has learnt little."""
        metrics = super().evaluate(*args, **kwargs)
        evaluated = args[0] if args else kwargs.get("eval_dataset")
        if evaluated is not None and is_training_data(self.train_dataset, evaluated):
            # Privacy: what is published leaves these out.
            self.evaluations_of_training_data.append(self.state.log_history[-1])
        run = self._run
        if run is not None and run.ledger is not None and not run.is_running and self.is_world_process_zero():
            print_if_not_learnt(metrics)
        return metrics


def add_baselines(output: EvalLoopOutput, *, prefix: str, is_own_loss: bool) -> None:
    """Add to an evaluation (in place) what always naming the most frequent label of its set, or the mean, reaches."""
    labels = output.label_ids
    if not isinstance(labels, np.ndarray) or not labels.size:
        return
    if f"{prefix}_accuracy" in output.metrics and labels.dtype.kind in "iu":
        _, counts = np.unique(labels[labels != IGNORED_LABEL], return_counts=True)  # of tokens, too
        output.metrics[f"{prefix}_majority_class_accuracy"] = float(counts.max(initial=0) / max(1, counts.sum()))
    if labels.dtype.kind == "f" and labels.ndim == 1 and not is_own_loss:  # of a regression: several classes have a row each
        output.metrics[f"{prefix}_mean_label_loss"] = float(labels.astype(np.float64).var())


def mean_and_outputs(
    losses_of: Callable[[nn.Module, dict[str, Any]], Float[Tensor, " batch"]], model: nn.Module, inputs: dict[str, Any]
) -> tuple[Float[Tensor, ""], Any]:
    """Return the mean loss of an evaluated batch, and the model's outputs as Transformers takes them."""
    found: list[Any] = []
    with model.register_forward_hook(lambda module, args, outputs: found.append(outputs)):
        mean = as_losses(losses_of(model, dict(inputs))).values.mean()
    outputs = found[0] if len(found) == 1 else ()
    if len(found) != 1:
        warnings.warn(
            f"Evaluations have no predictions: compute_per_sample_loss calls the model {len(found)} times for a batch. Call "
            "model(...) once, or for metrics override prediction_step.",
            stacklevel=2,
        )
    if isinstance(outputs, dict):
        return mean, outputs
    return mean, (mean, *(outputs if isinstance(outputs, tuple) else (outputs,)))
