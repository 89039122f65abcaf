"""Micro-batches that do not fit into memory, in halves of their examples.

Sensitivity. Where a draw is cut follows from all that is in it: one example more may let others be computed in another part.
Their clipped contributions stay what they were, but for rounding. The inputs are cut after they were collated, so that each
row keeps its numbers and its padding; the checks before the first step hold that a loss is that of its row alone, whatever
is beside it; and each part has new random numbers, which are as likely for a row in any of them if rows share none. If they
do (`shared_coins`), examples would move to the numbers of another part, each by up to 2C: then nothing is halved, and
nothing if that was not looked at. The rows of one clipped gradient, such as the views of an example, stay together, and a
part keeps its weight. The numbers of a pass that failed are part of no sum.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from accelerate.utils.memory import clear_device_cache
from jaxtyping import Float
from torch import Tensor

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.batching.micro_batches import MicroBatch
from doppler_hf.privacy.clipping.out_of_memory import is_out_of_memory
from doppler_hf.privacy.clipping.plain_autograd import Losses
from doppler_hf.privacy.rows import has_rows
from doppler_hf.run.in_step import InStep, PassLeft

SMALLER = "Set a smaller per_device_train_batch_size with more gradient_accumulation_steps, or max_tokens_per_micro_batch"
_SINGLE = int | float | str | None


class Rows(NamedTuple):
    """What the check before the first step has found of the rows of a batch.

    Attributes:
        names: Tensors with a row for each example.
        shared: Where the model draws random numbers that rows share; see `DrawnInForward`.
    """

    names: frozenset[str]
    shared: Sequence[str]


def names_of_rows(batches: Mapping[int, Mapping[str, Any]]) -> frozenset[str]:
    """Return which tensors have as many rows as examples, by the number of examples: another size may be equal by chance."""
    return frozenset.intersection(
        *(frozenset(name for name in inputs if has_rows(inputs[name], number)) for number, inputs in batches.items())
    )


class Spare(NamedTuple):
    """What a process computes while others have micro-batches and it has none, since all must gather the weights.

    Attributes:
        in_step: The meetings of the processes.
        inputs: An example.
        losses_of: A function that returns its loss.
    """

    in_step: InStep
    inputs: Mapping[str, Any]
    losses_of: Losses


@final
class Halving:
    """The clipped sum of a draw, to which micro-batches are added, in halves where the memory does not suffice.

    Args:
        clipped: The attached engine, which holds the sum.
        fill: Fills the global generators; called before each forward pass.
        rows: What is known of the rows of a batch; None if nothing was looked at.
        spare: For processes that must make as many passes as the others; None if they need not.
    """

    def __init__(
        self,
        clipped: ClippedGradients,
        *,
        fill: Callable[[], None],
        rows: Rows | None,
        spare: Spare | None,
    ) -> None:
        self._clipped, self._fill, self._rows, self._spare = clipped, fill, rows, spare
        self._added: list[MicroBatch] = []  # no copies: the host holds the draw as well
        self._is_told = False

    def begin(self) -> None:
        """Begin a draw, with sums of zero."""
        self._clipped.reset()
        self._added.clear()

    def add(self, micro_batch: MicroBatch, *, losses_of: Losses) -> Float[Tensor, " rows"]:
        """Clip the gradient of each example of a micro-batch, and add it to the sum.

        Args:
            micro_batch: The micro-batch, collated.
            losses_of: A function that returns one loss per row, attached to the graph.

        Returns:
            The losses, shape (rows,), detached.

        Raises:
            ValueError: If there are more or fewer losses than rows.
            RuntimeError: If it does not fit into memory, and cannot be halved.
        """
        ahead, losses = [micro_batch], []
        while ahead:
            part = ahead.pop()
            try:
                of_part = self._add_if_it_fits(part, losses_of)
            except PassLeft:  # before anything was added
                ahead.append(part)
                continue
            if of_part is not None:
                self._added.append(part)
                losses.append(of_part)
                continue
            self._clear_memory()
            ahead += reversed(halves_of(part, rows=self._rows))
            # Sensitivity: no example may count twice. What was half added cannot be taken back, so the sum begins anew.
            if self._clipped.is_half_added:
                ahead += reversed(self._added)
                self.begin()
        return torch.cat(losses)[-micro_batch.size :]  # what comes before was added once more

    def complete(self) -> None:
        """End a draw: where all processes must make as many passes, make those for which others have a micro-batch."""
        if self._spare is not None:
            self._spare.in_step.complete(self._pass_of_which_nothing_is_kept)

    def _pass_of_which_nothing_is_kept(self) -> None:
        assert self._spare is not None
        self._fill()
        # Sensitivity: this example is in no draw. Its gradient is dropped before it is clipped, and no sum is touched.
        self._clipped.drop(self._spare.losses_of(dict(self._spare.inputs)))

    def _add_if_it_fits(self, part: MicroBatch, losses_of: Losses) -> Float[Tensor, " rows"] | None:
        """Return the losses of a part, which is added; None if the memory did not suffice.

        An error holds the frames in which it was raised, and their tensors, until this is left.
        """
        self._fill()  # whatever was seeded since the last time
        try:
            with contextlib.nullcontext() if self._spare is None else self._spare.in_step.one_pass():
                losses = losses_of(part.inputs)
                # Sensitivity: what is clipped to C is a row, or the mean of K. An example with more rows would contribute
                # more.
                if len(losses) != part.size:
                    # Not their numbers: the size of a draw is private, and messages end in logs.
                    raise ValueError(
                        "The losses of a micro-batch must be one for each of its examples, got "
                        f"{'more' if len(losses) > part.size else 'fewer'}. Let the collator return one row for each "
                        "example, and compute_per_sample_loss one loss."
                    )
                self._clipped.backward(losses, weights=weights_of(part, like=losses), views=part.rows_each)
                return losses.detach()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _clear_memory(self) -> None:
        clear_device_cache(garbage_collection=True)
        if not self._is_told:
            print(
                "A micro-batch does not fit into memory, and is computed in halves, as are others from here on that do not "
                f"fit. That takes longer. {SMALLER}."
            )
            self._is_told = True


def weights_of(micro_batch: MicroBatch, *, like: Tensor) -> Float[Tensor, " batch"] | None:
    """Return the weight of each clipped gradient, on the device of a tensor; None if all are 1."""
    size = micro_batch.size // micro_batch.rows_each
    return None if micro_batch.weight == 1.0 else torch.full((size,), micro_batch.weight, device=like.device)


def halves_of(micro_batch: MicroBatch, *, rows: Rows | None) -> list[MicroBatch]:
    """Return a micro-batch in two halves of its examples, or units.

    Args:
        micro_batch: The micro-batch, collated.
        rows: What is known of its rows; None if nothing was looked at.

    Raises:
        RuntimeError: If it cannot be halved.
    """
    # No numbers: sizes and lengths are those of private examples, and messages end in logs.
    middle = micro_batch.size // micro_batch.rows_each // 2 * micro_batch.rows_each
    if middle == 0:
        raise RuntimeError(
            "An example must fit into memory by itself, with all its views, and with clip_unit_mean a whole unit, got one "
            "that does not. Truncate the examples, set gradient_checkpointing=True, lower augmentation_multiplicity or "
            "max_examples_per_unit, or set clip_unit_mean=False."
        )
    if rows is None:
        raise RuntimeError(
            "A micro-batch must fit into memory with grad_sample_self_check=False, got one that does not: whether its "
            f"halves would give the same sum was not checked. {SMALLER}, or leave grad_sample_self_check out."
        )
    if rows.shared:
        raise RuntimeError(
            "A micro-batch must fit into memory where all its rows share random numbers, got one that does not, of a model "
            f"that draws such {', '.join(rows.shared[:3])}: in halves examples would follow other numbers. Set a smaller "
            "per_device_train_batch_size, or set the probabilities of these to zero."
        )
    # A batch dimension is never guessed. What holds no list of anything is the same in both halves.
    whole = [value for name, value in micro_batch.inputs.items() if name not in rows.names]
    of_rows = [value for name, value in micro_batch.inputs.items() if name in rows.names]
    # One that had a row for each of the examples that were looked at may have several of another, as of its images.
    if any(len(value) != micro_batch.size for value in of_rows) or not all(
        value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, _SINGLE) for value in whole
    ):
        raise RuntimeError(
            "A micro-batch must fit into memory if not all that was collated is tensors with a row for each example, got "
            f"one that does not, and cannot be halved. {SMALLER}, or let the collator return such tensors only."
        )
    first, second = slice(0, middle), slice(middle, micro_batch.size)
    return [_part(micro_batch, first, rows.names), _part(micro_batch, second, rows.names)]


def _part(micro_batch: MicroBatch, part: slice, names: frozenset[str]) -> MicroBatch:
    inputs = {name: value[part] if name in names else value for name, value in micro_batch.inputs.items()}
    return micro_batch._replace(inputs=type(micro_batch.inputs)(inputs), size=part.stop - part.start)
