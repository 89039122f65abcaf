"""The neighbour test: can one record change an update more than the proof allows?

A unit of privacy is one record, or one user with `privacy_unit_column`. If two data sets differ in one unit, and all other
units get the same random numbers, the sums that reach the mechanism may differ by at most C. The real trainer makes batches
in threes: some units S, then S and one more unit u, then u alone. The test watches the sums that the mechanism receives,
returns zeros as private gradients, and compares

    distance   ‖sum(S ∪ u) − sum(S)‖ / C             The guarantee assumes that it is at most 1.
    coupling   ‖sum(S ∪ u) − sum(S) − sum(u)‖ / C    How much u changes what the others contribute; 0 except for rounding.

The second half of the pairs meets a model with moved weights, since the initial weights may hide what a layer does: the
output of an adapter is zero at the start.

All random numbers are held fixed. The model is in training mode without dropout, a random data set gives an example the same
numbers each time, as model and loss do if they draw some, and a unit with too many examples contributes its first ones. A
random collator draws numbers for a whole batch, so they cannot be held fixed for one example. The same holds for a loss that
draws the numbers of a row with NumPy or Python, or as many as the row is padded to. In a training run all of these follow
secret random numbers (`privacy.randomness`).
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from doppler_hf.audit.audited_run import copied, hidden_prints, motionless_run
from doppler_hf.errors import Refusal
from doppler_hf.preflight.autograd_check.compared_examples import norm_of
from doppler_hf.preflight.autograd_check.moved_weights import moved_weights
from doppler_hf.preflight.autograd_check.row_randomness import row_randomness, shapes_drawn, uses_other_generators
from doppler_hf.preflight.autograd_check.without_randomness import draws_numbers, in_evaluation_mode, without_dropout
from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.privacy.batching.columns import labels_of
from doppler_hf.privacy.batching.micro_batches import MicroBatch, PrivateLoader, fetch, fetch_one
from doppler_hf.privacy.batching.probe import Inputs
from doppler_hf.privacy.batching.sampling import Piece
from doppler_hf.privacy.known_numbers import refuse_known_numbers_in_collator, refuse_known_numbers_in_passes
from doppler_hf.privacy.noise import GaussianMechanism
from doppler_hf.privacy.randomness import fill_generators, filled_generators
from doppler_hf.run.precision import ROUNDING_BF16, computes_in_bf16
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.shards import part_here
from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments

# The relative rounding error of sums in float32. A sum of n terms is off by some √n·2⁻²⁴, and batches of different sizes
# are rounded differently.
ROUNDING: Final = 1e-4
_MOST_PAIRS: Final = 100_000


@dataclass(frozen=True, eq=False)
class NeighbourResult:
    """The outcome of the neighbour test. NOT PRIVATE: the figures have no noise and show an example's gradient norm.

    A pair is two batches of one trainer that differ in one record (or user, with `privacy_unit_column`).

    Attributes:
        distances: How far one more record moves the clipped sum, in units of C, shape (pairs,).
        couplings: How far that record moves the contributions of the others, in units of C, shape (pairs,).
        draw_size: Number of records in each batch besides the tested one.
        expected_batch_size: B of the run, in records.
        tolerance: How far above 1 a distance may be because of rounding alone.
        rounding: How far rounding alone may move the contribution of another record, in units of C.
        noun: What a batch has: records, or users with `privacy_unit_column`.
        is_of_training: Whether the model was in training mode. If it draws numbers there, other than dropout, that cannot be
            held fixed for each row, it was compared in evaluation mode, and what its layers do in training mode alone was
            not tested.
    """

    distances: Float[np.ndarray, " pairs"]
    couplings: Float[np.ndarray, " pairs"]
    draw_size: int
    expected_batch_size: int
    tolerance: float
    rounding: float
    noun: str = "record"
    is_of_training: bool = True

    @property
    def contradicts_claim(self) -> bool:
        """Whether one record moved the sum by more than C, or moved what the others contribute by more than rounding."""
        return bool(self.distances.max() > 1.0 + self.tolerance) or self.moves_others

    @property
    def moves_others(self) -> bool:
        """Whether one record moved what the others contribute by more than rounding, which the proof rules out."""
        return bool(self.couplings.max() > self.allowed_coupling)

    @property
    def allowed_coupling(self) -> float:
        """How far rounding alone may move what the others contribute together, in units of C."""
        return self.rounding * self.draw_size**0.5

    @property
    def rounds_coarsely(self) -> bool:
        """Whether rounding is so coarse, as in bfloat16 and in 8 bits, that the test can miss what moves others."""
        return self.rounding >= ROUNDING_BF16

    @property
    def extrapolated(self) -> Float[np.ndarray, " pairs"]:
        """The distances in a batch of B records, if each other record moves as far as those tested; rounding is left out.

        In units of C, shape (pairs,).
        """
        beyond_rounding = np.where(self.couplings > self.allowed_coupling, self.couplings, 0.0)
        return self.distances + beyond_rounding * max(self.expected_batch_size / self.draw_size - 1.0, 0.0)


def neighbour_distances(
    trainer: DopplerTrainer, *, pairs: int = 16, draw_size: int | None = None, tolerance: float = ROUNDING
) -> NeighbourResult:
    """Train on neighbouring batches without moving the weights, and measure how far apart their clipped sums are.

    The batches go through the trainer's own loader, collator, loss, engine and accumulation. Nothing is written, evaluated
    or logged. The trainer is left as it was and has spent no ε.

    Args:
        trainer: A trainer with privacy, before or after training.
        pairs: How many pairs of batches.
        draw_size: How many records (users, with `privacy_unit_column`) a batch has besides the tested one; by default the
            expected batch size, at most 32. The tested record is first the largest, then the smallest, then one of the
            rarest label, then any.
        tolerance: How far above 1 a distance may be because of rounding alone: 1e-6 for a model in float64.

    Returns:
        The distances and couplings of all pairs, in units of C. They are not private.

    Raises:
        ValueError: If `pairs` or `draw_size` is out of range, the trainer has no privacy, or it refuses to train.
    """
    size = size_of_batches(trainer, pairs=pairs, draw_size=draw_size)
    loader = trainer.get_train_dataloader()
    ends = [0, len(loader.examples) - 1]
    is_held = is_random_data(loader, ends)
    held = trainer.privacy.loader(HeldExamples(loader.examples), loader.collator, model=trainer.model)
    if is_held and is_random_data(held, ends):
        raise Refusal(
            "random-collator",
            "The test compares two batches that differ by one record, so it cannot use a random data_collator. This one "
            "draws new random numbers (such as masks) for every batch. Use a data_collator without randomness, or move "
            "the masking into the data set.",
        )
    labels = None if trainer.args.privacy_unit_column else labels_of(loader.examples)
    draws = neighbouring_draws(trainer.privacy, pairs=pairs, size=size, labels=labels)
    tested = copied(trainer)
    # The distances would not reveal random numbers that an attacker knows beforehand, so these are looked for here.
    with filled_generators(0):
        rows = fetch(loader.examples, ends, numbers=loader.numbers)
    refuse_known_numbers_in_collator(loader.collator, rows)
    refuse_known_numbers_in_passes(tested.model, losses_of(tested), batch_of(loader, ends, seed=0))
    (distances, couplings), is_of_training = moved_sums(tested, loader, draws, is_held=is_held)
    return NeighbourResult(
        distances=distances,
        couplings=couplings,
        draw_size=size,
        expected_batch_size=trainer.privacy.sampler.expected_batch_size,
        tolerance=tolerance,
        rounding=max(
            tolerance, ROUNDING_BF16 if computes_in_bf16(trainer.model, trainer.accelerator.mixed_precision) else 0.0
        ),
        noun=trainer.privacy.sampler.noun,
        is_of_training=is_of_training,
    )


def size_of_batches(trainer: DopplerTrainer, *, pairs: int, draw_size: int | None) -> int:
    """Return how many units a batch has besides the tested one, or refuse numbers that are out of range."""
    if not 1 <= pairs <= _MOST_PAIRS:
        raise Refusal(
            "out-of-range",
            f"pairs, the number of pairs of batches to compare, must be from 1 to {_MOST_PAIRS:,}; got {pairs}. A usual "
            "number is 16.",
        )
    if trainer.args.disable_dp:
        raise Refusal(
            "no-privacy-to-test",
            "The neighbour test checks a private run, and this trainer has disable_dp=True. Leave disable_dp out.",
        )
    number_of_units = trainer.privacy.sampler.num_units
    size = min(32, trainer.privacy.sampler.expected_batch_size, number_of_units - 1) if draw_size is None else draw_size
    if not 1 <= size < number_of_units:
        raise Refusal(
            "out-of-range",
            f"draw_size, the number of {trainer.privacy.sampler.noun}s in a tested batch, must be from 1 to "
            f"{number_of_units - 1}; got {size}.",
        )
    return size


def moved_sums(
    tested: DopplerTrainer,
    loader: PrivateLoader,
    draws: list[Int[np.ndarray, " _"]],
    *,
    is_held: bool,
) -> tuple[Float[np.ndarray, "2 pairs"], bool]:
    """Train on batches in threes without moving the weights, and watch the sums that reach the mechanism.

    Args:
        tested: A copy of the trainer (modified in place).
        loader: The loader of the trainer itself.
        draws: The batches of `neighbouring_draws`.
        is_held: Whether the data set is random, so that its examples are held fixed.

    Returns:
        The distances and couplings of all pairs, and whether the model was in training mode.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        without_model_randomness(tested, loader) as (is_of_training, is_drawn),
        contextlib.ExitStack() as moving,
    ):
        tested.args, make, witnesses = motionless_run(tested.args, steps=len(draws), folder=folder), tested._new_run, []
        trained_losses = tested._losses

        def scripted_run(**options: Any) -> PrivateRun:
            run = make(**options)
            script(run, draws, tested.args)
            if is_held:
                hold(run)
            witnesses.extend(replace_mechanisms(run))
            if is_drawn:
                hold_losses(run, pair=lambda: len(witnesses[0].moved))
            # The weights move between two pairs, so that the three batches of one pair meet the same model.
            witnesses[0].after[len(draws) // 6] = lambda: moving.enter_context(moved_weights(tested.model))
            return run

        tested._new_run = scripted_run  # type: ignore[method-assign]
        # A cross-entropy loss would have a share of error below 1, which would hide that a record counts twice.
        tested._losses = lambda inputs: trained_losses(inputs)._replace(is_cross_entropy=False)  # type: ignore[method-assign]
        # Transformers and the training step would switch the model back to training mode.
        as_it_is = mock.patch.object(tested.model, "train", return_value=tested.model)
        with as_it_is, hidden_prints():
            tested.train()
    return np.max([witness.moved for witness in witnesses], axis=0).T, is_of_training


def is_random_data(loader: PrivateLoader, indices: list[int]) -> bool:
    """Return whether a batch of the same examples differs between sixteen different seeds."""
    first, *others = (batch_of(loader, indices, seed=seed) for seed in range(16))
    tensors = {name: value for name, value in first.items() if isinstance(value, Tensor)}
    return not all(torch.equal(value, batch[name]) for batch in others for name, value in tensors.items())


def batch_of(loader: PrivateLoader, indices: list[int], *, seed: int) -> Inputs:
    """Return a batch as training makes it, except that its random numbers depend only on the seed."""
    with filled_generators(seed):
        examples = fetch(loader.examples, indices, numbers=loader.numbers)
        fill_generators(seed)
        return loader.collator(examples)


def neighbouring_draws(
    run: PrivateRun, *, pairs: int, size: int, labels: Int[np.ndarray, " units"] | None = None
) -> list[Int[np.ndarray, " _"]]:
    """Return batches in threes, as indices of units: some units, the same and one more, and that one alone."""
    generator, sampler = np.random.default_rng(0), run.sampler
    sizes = sampler.lengths if sampler.unit_sizes is None else sampler.unit_sizes
    extremes = [] if sizes is None else [int(np.argmax(sizes)), int(np.argmin(sizes))]
    if labels is not None:
        classes, first, counts = np.unique(labels, return_index=True, return_counts=True)
        extremes += [int(first[np.argmin(counts)])] if len(classes) > 1 else []
    draws = []
    for pair in range(pairs):
        unit = extremes[pair] if pair < len(extremes) else int(generator.integers(sampler.num_units))
        others = generator.choice(sampler.num_units - 1, size=size, replace=False)
        others += others >= unit
        draws += [others, np.append(others, unit), np.array([unit])]
    return draws


@final
class HeldExamples(Dataset[Any]):
    """A random data set whose examples get the same random numbers at every fetch, whatever else is in the batch.

    Examples are fetched one by one, each as often as it has views. The views of one example get different numbers.
    """

    def __init__(self, examples: Any, *, views: int = 1) -> None:
        self._examples, self._views = examples, views
        self._last, self._number = -1, 0

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        """Return the next view of the example that was fetched last, or the first view of another."""
        index = int(index)
        self._number = (self._number + 1) % self._views if index == self._last else 0
        self._last = index
        fill_generators(index, step=self._number)
        return fetch_one(self._examples, index)


class Witness:
    """A mechanism that watches the sums that reach the real one, and releases zeros.

    Attributes:
        moved: The distance and the coupling of every pair of batches, in units of the bound C.
        after: Number of finished pairs → function that is then called.
    """

    def __init__(self, mechanism: GaussianMechanism) -> None:
        self._mechanism = mechanism
        self.expected_batch_size = mechanism.expected_batch_size
        self._waiting: list[dict[str, Tensor]] = []
        self.moved: list[tuple[float, float]] = []
        self.after: dict[int, Callable[[], object]] = {}

    def privatize(
        self,
        sums: Mapping[str, Float[Tensor, "..."]],
        *,
        step: int,
        shards: Mapping[str, DTensor] = {},
    ) -> dict[str, Float[Tensor, "..."]]:
        """Keep the sums over all processes, and return zeros of the same shapes."""
        kept = {name: total.detach().clone() for name, total in sums.items()}
        if dist.is_initialized():
            for total in kept.values():
                dist.all_reduce(total)
        self._waiting.append(kept)
        if len(self._waiting) == 3:
            others, both, alone = self._waiting
            self._waiting = []
            change = {name: both[name].double() - others[name] for name in both}
            rest = {name: change[name] - alone[name] for name in both}
            bound = self._mechanism.max_grad_norm
            self.moved.append((norm_of(change.values()) / bound, norm_of(rest.values()) / bound))
            self.after.get(len(self.moved), lambda: None)()
        # Zeros move no weight, so that the three batches of a pair meet the same model.
        return {name: torch.zeros_like(part_here(shards.get(name, total))) for name, total in sums.items()}

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the real mechanism."""
        return getattr(self._mechanism, name)


def script(run: PrivateRun, draws: list[Int[np.ndarray, " _"]], args: DopplerTrainingArguments) -> None:
    """Make the sampler of a run draw these batches (modified in place)."""
    of_shard = [np.sort(draw[draw % args.world_size == args.process_index]) for draw in draws]
    run.sampler.drawn_units = lambda step: of_shard[step]  # type: ignore[method-assign]
    # With coins of zero, a unit with too many examples contributes its first ones.
    run.sampler.coins = lambda count, *, step: np.zeros(count)  # type: ignore[method-assign]


def hold(run: PrivateRun) -> None:
    """Make the loaders of a run give an example the same random numbers each time (modified in place)."""
    load, views = run.loader, run.statement.augmentation_multiplicity

    def held_loader(dataset: Any, collator: Collator, *, model: nn.Module) -> PrivateLoader:
        loader = load(HeldExamples(dataset, views=views), collator, model=model)
        # The checks before the first step expect that an example is one row and does not change.
        loader.examples = HeldExamples(dataset)
        return loader

    run.loader = held_loader  # type: ignore[method-assign]


def replace_mechanisms(run: PrivateRun) -> list[Witness]:
    """Replace the mechanisms of a run by witnesses (modified in place), and return the witnesses."""
    run.mechanism = of_gradient = Witness(run.mechanism)  # type: ignore[assignment]
    if run.private_loss is None:
        return [of_gradient]
    loss = run.private_loss
    loss.mechanism = of_loss = Witness(loss.mechanism)  # type: ignore[assignment]
    return [of_gradient, of_loss]


def hold_losses(run: PrivateRun, *, pair: Callable[[], int]) -> None:
    """Give a row the same random numbers in the losses of all three batches of a pair, and others in another pair.

    Args:
        run: The run (modified in place).
        pair: A function that returns the number of the pair.
    """
    load, add, views = run.loader, run._add_clipped, run.statement.augmentation_multiplicity
    # The micro-batches to come, by the identity of their inputs, which are kept so that no others get it.
    rows: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
    seen: set[Any] = set()

    def noting_loader(dataset: Any, collator: Collator, *, model: nn.Module) -> PrivateLoader:
        loader = load(dataset, collator, model=model)
        drawn: Any = loader.dataset
        fetch_drawn, collate, fetched = drawn.__getitems__, loader.collate_fn, list[tuple[int, int]]()

        def fetch_noted(indices: Piece) -> Piece:
            fetched[:] = [(int(index), view) for index in indices for view in range(views)]
            return fetch_drawn(indices)

        def collate_noted(examples: Piece) -> Piece:
            piece, start = collate(examples), 0
            for micro_batch in piece:
                rows[id(micro_batch.inputs)] = micro_batch.inputs, fetched[start : start + micro_batch.size]
                start += micro_batch.size
            return piece

        drawn.__getitems__ = fetch_noted
        loader.collate_fn = collate_noted
        return loader

    def add_held(micro_batch: MicroBatch) -> Tensor:
        if micro_batch.weight == 0.0:  # an empty pass, as with shards, has no row of the batch
            return add(micro_batch)
        _, examples = rows.pop(id(micro_batch.inputs))
        with row_randomness(examples, seed=pair(), seen=seen):
            return add(micro_batch)

    run.loader = noting_loader  # type: ignore[method-assign]
    run._add_clipped = add_held  # type: ignore[method-assign]


@contextlib.contextmanager
def without_model_randomness(trainer: DopplerTrainer, loader: PrivateLoader) -> Iterator[tuple[bool, bool]]:
    """Put the model into training mode without dropout or, if the numbers of a row cannot be held there, evaluation mode.

    Yields:
        Whether it is in training mode, and whether it draws numbers of torch, which are to be held fixed for each row.
    """
    model, lengths, of = trainer.model, loader.lengths, losses_of(trainer)
    ends = [0, len(loader.examples) - 1] if lengths is None else [int(np.argmin(lengths)), int(np.argmax(lengths))]
    short, long, more = (
        trainer._prepare_inputs(batch_of(loader, rows, seed=0)) for rows in (ends[:1] * 2, ends[1:] * 2, ends[:1] * 3)
    )
    calls = [lambda inputs=inputs: of(dict(inputs)) for inputs in (short, long, more)]
    for is_of_training, mode in ((True, without_dropout), (False, in_evaluation_mode)):
        with mode(model):
            # A row that is padded further beside others would get other numbers there.
            if shapes_drawn(calls[0]) == shapes_drawn(calls[1]) and not uses_other_generators(calls):
                yield is_of_training, draws_numbers(of, short)
                return
    raise Refusal(
        "random-loss",
        "The test compares two batches that differ by one record, so each row must get the same random numbers in both. "
        "Here the model or loss draws the numbers of a row with NumPy or Python, or as many as the row is padded to. Draw "
        "them with torch, such as torch.randn_like(x), and pad all rows to one length: tokenize with padding='max_length'.",
    )


def losses_of(trainer: DopplerTrainer) -> Callable[[Any], Tensor]:
    """Return the function from a micro-batch to per-sample losses, shape (batch,), that a trainer's checks call."""
    return lambda inputs: trainer._losses(inputs).values
