"""A small linear image of a gradient: a count sketch (Charikar, Chen and Farach-Colton).

A gradient of d coordinates becomes k = `dimensions` numbers, y_j = Σ_{i: h(i)=j} ε_i g_i. Coordinate i is in column i mod W
of a table of width W = min(d, 2^17 - 1). Its sign is that of the row times that of the column, which determines the sum.
E‖P g‖² is ‖g‖² over the public seed. White noise of standard deviation σ becomes independent noise of standard deviation
σ √(d/k) in each number, up to how evenly d divides by k. P is linear: the filtered gradient's image is the filtered image.
"""

from collections.abc import Sequence
from typing import Final, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

# A Mersenne prime: no layer's width divides it, so that a matrix's rows and columns do not line up with the table's.
TABLE_WIDTH: Final = 2**17 - 1


@final
class CountSketch:
    """The map from a gradient of d coordinates to k numbers; see the module."""

    def __init__(self, number: int, *, dimensions: int, seed: int) -> None:
        # Not torch's generator, from which the model's dropout is drawn.
        generator = np.random.default_rng(seed)
        self._dimensions = dimensions
        self._width = min(number, TABLE_WIDTH)
        rows = -(-number // self._width)
        self._row_signs = torch.from_numpy(generator.choice([-1.0, 1.0], rows).astype(np.float32))
        self._column_signs = torch.from_numpy(generator.choice([-1.0, 1.0], self._width).astype(np.float32))
        # Each sum has as many columns as the others, up to one.
        self._sums = torch.from_numpy(generator.permutation(self._width) % dimensions)

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Float[Tensor, "..."]]) -> Float[np.ndarray, " dimensions"]:
        """Return P g in float32, where g is the concatenation of these tensors."""
        table = torch.zeros(self._width, device=tensors[0].device)
        first = 0
        for tensor in tensors:
            flat = tensor.reshape(-1).float()
            row, column = divmod(first, self._width)
            # With zeros for the rest of the rows in which it begins and ends.
            padded = F.pad(flat, (column, -(column + len(flat)) % self._width))
            rows = padded.view(len(padded) // self._width, self._width)
            table += self._row_signs[row : row + len(rows)].to(flat) @ rows
            first += len(flat)
        signed = table * self._column_signs.to(table)
        image = torch.zeros(self._dimensions, device=table.device).index_add_(0, self._sums.to(table.device), signed)
        return image.cpu().numpy()
