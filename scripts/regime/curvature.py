"""How curved the loss is where a run has come to: is training at the limit that its filter bears?

With g the mean of the clipped gradients, a step of size η in a direction in which the Jacobian of g has the eigenvalue λ is
stable up to the ηλ of `stability_limit`. The largest eigenvalue is found by the power method: products of the Jacobian with
a direction are differences of g, and each new direction is the last product. The images are held-out ones, of which
the network has learnt none by heart.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from transformers import TrainerCallback

from scripts.regime.cells import METHODS, Cell, train_cell
from scripts.regime.results import Results
from scripts.regime.search import Line, search_of
from scripts.regime.tasks import TASKS, Loaded, network_of

IMAGES: Final = 2000
PRODUCTS: Final = 16
_AT_ONCE: Final = 250
# Of the weights' length: rounding is a hundredth of a difference of g, and its third derivative less.
_STEP: Final = 1e-3
# Shares of a run after which λ is measured.
SHARES: Final = (0.3, 0.6, 1.0)

Weights = Mapping[str, Tensor]


def mean_clipped_gradient(network: nn.Module, weights: Weights, data: Loaded, *, clip_norm: float) -> Tensor:
    """Return the mean of the clipped gradients of held-out images at some weights, flat, in double precision."""
    rows = data.held_out[:IMAGES]

    def loss_of(weights: Weights, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, dict(weights), (image[None],)).logits, label[None])

    total = torch.zeros(sum(each.numel() for each in weights.values()), dtype=torch.float64)
    for first in range(0, len(rows), _AT_ONCE):
        batch = data.batch(rows[first : first + _AT_ONCE])
        gradients, _ = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))(weights, batch["inputs"], batch["labels"])
        flat = torch.cat([each.flatten(1) for each in gradients.values()], dim=1)
        factors = (clip_norm / flat.norm(dim=1)).clamp(max=1.0)
        total += (factors[None] @ flat)[0].double()
    return total / len(rows)


def largest_eigenvalue(field: Callable[[Tensor], Tensor], at: Tensor, *, start: Tensor, step: float) -> tuple[float, Tensor]:
    """Return the largest eigenvalue of a field's Jacobian by the power method, and its direction.

    Args:
        field: The field; it takes and returns vectors.
        at: Where the Jacobian is taken.
        start: The first direction.
        step: By how much `at` is moved both ways for a difference.
    """
    direction, value = start / start.norm(), 0.0
    for _ in range(PRODUCTS):
        product = (field(at + step * direction) - field(at - step * direction)) / (2 * step)
        value = float(product @ direction)
        direction = product / product.norm()
    return value, direction


class Curvature(TrainerCallback):
    """Measures the largest eigenvalue at some shares of a run.

    Attributes:
        found: Share of the run → λ.
    """

    def __init__(self, cell: Cell, data: Loaded) -> None:
        self._cell, self._data = cell, data
        self._network = network_of(TASKS[cell.task])  # the run's own has the engine's layers
        self._direction: Tensor | None = None
        self.found: dict[float, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Measure where it is due."""
        share = next((each for each in SHARES if round(each * state.max_steps) == state.global_step), None)
        if share is None:
            return
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        flat = torch.cat([each.flatten() for each in weights.values()]).double()
        shapes = {name: each.shape for name, each in weights.items()}

        def field(values: Tensor) -> Tensor:
            parts = values.float().split([shape.numel() for shape in shapes.values()])
            moved = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
            return mean_clipped_gradient(self._network, moved, self._data, clip_norm=self._cell.clip_norm)

        # Its own generator, so that the run's draws and noise stay as they are.
        start = torch.randn(len(flat), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        value, self._direction = largest_eigenvalue(
            field, flat, start=start if self._direction is None else self._direction, step=_STEP * float(flat.norm())
        )
        self.found[share] = float(f"{value:.4g}")


def measured(cell: Cell, data: Loaded, *, folder: Path) -> dict[str, Any]:
    """Train a cell, and return its largest eigenvalues beside what it is."""
    curvature = Curvature(cell, data)
    found = train_cell(cell, data, folder=folder, callbacks=[curvature])
    kept = {name: found[name] for name in (*vars(cell), "low_pass_filter", "held_out", "seconds", "date")}
    return kept | {"largest_eigenvalue": {f"{share:g}": value for share, value in curvature.found.items()}}


def cells_to_measure(task: str, results: Results) -> list[Cell]:
    """Return the runs of SGD at the best rate of each filter, for those that are known."""
    searches = [search_of(Line(task, name), results) for name, method in METHODS.items() if method.base == "sgd"]
    return [search.cell(search.best) for search in searches if search.best is not None]
