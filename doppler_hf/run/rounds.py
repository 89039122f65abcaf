"""The rounds of a run's sampling: new ones, or those of the earlier run that it continues.

In a round each unit takes part at most once. A run that goes on within a round must go on with the turns that were drawn.
"""

import functools
import warnings
from typing import Any, final

from accelerate.utils import gather_object

from doppler_hf.errors import Refusal
from doppler_hf.privacy import AllocationSampler, PrivacyLedger, PrivacyStatement
from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.privacy.batching.sampling import digest_of_data
from doppler_hf.privacy.randomness import filled_generators
from doppler_hf.run.plan import Previous
from doppler_hf.run.processes import on_all_processes
from doppler_hf.run.round_secrets import RoundSecret
from doppler_hf.training_args import DopplerTrainingArguments


@final
class Rounds:
    """The rounds of one run, and their secret."""

    def __init__(self, args: DopplerTrainingArguments, train_dataset: Any, sampler: AllocationSampler) -> None:
        self._args, self._train_dataset, self._sampler = args, train_dataset, sampler

    @functools.cached_property
    def digest_of_data(self) -> DataDigest:
        """Return what tells these rows, in this order, from others."""
        # Privacy: rows may be made with random numbers, which must not come from a public seed, nor move those of the user.
        with filled_generators(self._args.noise_seed, rank=self._args.process_index):
            return digest_of_data(self._train_dataset, self._sampler)

    def take_up(self, previous: Previous, statement: PrivacyStatement) -> bool:
        """Go on with the rounds of the earlier run, if all processes know their turns, and return whether they do."""
        ledger = previous.ledger
        # A step of Poisson sampling is a round of its own, with coins of its own.
        if self._sampler.sampling == "poisson" or ledger is None:
            return False
        allowed_to = functools.partial(ledger.steps_allowed_to, statement, from_step=previous.step)
        if not allowed_to(keeps_rounds=True):
            return False
        kept = self.secret_of(ledger)
        elsewhere = kept.under_another_number()
        is_of_other_data = kept.is_of_other_data() or (elsewhere is not None and elsewhere.is_of_other_data())
        if is_of_other_data:
            warnings.warn(
                "train_dataset has other rows than before, or another order, so that its round begins anew and costs ε. "
                "Resume with the same data, and give shuffle() and splits a seed.",
                stacklevel=2,
            )
        secret = kept.secret()
        if not on_all_processes(secret is not None):
            # After a clean end between two rounds a new one is what would have followed anyway.
            costs = not (ledger.runs[-1].is_closed and allowed_to(keeps_rounds=False))
            # On every process, whether its machine has a file of the earlier processes or not.
            earlier = next(filter(None, gather_object([None if elsewhere is None else elsewhere.world_size])), None)
            if statement.private and costs and earlier is not None and not is_of_other_data:
                self._refuse_another_number(earlier)
            elif statement.private and costs and not is_of_other_data:
                warnings.warn(
                    f"The earlier run's round begins anew and costs ε: its secret is not in {kept.path.parent}. Resume each "
                    "checkpoint once, where it was written.",
                    stacklevel=2,
                )
            return False
        assert secret is not None
        # Sensitivity: from the first turn that was not counted, so that none is taken twice, whatever steps are made again.
        self._sampler.go_on(secret, first_step=previous.step - ledger.steps_of_rounds)
        return True

    def _refuse_another_number(self, earlier: int) -> None:
        """Refuse to begin a round again within target_epsilon because the number of processes is another; warn without."""
        # Sensitivity: turns are drawn within each process's own share of the units. Under another number the shares are
        # others, so that the secret cannot tell who has had its turn, and a unit may have a further one.
        target = self._args.target_epsilon
        ours = self._args.world_size
        what = (
            f"The earlier run had {earlier} process{'es' * (earlier > 1)}, and this one has {ours}. Each process draws from "
            "a share of the records of its own, so the draws of the earlier run cannot go on with another number of "
            "processes. Its round would begin again, and records that have had their turn could have a further one, which "
            "costs "
        )
        again = f"Resume with {earlier} process{'es' * (earlier > 1)}"
        if target is None:
            warnings.warn(f"{what}more ε. {again} to avoid this.", stacklevel=3)
            return
        raise Refusal(
            "another-number-of-processes",
            f"{what}more ε than target_epsilon={target:g} was planned for. {again}, raise target_epsilon for a further "
            "plan, or start a new run: an untrained model and another output_dir.",
        )

    def secret_of(self, ledger: PrivacyLedger) -> RoundSecret:
        """Return where this process keeps the secret of the run that a ledger names."""
        return RoundSecret(ledger.run_id, self._args.process_index, self._args.world_size, self.digest_of_data)
