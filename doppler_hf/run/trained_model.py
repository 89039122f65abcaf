"""The model that a run trains, as its ledger knows it: what its weights carry from before, and whether they are its own."""

import weakref
from typing import final

from torch import nn

from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.ledger.record import ModelDigests
from doppler_hf.run.digests import digests_of, is_known, untrained_digest
from doppler_hf.run.lineage import Lineage


@final
class TrainedModel:
    """One model from the beginning of a run on.

    Args:
        model: As the run begins with it.
        lineage: What it carries from trainings before.
        ledger: The run's.
        previous: What the run before, of the same trainer, has trained.
        step: The step at which the run begins.
    """

    def __init__(
        self, model: nn.Module, lineage: Lineage, *, ledger: PrivacyLedger, previous: "TrainedModel | None", step: int
    ) -> None:
        self._model, self._lineage = weakref.ref(model), lineage
        self._left: ModelDigests | None = None  # when the run, or its user, last left it
        # Privacy: weights that something else has trained, and buffers that it has filled, since the training before are no
        # part of what this one begins with. A checkpoint's weights are compared with its ledger, and a new model has none.
        digests = digests_of(model)
        is_trained = any(digests.parameters == known.parameters for known in ledger.models)
        is_same = previous is not None and previous._model() is model and step == 0 and ledger.steps_run > 0
        is_changed = (is_trained or is_same) and not is_known(model, ledger.models)
        self._untrained = None if is_changed else untrained_digest(model)

    def has_changed_only_in_training(self, model: nn.Module) -> bool:
        """Return whether what the run does not train is as it was when it began."""
        # Privacy: the mechanism changes what is trained. What else changed, such as a buffer that a callback has filled
        # with class means, no noise covers.
        return untrained_digest(model) == self._untrained

    def marks(self, model: nn.Module, *, together: bool) -> frozenset[str]:
        """Return the marks of the weights that the run has trained; see `Lineage.marks_of_trained`."""
        return self._lineage.marks_of_trained(model, together=together)

    def remember(self, model: nn.Module, ledger: PrivacyLedger, *, marks: frozenset[str], writes: bool) -> None:
        """Note, for trainings to come, what these weights have cost."""
        self._lineage.remember(model, ledger, marks=marks, writes=writes)

    def leave(self, model: nn.Module, ledger: PrivacyLedger, *, speaks: bool, writes: bool, together: bool = True) -> bool:
        """Note the model as the run leaves it, and return whether this process has to save the ledger for it.

        Args:
            model: The trained model.
            ledger: The run's, which then speaks for it.
            speaks: Whether the ledger may speak for it. What its weights have cost is remembered in any case.
            writes: Whether this process writes files.
            together: Whether all processes are here.
        """
        # Before the first step the weights are the user's own, with which another training may begin.
        if ledger.steps_run == 0 or (digests := digests_of(model)) == self._left:
            return False
        self._left = digests
        marks = self.marks(model, together=together)
        self.remember(model, ledger, marks=marks, writes=writes)
        return speaks and ledger.leave(digests, trained=marks) and writes
