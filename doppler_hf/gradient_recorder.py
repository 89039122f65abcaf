"""`GradientRecorder`: records a small image of each step's private gradient, from which its spectrum can be measured.

The map P from gradient to image is a count sketch (Charikar, Chen and Farach-Colton). A gradient of d coordinates becomes
k = `dimensions` numbers, y_j = Σ_{i: h(i)=j} ε_i g_i. Coordinate i is in column i mod W of a table of width
W = min(d, 2^17 - 1). Its sign ε_i is the sign of its row times that of its column, and the column determines h(i). Over the
public seed, E‖P g‖² is ‖g‖². White noise of standard deviation σ becomes independent noise of standard deviation σ √(d/k) in
each number, up to how evenly d divides by k. P is linear, so the image of the filtered gradient is the filtered image.

Privacy: images of `p.grad` are post-processing of the private gradients, and as public as these.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import TrainerCallback, TrainerState

from doppler_hf.errors import Refusal
from doppler_hf.filters import PAPER_FILTERS
from doppler_hf.training_args import DopplerTrainingArguments

FILE_NAME: Final = "private_gradients.npz"
# The width is a Mersenne prime, which no layer's width divides, so that a matrix's rows do not line up with the table's.
TABLE_WIDTH: Final = 2**17 - 1


@final
class CountSketch:
    """The map from a gradient of d coordinates to k numbers; see the docstring of the module."""

    def __init__(self, number: int, *, dimensions: int, seed: int) -> None:
        # Torch's generator is not used, because the model's dropout is drawn from it.
        generator = np.random.default_rng(seed)
        self._dimensions = dimensions
        self._width = min(number, TABLE_WIDTH)
        rows = -(-number // self._width)
        self._row_signs = torch.from_numpy(generator.choice([-1.0, 1.0], rows).astype(np.float32))
        self._column_signs = torch.from_numpy(generator.choice([-1.0, 1.0], self._width).astype(np.float32))
        # All sums have the same number of columns, up to one.
        self._sums = torch.from_numpy(generator.permutation(self._width) % dimensions)

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Float[Tensor, "..."]]) -> Float[np.ndarray, " dimensions"]:
        """Return P g in float32, where g is the concatenation of these tensors."""
        table = torch.zeros(self._width, device=tensors[0].device)
        first = 0
        for tensor in tensors:
            flat = tensor.reshape(-1).float()
            row, column = divmod(first, self._width)
            # Zeros fill the rest of the table's rows in which the tensor begins and ends.
            padded = F.pad(flat, (column, -(column + len(flat)) % self._width))
            rows = padded.view(len(padded) // self._width, self._width)
            table += self._row_signs[row : row + len(rows)].to(flat) @ rows
            first += len(flat)
        signed = table * self._column_signs.to(table)
        image = torch.zeros(self._dimensions, device=table.device).index_add_(0, self._sums.to(table.device), signed)
        return image.cpu().numpy()


@final
class GradientRecorder(TrainerCallback):
    """Records the private gradients of a training run, from which `doppler_hf.filters` estimates signal and spectrum.

    With every checkpoint and at the end, the recording is written to `private_gradients.npz` in the output folder, as
    `private` and `noise_std`. With several processes, process 0 records. A second training run starts a new recording. A
    resumed run does so too, in a file that is named after its first step. The run needs white noise.

    Args:
        dimensions: k, how many numbers are recorded per gradient. The estimate of the signal's power has a relative standard
            deviation of about √(2/k) over the seed, and more if few coordinates have most of the power.
        seed: The seed of the projection. It is public, and independent of the noise.

    Attributes:
        noise_std: Standard deviation of the noise in each recorded number, σ_DP √(d/k); 0 before training.
        low_pass_filter: The run's filter; "none" before training.

    Raises:
        ValueError: If `dimensions` is out of range. Before the first step of a run, if the run is not private, has shaped
            noise or weights in shards, or trains fewer parameters than `dimensions`.

    Example:
        >>> recorder = GradientRecorder()
        >>> DopplerTrainer(model=model, args=args, train_dataset=train, callbacks=[recorder]).train()
        >>> estimate_power(recorder.private, noise_std=recorder.noise_std).snr
        0.02
    """

    def __init__(self, *, dimensions: int = 256, seed: int = 0) -> None:
        if not 1 <= dimensions <= TABLE_WIDTH:
            raise Refusal(
                "out-of-range",
                f"GradientRecorder needs dimensions from 1 to {TABLE_WIDTH}; got {dimensions}. Leave dimensions out for "
                "256.",
            )
        self.dimensions = dimensions
        self.seed = seed
        self.noise_std = 0.0
        self.low_pass_filter = PAPER_FILTERS["none"]
        self._private: list[Float[np.ndarray, " dimensions"]] = []
        # Both are set when the run begins.
        self._parameters: dict[str, Tensor] = {}
        self._sketch: CountSketch | None = None
        self._file_name = FILE_NAME

    @property
    def private(self) -> Float64[np.ndarray, "steps dimensions"]:
        """The images of the private gradients, one row for each step."""
        return np.array(self._private, dtype=np.float64).reshape(-1, self.dimensions)

    def on_train_begin(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin a recording of this run's gradients, or refuse the run before its first step."""
        if args.disable_dp:
            raise Refusal(
                "no-private-gradients",
                "GradientRecorder records private gradients, and a run with disable_dp=True has none. Leave the callback "
                "or disable_dp out.",
            )
        # With noise_shape="auto", the chosen shape is among the terms of the run that trackers get.
        shape = args.to_dict().get("privacy/noise_shape", args.noise_shape)
        if shape != "white":
            raise Refusal(
                "recorder-of-shaped-noise",
                f"GradientRecorder needs white noise to separate signal from noise; this run has noise_shape={shape!r}. Set "
                "noise_shape='white'.",
            )
        # Transformers has wrapped the optimizer by now (accelerate's AcceleratedOptimizer).
        optimizer = kwargs["optimizer"].optimizer
        self._parameters = {name: p for name, p in kwargs["model"].named_parameters() if p.requires_grad}
        if any(isinstance(p, DTensor) for p in self._parameters.values()):
            raise Refusal(
                "recorder-of-shards",
                "GradientRecorder needs whole gradients, but FSDP splits the trained weights over the processes. Use "
                "recipes/accelerate/ddp.yaml.",
            )
        number = sum(p.numel() for p in self._parameters.values())
        if self.dimensions > number:
            raise Refusal(
                "more-dimensions-than-parameters",
                f"GradientRecorder has dimensions={self.dimensions}, but the model has only {number} trained parameters. "
                f"Make it with GradientRecorder(dimensions={number}) or a smaller number.",
            )
        self._sketch = CountSketch(number, dimensions=self.dimensions, seed=self.seed)
        self.noise_std = optimizer.noise_std * (number / self.dimensions) ** 0.5
        self.low_pass_filter = optimizer.low_pass_filter
        self._private = []
        # A resumed run writes to a file of its own, so that the recording up to the checkpoint stays.
        first, path = state.global_step, Path(FILE_NAME)
        self._file_name = f"{path.stem}-from-{first}{path.suffix}" if first else FILE_NAME

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Record the private gradient, just before the optimizer reads it."""
        if state.is_world_process_zero:
            assert self._sketch is not None
            self._private.append(self._sketch([p.grad for p in self._parameters.values() if p.grad is not None]))

    def on_save(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the recording so far, in case the run is interrupted before its end."""
        self._write(args, state)

    def on_train_end(self, args: DopplerTrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the recording."""
        self._write(args, state)

    def _write(self, args: DopplerTrainingArguments, state: TrainerState) -> None:
        if state.is_world_process_zero and self._private:
            path = Path(str(args.output_dir), self._file_name)
            np.savez(path, private=self.private, noise_std=self.noise_std, low_pass_filter=str(self.low_pass_filter))
