"""Track the model that a run trains: the earlier cost of its weights, and whether only the run has changed them."""

import weakref
from typing import final

from torch import nn

from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.ledger.record import ModelDigests
from doppler_hf.run.digests import digests_of, is_known, untrained_digest
from doppler_hf.run.weights.lineage import Lineage


@final
class TrainedModel:
    """A model from the start of its run on.

    Args:
        model: The model at the start of the run.
        lineage: The earlier private runs that trained it.
        ledger: The ledger of the run.
        previous: The trained model of the same trainer's run before.
        step: The step at which the run starts.
    """

    def __init__(
        self, model: nn.Module, lineage: Lineage, *, ledger: PrivacyLedger, previous: "TrainedModel | None", step: int
    ) -> None:
        self._model, self._lineage = weakref.ref(model), lineage
        self._left: ModelDigests | None = None  # the digests of the model as the run, or its user, last left it
        # Privacy: since the run before, something other than private steps may have trained weights or filled buffers. The
        # ledger does not cover such a model, so it has no digest here. A checkpoint's weights are compared with its ledger,
        # and a new model has none.
        digests = digests_of(model)
        is_trained = any(digests.parameters == known.parameters for known in ledger.models)
        is_same = previous is not None and previous._model() is model and step == 0 and ledger.steps_run > 0
        is_changed = (is_trained or is_same) and not is_known(model, ledger.models)
        self._untrained = None if is_changed else untrained_digest(model)

    def only_trained_parts_changed(self, model: nn.Module) -> bool:
        """Return whether everything that the run does not train is unchanged since its start."""
        # Privacy: the mechanism changes what is trained. If anything else changed, such as a buffer that a callback has
        # filled with class means, no noise covers it.
        return untrained_digest(model) == self._untrained

    def marks(self, model: nn.Module, *, together: bool) -> frozenset[str]:
        """Return the marks of the weights that the run has trained; see `Lineage.marks_of_trained`."""
        return self._lineage.marks_of_trained(model, together=together)

    def remember(self, model: nn.Module, ledger: PrivacyLedger, *, marks: frozenset[str], writes: bool) -> None:
        """Record the cost of these weights for later runs."""
        self._lineage.remember(model, ledger, marks=marks, writes=writes)

    def remember_between_saves(self, model: nn.Module, ledger: PrivacyLedger, *, writes: bool) -> None:
        """Record a few weights of the model as it is now; see `Lineage.remember_between_saves`."""
        self._lineage.remember_between_saves(model, ledger, writes=writes)

    def leave(self, model: nn.Module, ledger: PrivacyLedger, *, speaks: bool, writes: bool, together: bool = True) -> bool:
        """Record the model as the run leaves it, and return whether this process has to save the ledger for it.

        Args:
            model: The trained model.
            ledger: The ledger of the run, which then covers the model.
            speaks: Whether the ledger may cover the model. The cost of its weights is recorded in any case.
            writes: Whether this process writes files.
            together: Whether all processes call this at the same moment.
        """
        # Before the first step the weights are the user's own, and a different run may start with them.
        if ledger.steps_run == 0 or (digests := digests_of(model)) == self._left:
            return False
        self._left = digests
        marks = self.marks(model, together=together)
        self.remember(model, ledger, marks=marks, writes=writes)
        return speaks and ledger.leave(digests, trained=marks) and writes
