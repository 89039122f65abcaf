"""The attached engine before the first step: its comparison with plain autograd on a few examples.

Nothing about the examples that this uses is released: the outcome depends on model, loss, data set and collator.
"""

import contextlib
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from doppler_hf.linalg import highest_conv_precision, highest_matmul_precision
from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.batching.probe import CROWD, Probe, Probes
from doppler_hf.privacy.clipping.as_in_training import (
    in_full_precision,
    left_as_it_was,
    moved,
    probabilities_for_all_rows,
    with_held_coins,
    with_small_capacity,
    without_coins,
    without_dropout,
)
from doppler_hf.privacy.clipping.first_pass import FirstPass, first_pass_put_back
from doppler_hf.privacy.clipping.held_coins import HeldCoins
from doppler_hf.privacy.clipping.model_coins import is_random, losses_under, refuse_neighbours, refuse_own_coins
from doppler_hf.privacy.clipping.out_of_memory import is_out_of_memory
from doppler_hf.privacy.clipping.plain_autograd import Losses
from doppler_hf.privacy.clipping.self_check import Comparison, Expected
from doppler_hf.privacy.clipping.writes import nothing_written, of_other_content
from doppler_hf.privacy.shared_coins import ROWS, DrawnInForward, drawn_in_forward, refuse_shared_in_forward
from doppler_hf.run.halving import Rows, names_of_rows
from doppler_hf.run.in_step import InStep
from doppler_hf.training_args import DopplerTrainingArguments

# Relative, of gradients: batches of one and of three are rounded differently.
ROUNDING, ROUNDING_BF16 = 1e-3, 0.1
# The most rows of a batch in which losses are compared.
MOST_ROWS = 256
# Refuses a model whose own loss of a batch is another one, by more than a share of it.
CheckLoss = Callable[[dict[str, Any], float], None]
# Puts the trainer into the state that it has at a step of the training, for a block.
Moment = Callable[[], contextlib.AbstractContextManager[None]]
# Puts a model into a state without chance for a block.
Still = Callable[[nn.Module], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def no_layer_replaced(model: nn.Module) -> Iterator[None]:
    """Refuse a model that replaces layers of its own in the block."""
    before = dict(model.named_modules())
    yield
    replaced = next((name for name, module in model.named_modules() if before.get(name) is not module), None)
    # Sensitivity: it does so for good, by the length of one batch, so that one example more would change all later sums.
    if replaced is not None:
        raise ValueError(
            f"A forward pass must leave the layers of a model in place, got one that replaces {replaced!r} for all later "
            "batches. Choose a setting with which it does not (for BigBird: attention_type='original_full', or longer "
            "examples)."
        )


def place_of(error: BaseException, model: nn.Module) -> str:
    """Return the innermost layer of a model in which an error was raised, in words."""
    names = {module: name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [module for module in frames if isinstance(module, nn.Module) and module in names]
    return f"in the layer {names[found[-1]]!r} ({type(found[-1]).__name__})" if found else "outside of its layers"


@final
class StartCheck:
    """The check of an attached engine: its comparison with plain autograd, in training mode.

    Args:
        clipped: The engine.
        model: The model.
        losses_of: A function that calls the model and returns one loss per example of a micro-batch.
        probes: Examples of the training set.
        in_step: The meetings of processes that share the model's weights; None if this one has all of them.
        usual_rows: How many rows a batch usually has in training, whose gradients fit into memory.
        moments: The start of the training, and later ones at which the losses may be others.
    """

    def __init__(
        self,
        clipped: ClippedGradients,
        model: nn.Module,
        losses_of: Losses,
        probes: Probes,
        in_step: InStep | None,
        *,
        usual_rows: int,
        moments: Sequence[Moment],
    ) -> None:
        self._clipped, self._model, self._losses_of, self._probes = clipped, model, losses_of, probes
        self._usual_rows = usual_rows
        self._at_start, *self._later = moments
        self._gathered_in_float32 = contextlib.nullcontext if in_step is None else in_step.in_float32

    def run(self, args: DopplerTrainingArguments, check_loss: CheckLoss) -> Rows | None:
        """Check the engine, or run it once, and return what was found of the rows of a batch; None without a comparison.

        Raises:
            ValueError: If the model cannot be trained privately, by the name of the layer or tensor at fault.
        """
        rows: Rows | None = None
        model, probes = self._model, self._probes
        # Sensitivity: to TF32, which is cuDNN's default, a change by other examples of less than 1e-3 is a matter of
        # rounding.
        with (
            self._at_start(),
            left_as_it_was(model),
            first_pass_put_back(self._losses_of, model) as first_pass,
            no_layer_replaced(model),
            highest_conv_precision(),
            highest_matmul_precision(),
        ):
            dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
            in_bf16 = args.bf16 or dtype == torch.bfloat16
            if in_bf16 and args.clipping_quantile is not None:
                raise ValueError(
                    f"clipping_quantile must be None in bfloat16, got {args.clipping_quantile}: the rounding of norms "
                    "follows the padding of a micro-batch, and the count of those within the clip norm would follow it. "
                    "Train in float32, or leave it out."
                )
            if args.grad_sample_self_check:
                self._refuse_what_is_kept(first_pass)
                rows = self._rows_compared(in_bf16=in_bf16)
            else:
                self._run_once()
                first_pass.written()
            with without_coins(model), self._clipped.unwatched():
                check_loss(probes.probe().crowd, (ROUNDING_BF16 if in_bf16 else ROUNDING) / 10)
            if probes.views > 1 and not probes.is_random:
                with self._clipped.unwatched():
                    self._warn_of_equal_views()
        return rows

    def _refuse_what_is_kept(self, first_pass: FirstPass) -> None:
        """Refuse a loss that reads what the first pass of all has kept, which is made here."""
        crowd = self._probes.probe().crowd
        self._model.train()
        with self._clipped.unwatched(), torch.no_grad():
            # What it writes into buffers at each pass is refused by their names.
            with nothing_written(self._model, again=lambda: self._losses_of(of_other_content(crowd))):
                losses = self._losses_of(dict(crowd))
            first_pass.written()
            first_pass.put_back()
            if not isinstance(losses, Tensor):  # which is refused as the engine gets it
                return
            is_read = first_pass.is_read(
                lambda: losses_under(0, self._losses_of, crowd),
                lambda: losses_under(0, self._losses_of, of_other_content(crowd)),
                tolerance=ROUNDING,
            )
        # Sensitivity: one example more in the first batch would change the gradients of all others in every later one.
        if is_read:
            raise ValueError(
                "A loss must depend on its example alone, got another one after another first batch: something of earlier "
                "batches is remembered (a running mean, a bank, or as in `if self.mean is None: self.mean = x.mean(0)`), "
                "which neither clipping nor noise would cover. Set it beforehand, from public numbers, and what is kept "
                "of each example by itself as a column of train_dataset."
            )

    def _run_once(self) -> None:
        """Run the engine once as in training, so that a model that it cannot train is refused now."""
        self._model.train()
        inputs = self._probes.probe().together
        with nothing_written(self._model, again=lambda: self._losses_of(of_other_content(inputs))):
            self._clipped.backward(self._losses_of(inputs))
        self._clipped.reset()

    def _warn_of_equal_views(self) -> None:
        """Warn that views of data that are not random are all the same, unless the model draws random numbers."""
        self._model.train()
        with torch.no_grad():
            if not is_random(self._losses_of, self._probes.probe().together):
                warnings.warn(
                    f"augmentation_multiplicity={self._probes.views} takes the same view of an example each time: "
                    "train_dataset, data_collator and model draw no random numbers. Augment at random, or leave it out.",
                    stacklevel=2,
                )

    def _rows_compared(self, *, in_bf16: bool) -> Rows:
        """Compare, in bfloat16 also in float32, where rounding hides nothing, if the memory suffices."""
        # Made before, since what data set and collator draw is not the model's.
        batches = {rows: self._probes.copies(rows) for rows in ROWS}
        drawn = self._drawn(batches)
        with moved(self._model), with_small_capacity(self._model):
            if in_bf16:
                self._compare_in_full_precision(drawn)
            self._compare(drawn, ROUNDING_BF16 if in_bf16 else ROUNDING)
        return Rows(names_of_rows(batches), drawn.shared)

    def _compare_in_full_precision(self, drawn: DrawnInForward) -> None:
        try:
            with in_full_precision(self._model), self._gathered_in_float32():
                self._compare(drawn, ROUNDING)
        except RuntimeError as error:
            if is_out_of_memory(error):
                print(
                    "The check in float32 does not fit into memory, so that the engine is compared in bfloat16 only, where "
                    "a gradient may be off by a tenth. What changes the others by less than that goes unnoticed."
                )
                return
            # Sensitivity: at a tenth, a mask that lets one example in thirty through would pass.
            raise ValueError(
                "A model that is trained in bfloat16 must be computable in float32 too, in which rounding hides no change "
                f"by other examples, got an error {place_of(error, self._model)}. Replace what needs bfloat16 there (for "
                "attention: attn_implementation='sdpa'), or set grad_sample_self_check=False."
            ) from error

    def _drawn(self, batches: Mapping[int, dict[str, Any]]) -> DrawnInForward:
        """Return what the model draws, and refuse numbers that rows share if a draw may come in several micro-batches."""
        self._model.train()
        # A model that replaces its layers by shape is found later, as it was.
        with left_as_it_was(self._model), self._clipped.unwatched(), torch.no_grad():
            drawn = drawn_in_forward(self._model, lambda rows: self._losses_of(batches[rows]))
        if self._probes.is_cut:
            refuse_shared_in_forward(drawn.shared, probabilities_for_all_rows(self._model))
        return drawn

    def _compare(self, drawn: DrawnInForward, tolerance: float) -> None:
        model = self._model
        with without_coins(model):
            probe, expected = self._usable()
        model.train()
        with self._clipped.unwatched():
            refuse_own_coins(
                model,
                self._losses_of,
                inputs=probe.alone[-1],
                others=probe.alone[0],
                without_coins=expected.losses[-1],
                tolerance=tolerance / 10,
            )
        still: Still = without_coins
        try:
            with still(model):
                self._comparison(probe).refuse_difference(expected, tolerance=tolerance)
        except ValueError:
            if not self._is_random_in(still, probe):
                raise
            # Its coins are no attributes: they are held, or if that does not hold them it is in evaluation mode.
            still = with_held_coins
            if self._is_random_in(still, probe):
                still = without_dropout
            with still(model):
                comparison = self._comparison(probe)
                comparison.refuse_difference(comparison.expected(), tolerance=tolerance)
        still = self._refuse_crowd(probe, still, tolerance, is_of_torch=drawn.is_of_torch)
        # Sensitivity: a loss may have examples go by each other from some step on, as to leave out outliers.
        for later in self._later:
            with later():
                state = self._refuse_crowd(probe, still, tolerance, is_of_torch=drawn.is_of_torch)
                with state(model):
                    comparison = self._comparison(probe)
                    comparison.refuse_difference(comparison.expected(), tolerance=tolerance)
        # To bfloat16 a sum of several that nearly cancel is a matter of rounding. The order is the same in float32.
        if tolerance == ROUNDING:
            self._refuse_another_order(probe, still)
        # A coin that rows share may hide what couples them, if it seldom falls; and so does evaluation mode.
        if drawn.shared or still is without_dropout:
            model.train()
            with self._clipped.unwatched():
                refuse_neighbours(self._losses_of, probe.crowd, number=CROWD, tolerance=tolerance)

    def _is_random_in(self, still: Still, probe: Probe) -> bool:
        with still(self._model), self._clipped.unwatched():
            return is_random(self._losses_of, probe.together)

    def _refuse_crowd(self, probe: Probe, still: Still, tolerance: float, *, is_of_torch: bool) -> Still:
        """Compare losses in a larger batch: with every coin held at and off its mean and no attribute changed, if all can.

        What is set to zero for its name may be no probability, but say how much of a batch is left out.

        Returns:
            How the model was held still where that is by names.
        """
        comparison = self._comparison(probe)
        crowds = [(probe.crowd, probe.of_crowd)]
        # Sensitivity: what a loss does in batches from some size on, as to keep the hardest examples but at least so many.
        if self._usual_rows > CROWD:
            crowds.append(self._probes.larger_crowd(min(self._usual_rows, MOST_ROWS)))
        if is_of_torch:
            self._model.train()
            try:
                with HeldCoins() as held:
                    for whole, parts in crowds:
                        comparison.refuse_crowd(whole, parts, tolerance=tolerance)
                # Sensitivity: noise whose size follows the longest example, or the spread of a batch, is none at its mean.
                if held.has_numbers:
                    with HeldCoins(off_mean=True):
                        comparison.refuse_crowd(probe.crowd, probe.of_crowd, tolerance=tolerance)
                        comparison.refuse_difference(comparison.expected(), tolerance=tolerance)
                return still
            except ValueError:
                if held.are_all_held:
                    raise
        try:
            with still(self._model):
                for whole, parts in crowds:
                    comparison.refuse_crowd(whole, parts, tolerance=tolerance)
            return still
        except ValueError:
            # Of a few examples the coins may have fallen alike, so that the model seemed to be still.
            if still is without_dropout or not self._is_random_in(still, probe):
                raise
        with without_dropout(self._model):
            for whole, parts in crowds:
                comparison.refuse_crowd(whole, parts, tolerance=tolerance)
        return without_dropout

    def _refuse_another_order(self, probe: Probe, still: Still) -> None:
        """Compare the gradients of a crowd, in a state of the model in which two passes are the same, if there is one."""
        for state in (still, with_held_coins, without_dropout):
            with state(self._model), self._clipped.unwatched():
                is_still = not is_random(self._losses_of, probe.crowd)
            if is_still:
                batches = self._probes.crowd_in_batches(max(3, self._usual_rows))  # three were compared before
                with state(self._model):
                    self._comparison(probe).refuse_another_order(batches, tolerance=ROUNDING)
                return

    def _usable(self) -> tuple[Probe, Expected]:
        """Return examples that have a gradient, which others may not have: without a label, or not finite."""
        with contextlib.suppress(StopIteration):
            while True:
                probe = self._probes.probe()
                expected = self._comparison(probe).expected()
                is_usable = [0.0 < norm < math.inf for norm in expected.norms]
                if all(is_usable):
                    return probe, expected
                self._probes.replace(small=not all(is_usable[:-1]), large=not is_usable[-1])
        raise ValueError(
            "A small and a large example of train_dataset must each have a finite gradient that is not zero, to check the "
            "model on, got none among those that were tried. Let the loss of an example that is alone depend on it (one "
            "that is divided by its mean over the batch does not), leave out examples without a label, or set "
            "grad_sample_self_check=False if none has a gradient."
        )

    def _comparison(self, probe: Probe) -> Comparison:
        alone, together, rows = probe.alone, probe.together, probe.rows
        return Comparison(self._clipped, self._model, self._losses_of, alone=alone, together=together, rows=rows)
