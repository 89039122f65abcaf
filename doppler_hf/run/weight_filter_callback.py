"""A low-pass filter on the weights of a run: the filtered ones are evaluated and saved, the raw ones trained.

A checkpoint's model files hold the filtered weights; `weight_filter.pt` beside them holds the raw weights and the filter's
states, from which a run is resumed. Transformers has no hook around evaluating and saving, so `DopplerTrainer` wraps
`evaluation_loop` and `save_model` in `applied`.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from doppler_hf.filters import LowPassFilter
from doppler_hf.optim import WeightFilter
from doppler_hf.run.sharded_states import rows_of_state, whole_state_of
from doppler_hf.shards import part_here
from doppler_hf.training_args import DopplerTrainingArguments

WEIGHT_FILTER_NAME: Final = "weight_filter.pt"


class WeightFilterCallback(TrainerCallback):
    """Filters the trained weights of a run by a filter's name, or None. After training the model holds the filtered ones.

    Attributes:
        name: As given.
        checkpoint: The folder from which the next run is resumed, or None.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._filter = None if name is None else LowPassFilter.parse(name)
        self._weights: WeightFilter | None = None
        self._trained: list[Tensor] = []
        self.checkpoint: str | None = None

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Put the filtered weights into the model for the block; before and after a training nothing changes."""
        return contextlib.nullcontext() if self._weights is None else self._weights.applied()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the weights of the model, or continue with the raw ones of the checkpoint."""
        if self._filter is None:
            return
        self._trained = [p for p in kwargs["model"].parameters() if p.requires_grad]
        # Of weights in shards the rows that are here: the filter is of each coordinate by itself.
        weights = WeightFilter((part_here(p) for p in self._trained), self._filter)
        if self.checkpoint is not None:
            path = Path(self.checkpoint) / WEIGHT_FILTER_NAME
            if not path.exists():
                raise ValueError(
                    f"There is no {WEIGHT_FILTER_NAME} in {self.checkpoint}, so the raw weights are unknown. Resume without "
                    "a weight filter if that run had none, or from another checkpoint."
                )
            whole = torch.load(path, map_location="cpu", weights_only=True)
            weights.load_state_dict(self._each(whole, rows_of_state))
        self._weights = weights

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the filter with the new weights."""
        if self._weights is not None:
            self._weights.update()

    def add_to_checkpoint(self, folder: str, args: DopplerTrainingArguments) -> None:
        """Put the raw weights and the filter's states into a checkpoint from which a run may be resumed."""
        if self._weights is not None and not args.save_only_model:
            whole = self._each(self._weights.state_dict(), whole_state_of)
            if args.should_save:
                torch.save(whole, Path(folder) / WEIGHT_FILTER_NAME)

    def _each(self, state: dict[str, Any], change: Callable[[Any, Tensor], Any]) -> dict[str, Any]:
        """Return a state of the filter with what is of each parameter changed; of other parameters as it is."""
        if len(state["raw"]) != len(self._trained):
            return state
        changed = {
            name: [change(value, p) for value, p in zip(state[name], self._trained, strict=True)]
            for name in ("filter_states", "filtered", "raw")
        }
        return state | changed

    def on_train_end(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Leave the filtered weights in the model: the last ones, or the best checkpoint's, loaded by Transformers."""
        if self._weights is None:
            return
        if not (args.load_best_model_at_end and state.best_model_checkpoint is not None):
            self._weights.copy_to_params()
        self._weights = None
