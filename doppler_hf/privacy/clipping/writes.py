"""What a forward pass writes into a model: buffers and parameters, which neither clipping nor noise would cover."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from doppler_hf.linalg import same, sums_of_bytes
from doppler_hf.shards import part_here


@contextlib.contextmanager
def nothing_written(model: nn.Module, *, again: Callable[[], object]) -> Iterator[None]:
    """Refuse a pass that writes statistics of the data.

    Args:
        model: The model.
        again: A function that calls the model with inputs of the same shapes and other content.

    Raises:
        ValueError: If a buffer or a parameter holds something else after the block, by its name.
    """
    trained, frozen, before = Untouched(model), frozen_sums(model), buffers_of(model)
    yield
    after = buffers_of(model)
    written = [name for name in after if name not in before or not same(after[name], before[name])]
    saved = model.state_dict().keys()
    if written:
        with torch.no_grad():
            again()
        # Sensitivity: a buffer that other data of the same shapes leave alone, such as a table of rotary embeddings, holds
        # nothing about an example but how long it is padded; and it is not saved.
        now = buffers_of(model)
        written = [name for name in written if name in saved or name not in now or not same(after[name], now[name])]
    sums = frozen_sums(model)
    # Sensitivity: one that the pass has made, such as a mean of the first batch, holds what it has seen.
    others = {name: sum_ for name, sum_ in sums.items() if name not in frozen or sum_ != frozen[name]}
    written += others
    if written:
        raise _of_written("frozen parameter" if written[0] in others else "buffer", written[0])
    trained.check()


def _of_written(kind: str, name: str) -> ValueError:
    return ValueError(
        f"The forward pass writes the {kind} {name!r}, which would keep statistics of the data that are neither clipped nor "
        "noised. Replace the layer by one that keeps none."
    )


@final
class Untouched:
    """Tells whether trained parameters are what they were: neither written in place, nor of other bits.

    The bits are known by their exclusive or, and by the sum of all words of 64: of numbers that move by as much to either
    side the one stays as it is, of two equal ones the other.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._versions, self._sums = self._marks()

    def check(self) -> None:
        """Refuse parameters that have changed since then.

        Raises:
            ValueError: If one has, by its name.
        """
        versions, sums = self._marks()
        # Sensitivity: of what a forward pass writes into a weight no noise is in what is published. One comparison of all,
        # since each waits for the device.
        if versions != self._versions or not torch.equal(sums, self._sums):
            changed = (sums != self._sums).any(dim=1).tolist()
            name = next(
                name
                for name, is_other, version, before in zip(self._trained, changed, versions, self._versions, strict=True)
                if is_other or version != before
            )
            raise ValueError(
                f"A forward pass, or a callback between two pieces of a draw, writes the trained parameter {name!r}, which "
                "would keep statistics of the data that are neither clipped nor noised. Replace the layer by one that keeps "
                "none, or let the callback write at the end of a step."
            )

    def _marks(self) -> tuple[list[int], Tensor]:
        marks = [_bits_of(part_here(value).detach()) for value in self._trained.values()]
        return [value._version for value in self._trained.values()], torch.stack(
            [each.to(marks[0].device) for each in marks]
        )


def _bits_of(values: Tensor) -> Tensor:
    """Return the exclusive or of all numbers, and the sums of `sums_of_bytes`."""
    values = torch.view_as_real(values) if values.is_complex() else values
    sums = sums_of_bytes(values)
    either = torch.hash_tensor(values).view(torch.int64) if values.numel() else sums.new_zeros(())
    return torch.cat([either.view(1), sums])


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers, saved ones and others, by name."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def frozen_sums(model: nn.Module) -> dict[str, float]:
    """Return the sum of each frozen parameter's elements by name: copies of a large model would not fit."""
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    # Of a weight in shards that of its part here: what is written into a gathered one is gone when that is freed.
    return {name: float(torch.sum(part_here(value), dtype=torch.float64)) for name, value in frozen.items()}


def of_other_content(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of the same shapes, with other numbers: half of each, or for whole numbers the largest of all.

    Labels that are one for each example are that of the first.
    """

    def other(name: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim == 1 and "label" in name:
            return value[:1].expand_as(value).clone()
        if not isinstance(value, Tensor) or value.ndim < 2 or "mask" in name:
            return value
        return value / 2 if value.is_floating_point() else value.max().expand_as(value).clone()

    return {name: other(name, value) for name, value in inputs.items()}
