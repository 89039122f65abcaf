"""Natural canaries: real examples under a wrong label, which a model can only get right by memorizing them.

    python -m scripts.experiments.mislabelled_audit loss recipes/image/digits-eps8.yaml --canaries 700 [--any_field value]

White-box, the attacker sees every private gradient gₜ and every model θₜ. The score of canary i is how much of its own
clipped gradient they contain, Σₜ ⟨gₜ, clip(∇fᵢ(θₜ))⟩, compared with canaries of the same label. Black-box, only the first
and the last model are seen, and the score is the decrease of the canary's loss, fᵢ(θ₀) − fᵢ(θ_T).

Canaries are taken out of the training set and put back, mislabelled, if their coin says so. They share parameters, so their
scores influence each other, and only the one-run bound holds for them.
"""

import argparse
import contextlib
import copy
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

from doppler_hf.audit.canaries import CANARY_COLUMN
from doppler_hf.audit.result import Method
from doppler_hf.audit.trainer import AuditTrainer
from doppler_hf.cli.audit import OVERRIDES, table_of, verdict
from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping.norms import clip_factors
from doppler_hf.privacy.losses import token_task, without_adapters
from doppler_hf.workloads.arguments import one_line_errors
from doppler_hf.workloads.recipe import parse_recipe

# How far the weights are moved for a directional derivative, relative to their norm. It is far enough for float32, and
# the loss is close to linear over that distance, because the direction is mostly noise.
RELATIVE_STEP: Final = 1e-2


class _MislabelledAuditTrainer(AuditTrainer):
    """The common part of the two attacks on mislabelled examples: the canaries and their losses."""

    one_run_methods: ClassVar[tuple[Method, ...]] = ("one run",)

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        base_model = without_adapters(model)
        is_classifier = isinstance(base_model, PreTrainedModel) and token_task(base_model) is None
        if not is_classifier or base_model.config.num_labels < 2:
            raise ValueError(
                f"{type(base_model).__name__} is not a classifier of examples, so a canary can have no wrong label. Use "
                "Dirac canaries."
            )
        self._num_labels = base_model.config.num_labels
        self._label_shifts: Int[Tensor, " num_canaries"]  # chosen with the rows
        super().__init__(model=model, args=args, **kwargs)
        self._canary_loader = self.get_test_dataloader(self._canary_rows)

    def choose_rows(
        self, num_rows: int, generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, " ordinary"], Int[np.ndarray, " num_canaries"]]:
        """Return the rows that stay and those that become canaries, and choose the canaries' wrong labels."""
        if len(self.included) >= num_rows:
            raise ValueError(
                f"num_canaries must be less than {num_rows}, the number of rows from which canaries are taken, got "
                f"{len(self.included)}. Lower num_canaries."
            )
        order = generator.permutation(num_rows)
        self._label_shifts = torch.from_numpy(generator.integers(1, self._num_labels, size=len(self.included)))
        return order[len(self.included) :], order[: len(self.included)]

    def add_canaries_to(self, model: nn.Module) -> None:
        """Add nothing: the model reads mislabelled examples as it is."""

    def canary_losses(
        self, model: nn.Module, inputs: dict[str, Any], canaries: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """Return the task's losses, those of canaries under their wrong label."""
        labels = inputs["labels"]
        if labels.ndim != 1 or labels.is_floating_point():
            found = f"shape {tuple(labels.shape)} and type {labels.dtype}"
            raise ValueError(f"labels must be one class per example, got {found}. Use Dirac canaries.")
        labels = torch.where(canaries >= 0, self._wrong_labels(labels, canaries), labels)
        return self.task_losses(model, {**inputs, "labels": labels})

    def _wrong_labels(self, labels: Int[Tensor, " batch"], canaries: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        shifts = self._label_shifts.to(labels.device)[canaries.clamp(min=0)]
        return (labels + shifts) % self._num_labels

    def canary_batches(self) -> Iterator[tuple[dict[str, Any], Int[np.ndarray, " batch"]]]:
        """Yield all canaries, included or not, in batches of inputs with the canaries' numbers."""
        for inputs in self._canary_loader:
            yield inputs, inputs[CANARY_COLUMN].cpu().numpy()

    def losses_without_gradient(self, model: nn.Module, inputs: dict[str, Any]) -> Float[np.ndarray, " batch"]:
        """Return the losses of a batch of canaries, dropout off, shape (batch,)."""
        model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_per_sample_loss(model, inputs).double().cpu().numpy()


class GradientAuditTrainer(_MislabelledAuditTrainer):
    """An audited run with mislabelled examples, seen white-box: scores are inner products with the private gradients.

    Each step costs about four more forward passes over all canaries.
    """

    kind: ClassVar[str] = "natural"

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        super().__init__(model=model, args=args, **kwargs)
        # Copied now: before the first step the trainer attaches its engine to its own model.
        self._replica = copy.deepcopy(self.model)
        self._engine = ClippedGradients(self._replica)
        self._while_attacking = contextlib.ExitStack()
        self._labels = np.zeros(len(self.included), dtype=np.int64)

    def begin_attack(self) -> None:
        """Attach an engine to the attacker's copy of the model, for the norms of the canaries' gradients."""
        self._while_attacking.enter_context(self._engine)

    def see_gradient(self, gradients: Mapping[str, Float[Tensor, "..."]]) -> None:
        """Add the inner product of every canary's clipped gradient with the private one."""
        size = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        weights = math.sqrt(sum(float(p.detach().double().square().sum()) for p in self.model.parameters()))
        if size == 0.0:
            return
        step = RELATIVE_STEP * max(weights, 1.0) / size
        for inputs, numbers in self.canary_batches():
            self._move(gradients, by=0.0)
            norms = self._engine.backward(self.compute_per_sample_loss(self._replica.eval(), inputs))
            self._engine.reset()
            self._move(gradients, by=step)
            ahead = self.losses_without_gradient(self._replica, inputs)
            self._move(gradients, by=-step)
            behind = self.losses_without_gradient(self._replica, inputs)
            # One factor for all layers, also where each is clipped on its own: a score need not be exact to be valid.
            factors = clip_factors(norms, max_grad_norm=self.args.per_sample_max_grad_norm, clipping=self.args.clipping)
            self.scores[numbers] += (ahead - behind) / (2 * step) * factors.double().cpu().numpy()
            self._labels[numbers] = self._wrong_labels(inputs["labels"], inputs[CANARY_COLUMN]).cpu().numpy()

    def end_attack(self) -> None:
        """Compare each canary with those of the same label: what they have in common says nothing about one of them."""
        self._while_attacking.close()
        for label in np.unique(self._labels):
            self.scores[self._labels == label] -= self.scores[self._labels == label].mean()

    @torch.no_grad()
    def _move(self, gradients: Mapping[str, Float[Tensor, "..."]], *, by: float) -> None:
        """Set the copy's weights to the model's plus `by` times the gradient."""
        for (name, copied), parameter in zip(self._replica.named_parameters(), self.model.parameters(), strict=True):
            copied.copy_(parameter)
            if by != 0.0 and name in gradients:
                copied.add_(gradients[name], alpha=by)


class LossAuditTrainer(_MislabelledAuditTrainer):
    """An audited run with mislabelled examples, seen black-box: scores are the decrease of their loss.

    The attack needs the first and the last model only, and proves less than the white-box attacks.
    """

    kind: ClassVar[str] = "loss"

    def begin_attack(self) -> None:
        """Add the loss of every canary under the first model."""
        self._add_losses(sign=1.0)

    def see_gradient(self, gradients: Mapping[str, Float[Tensor, "..."]]) -> None:
        """Do nothing: a black-box attacker does not see gradients."""

    def end_attack(self) -> None:
        """Subtract the loss of every canary under the last model."""
        self._add_losses(sign=-1.0)

    def _add_losses(self, *, sign: float) -> None:
        for inputs, numbers in self.canary_batches():
            self.scores[numbers] += sign * self.losses_without_gradient(self.model, inputs)


ATTACKS: Final[Mapping[str, type[_MislabelledAuditTrainer]]] = {"gradient": GradientAuditTrainer, "loss": LossAuditTrainer}


def main(argv: Sequence[str] | None = None) -> None:
    """Train a recipe with mislabelled canaries, attack the run, and write what `doppler-hf audit` writes."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.experiments.mislabelled_audit", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("attack", choices=tuple(ATTACKS), help="white-box by private gradients, or black-box by losses")
    parser.add_argument("recipe", help="YAML recipe of a private run of a classifier; fields of it may follow as flags")
    parser.add_argument("--canaries", type=int, default=700, help="default: %(default)s")
    options, flags = parser.parse_known_args(argv)
    with one_line_errors():
        workload, training_args = parse_recipe([options.recipe, *flags, *OVERRIDES])
    output_dir = training_args.output_dir
    with tempfile.TemporaryDirectory() as training_args.output_dir:
        auditor = ATTACKS[options.attack](
            model=workload.model,
            args=training_args,
            num_canaries=options.canaries,
            train_dataset=workload.train_dataset,
            data_collator=workload.data_collator,
            processing_class=workload.processing_class,
        )
        result = auditor.audit()
    result.save(output_dir)
    Console().print(table_of(result), verdict(result))


if __name__ == "__main__":
    main()
