"""What a step releases is about one draw, whole and alone, as it was drawn."""

from collections.abc import Iterable, Sequence
from typing import Any, final

from torch import Tensor

from doppler_hf.privacy.batching.micro_batches import MicroBatch
from doppler_hf.privacy.batching.sampling import OfStep


@final
class AsDrawn:
    """Tells whether micro-batches are what they were: the same, in their order, each once, and none written into.

    Args:
        piece: The micro-batches of a piece of a draw.
    """

    def __init__(self, piece: Iterable[MicroBatch]) -> None:
        # With the values, so that no other tensor can take the place of one in memory.
        self._found = [(micro_batch, self._values_of(micro_batch)) for micro_batch in piece]

    def are(self, piece: Sequence[MicroBatch]) -> bool:
        """Return whether these are they."""
        return len(piece) == len(self._found) and all(
            micro_batch is before and self._are_same(self._values_of(micro_batch), values)
            for micro_batch, (before, values) in zip(piece, self._found, strict=True)
        )

    @staticmethod
    def _values_of(micro_batch: MicroBatch) -> list[tuple[str, Any, int | None]]:
        return [
            (name, value, value._version if isinstance(value, Tensor) and not value.is_inference() else None)
            for name, value in micro_batch.inputs.items()
        ]

    @staticmethod
    def _are_same(values: list[tuple[str, Any, int | None]], before: list[tuple[str, Any, int | None]]) -> bool:
        return len(values) == len(before) and all(
            now[1] is then[1] and (now[0], now[2]) == (then[0], then[2]) for now, then in zip(values, before, strict=True)
        )


@final
class WholeDraw:
    """The pieces of a draw that are still to come, each of which is taken once, in its order and as it was drawn.

    Args:
        number_of_pieces: Into how many pieces a draw is cut.
    """

    def __init__(self, number_of_pieces: int) -> None:
        self._number_of_pieces = number_of_pieces
        self._left: list[AsDrawn] = []

    @property
    def is_complete(self) -> bool:
        """Whether all pieces were taken."""
        return not self._left

    def begin(self, pieces: Sequence[OfStep], *, step: int) -> None:
        """Begin with the pieces of a draw; none at the end of a run.

        Args:
            pieces: The pieces, lists of micro-batches.
            step: Optimizer step, counted from 0.

        Raises:
            ValueError: If they are not as many as a draw has.
            RuntimeError: If they were drawn for another step.
        """
        # Sensitivity: part of another draw would let an example count twice, and a piece for a draw would let an example
        # move the others between pieces.
        if len(pieces) not in (0, self._number_of_pieces):
            raise ValueError(
                f"gradient_accumulation_steps must stay {self._number_of_pieces} during a private run, got "
                f"{len(pieces)} pieces of a draw. Set it before train()."
            )
        # Sensitivity: a unit takes part only in the turns of its group, and the noise of a turn covers the steps until the
        # next. A draw at another step than its own would bring it back too early.
        for piece in pieces:
            if piece.step != step:
                raise RuntimeError(
                    f"A draw for step {piece.step} was taken at step {step}, so that a unit could take part more often than "
                    "is accounted for. Leave the order of steps to the trainer."
                )
        self._left = [AsDrawn(piece) for piece in reversed(pieces)]

    def take(self, piece: Sequence[MicroBatch]) -> None:
        """Take the next piece.

        Raises:
            ValueError: If it is another one, or was changed since it was drawn.
        """
        # Sensitivity: the checks before the first step see what the collator makes, and from there on. What is mixed after
        # it would couple examples, and a micro-batch that comes twice, also after an error, would count twice.
        if not self._left or not self._left.pop().are(piece):
            raise ValueError(
                "DopplerTrainer.training_step must be handed the micro-batches of a draw as they were drawn, each once and "
                "unchanged, got others, which no check has seen. Change them in the data_collator, _prepare_inputs or "
                "compute_per_sample_loss."
            )
