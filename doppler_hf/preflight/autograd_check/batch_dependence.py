"""Check whether the loss of an example changes with the other examples of its batch, by ranks, thresholds or counts.

A loss such as `losses * (losses.detach() >= losses.detach().median())` has a gradient in its own row alone, and yet one
more record changes what the others contribute. A gradient cannot show such a choice, but values do: the losses of one batch
are compared with the losses of the same examples in other batches. In some of these the others are copies of the example
with the smallest or the largest loss, so that every rank changes, and so does every count. In the rest each example is
alone, in a different place, or in a smaller batch.

A function with a backward pass of its own may have a factor that changes the gradient but not the value. Such a factor shows
in the norms of the per-sample gradients, so these are compared too.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from doppler_hf.preflight.autograd_check.compared_examples import (
    ComparedExamples,
    Inputs,
    Losses,
    refuse_number_of_losses,
    why_losses_change,
)
from doppler_hf.preflight.autograd_check.coupling import random_half
from doppler_hf.preflight.autograd_check.rounding import OF_ROUNDING, rounded_at_random
from doppler_hf.preflight.autograd_check.row_randomness import row_randomness
from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients
from doppler_hf.privacy.clipping.other_layers import has_rows, is_floating
from doppler_hf.privacy.randomness import filled_generators

# When two losses or norms are compared, this share of the largest one is added to their size: some consist of rounding only.
_OF_THE_LARGEST: Final = 0.1
# Two means of losses differ if they are this many standard errors apart. They are means over this many fillings of the
# generators, and one of them is for a small batch of this many rows.
_SURE: Final = 6.0
_FILLINGS: Final = 24
_SMALL: Final = 3
# The share of the variance of a mean of independent losses below which the mean is fixed: by chance, once in 10⁸ times.
_FIXED: Final = 0.1
_CHANGES_WITH_CHANCE: Final = (
    "The loss of one record changes with the other records of the batch even if all random numbers stay the same, so the "
    "noise would not protect it. Compute each loss from its own row, independent of the size of the batch: do not permute "
    "rows, choose a random part of the batch, normalize weights over it, or divide by its size."
)


class Outcome(NamedTuple):
    """The losses of a batch's examples and the norms of their gradients."""

    losses: Float[Tensor, " rows"]
    norms: Float[Tensor, " rows"]  # zeros if gradients are not computed


class Batches(NamedTuple):
    """A batch of distinct examples, from which other batches are made.

    Attributes:
        model: The model.
        losses_of: The loss of each example.
        whole: All examples in one batch.
        number: The number of examples.
        collated: A function that returns a batch of some examples, given their places in the whole batch.
        tolerance: The share of itself by which rounding may change a loss.
        most_alone: The most examples that are computed alone.
        is_thorough: Whether to make more batches than are needed to show ranks and counts of losses.
        norms_by: The engine, if norms of gradients are compared too.
        chance: How to handle random numbers that cannot be turned off in model or loss. If torch draws them, they can belong
            to the examples (`row_randomness`). If rows draw from NumPy's or Python's generator, a row has the same
            numbers only in the same place of a batch of the same size, with the generators filled in the same way.
        least: The fewest rows of a batch, if random numbers belong to the examples.
        seed: Which random numbers the examples or places have.
    """

    model: nn.Module
    losses_of: Losses
    whole: Inputs
    number: int
    collated: Callable[[Sequence[int]], Inputs]
    tolerance: float
    most_alone: int
    is_thorough: bool
    norms_by: ClippedGradients | None
    chance: Literal["none", "of the examples", "of places"] = "none"
    least: int = 1
    seed: int = 0

    def why_losses_change(self) -> str | None:
        """Return a sentence that says why losses change with the other examples, or None if they do not change.

        Raises:
            FloatingPointError: If no loss is finite, so that no two losses can be compared.
        """
        everyone = [*range(self.number)]
        found = self._outcome(self.whole, everyone)
        if not found.losses.isfinite().any():
            raise FloatingPointError("no loss is finite")
        for places in self._others(found.losses):
            other = self._outcome(self._batch(places), places)
            is_other = self._differs(other, found, places)
            if self.chance == "of places":
                is_other &= torch.tensor([place == here for here, place in enumerate(places)], device=is_other.device)
            if is_other.any() and self.chance != "none":
                return _CHANGES_WITH_CHANCE
            if is_other.any():
                where = int(is_other.nonzero()[0])
                first, beside = places[where], [*places[:where], *places[where + 1 :]]
                rest = [place for place in range(self.number) if place != first]
                examples = ComparedExamples(self.model, self.losses_of, [self._batch([first])], self._batch([first, *rest]))
                further = [(self._batch([*rest, first]), True), (self._batch([first, *beside]), False)]
                return why_losses_change(examples, further=further)
        if self.chance == "of places" and (
            self._has_fixed_mean(found.losses) or (self.is_thorough and self._mean_changes_with_number(found.losses))
        ):
            return _CHANGES_WITH_CHANCE
        return None

    def _has_fixed_mean(self, losses: Tensor) -> bool:
        """Return whether the mean over copies of one example is less random than that of numbers drawn for each by itself.

        The mean of n independent losses has 1/n of their variance. Weights that are divided by their sum have a mean that
        does not change, so each depends on how many others there are, and on theirs.
        """
        place = int(losses.nan_to_num(nan=0.0).argmax())
        batch = self._batch([place] * self.number)
        found = []
        with _outputs_kept(self.model), torch.no_grad():
            for seed in range(_FILLINGS):
                with filled_generators(seed):
                    found.append(self.losses_of(dict(batch)).double())
        values = torch.stack(found)
        # The outputs are kept, so that what a row's losses have in common is the model's chance and not the loss's.
        within = (values - values.mean(dim=0)).var(dim=1).mean()
        is_random = within > (self.tolerance * values.mean()) ** 2
        return bool(is_random and self.number * values.mean(dim=1).var() < _FIXED * within)

    def is_fixed(self) -> bool:
        """Return whether a batch with random numbers that belong to the examples gives the same losses twice."""
        try:
            outcomes = [self._outcome(self.whole, [*range(self.number)]) for _ in range(2)]
        except Exception:  # some operations cannot be repeated for each row
            return False
        return torch.equal(outcomes[0].losses.nan_to_num(), outcomes[1].losses.nan_to_num())

    def _mean_changes_with_number(self, losses: Tensor) -> bool:
        """Return whether copies of one example have a different mean loss in a large batch than in a small one."""
        place = int(losses.nan_to_num(nan=0.0).argmax())
        means = []
        for number in (self.number, _SMALL):
            places = [place] * number
            batch = self._batch(places)
            of_each = []
            for seed in range(_FILLINGS):
                with filled_generators(seed), torch.no_grad():
                    of_each.append(self.losses_of(dict(batch)).double().mean())
            means.append(torch.stack(of_each))
        error = sum(each.var() for each in means) / _FILLINGS
        change = (means[0].mean() - means[1].mean()).abs()
        return bool(change > _SURE * torch.as_tensor(error).sqrt() + self.tolerance * means[0].mean().abs())

    def changes_with_nan(self) -> bool:
        """Return whether losses change, and stay finite, if the model's outputs for one other example are NaN.

        For example, the loss may drop a whole batch that has a NaN in it.
        """
        everyone = [*range(self.number)]
        found = self._outcome(self.whole, everyone)
        place = int(found.losses.nan_to_num(nan=0.0).argmax())

        def spoil(_model: nn.Module, _args: Any, outputs: Any) -> Any:
            return pytree.tree_map(lambda value: _with_nan(value, place, self.number), outputs)

        handle = self.model.register_forward_hook(spoil)
        try:
            other = self._outcome(self.whole, everyone)
        except Exception:  # a loss may refuse NaN, as torch's losses of probabilities do
            return False
        finally:
            handle.remove()
        # A loss that is NaN itself has read the other example's numbers, and is found by its gradient.
        is_other = self._differs(other, found, everyone) & other.losses.isfinite()
        is_other[place] = False
        return bool(is_other.any())

    def _outcome(self, batch: Inputs, places: Sequence[int]) -> Outcome:
        with contextlib.ExitStack() as numbers:
            if self.chance == "of the examples":
                numbers.enter_context(row_randomness(places, seed=self.seed))
            elif self.chance == "of places":
                numbers.enter_context(filled_generators(self.seed))
            return self._computed(batch, len(places))

    def _computed(self, batch: Inputs, number: int) -> Outcome:
        if self.norms_by is None:
            losses = self.losses_of(dict(batch))
            refuse_number_of_losses(losses, number)
            return Outcome(losses.detach(), torch.zeros_like(losses))
        with self.norms_by.unclipped({}):
            losses = self.losses_of(dict(batch))
            refuse_number_of_losses(losses, number)
            return Outcome(losses.detach(), self.norms_by.backward(losses).detach())

    def _others(self, losses: Tensor) -> Iterator[list[int]]:
        """Yield the places of the examples of other batches."""
        for places in self._other_places(losses):
            if self.chance != "of the examples" or len(places) == self.number:
                yield places
            elif len(places) >= self.least:
                yield places[: self.least]
            else:
                yield (places * self.least)[: self.least]

    def _other_places(self, losses: Tensor) -> Iterator[list[int]]:
        order = losses.nan_to_num(nan=0.0).argsort().tolist()
        is_kept, places = random_half(self.number).tolist(), range(self.number)
        yield [place if is_kept[place] else order[0] for place in places]
        if self.chance == "of places":
            # A row has different random numbers in a different place, and in a batch of a different size.
            yield [order[-1] if is_kept[place] else place for place in places]
            return
        # Begin with the smallest and the largest loss, whose ranks change when they are alone.
        between = order[1:-1][:: max(1, self.number // max(1, self.most_alone - 2))]
        for place in dict.fromkeys([order[0], order[-1], *between][: self.most_alone]):
            yield [place]
        # A random choice by place, such as of one row of the batch, shows in few of these batches.
        if self.is_thorough or self.chance == "of the examples":
            yield [*reversed(places)]
        if self.is_thorough:
            yield [order[-1] if is_kept[place] else place for place in places]
            # The first example has the rarest label, so that counts of classes are very different in these batches.
            yield from ([0] + [next(each for each in of if each)] * (self.number - 1) for of in (order, order[::-1]))
            yield [place for place in places if is_kept[place]]

    def _batch(self, places: Sequence[int]) -> Inputs:
        """Return a batch of some examples, padded as in the whole batch if all of its values have one row per example."""
        if not all(has_rows(value, self.number) for value in self.whole.values()):
            return self.collated(places)
        return {name: value[torch.as_tensor(places, device=value.device)] for name, value in self.whole.items()}

    def _differs(self, found: Outcome, whole: Outcome, places: Sequence[int]) -> Bool[Tensor, " rows"]:
        """Return which examples of a batch have a different loss or norm than in the whole batch, beyond rounding."""
        is_other = _differ(found.losses, whole.losses, places, tolerance=self.tolerance)
        if (
            self.norms_by is None
            or not (of_norms := _differ(found.norms, whole.norms, places, tolerance=self.tolerance)).any()
        ):
            return is_other
        # If terms cancel, as between two equal answers, a norm consists of rounding.
        changes = []
        for seed in range(2):
            with rounded_at_random(seed):
                changes.append((self._outcome(self.whole, [*range(self.number)]).norms - whole.norms).abs())
        rounding = OF_ROUNDING * torch.stack(changes).amax(dim=0)[places]
        return is_other | (of_norms & ~((found.norms - whole.norms[places]).abs() <= rounding))


@contextlib.contextmanager
def _outputs_kept(model: nn.Module) -> Iterator[None]:
    """Let each call of the model in the block return what the first one has: a loss alone then takes next to no time."""
    own, kept = vars(model).get("forward"), list[Any]()
    compute = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(compute(*args, **kwargs))
        return pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, kept[0])

    vars(model)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(model)["forward"]
        else:
            vars(model)["forward"] = own


def _differ(found: Tensor, whole: Tensor, places: Sequence[int], *, tolerance: float) -> Bool[Tensor, " rows"]:
    found, whole = found.double(), whole.double()
    sizes = whole.abs().nan_to_num(nan=0.0, posinf=0.0)
    most = tolerance * (sizes + _OF_THE_LARGEST * sizes.max())[places]
    change = (found - whole[places]).abs().nan_to_num(nan=0.0, posinf=0.0)
    return (found.isfinite() != whole[places].isfinite()) | (change > most)


def _with_nan(value: Any, place: int, number: int) -> Any:
    """Return a tensor in which the rows of one example are NaN, or the value as it is if it has no rows of examples."""
    if not is_floating(value) or not value.ndim or len(value) % number:
        return value
    rows = value.unflatten(0, (number, -1))
    is_spoilt = torch.arange(number, device=value.device) == place
    return rows.masked_fill(is_spoilt.view(-1, *[1] * (rows.ndim - 1)), torch.nan).flatten(0, 1)
