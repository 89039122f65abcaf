"""The rounds of a run's sampling: new rounds, or the rounds of the earlier run that it continues.

In a round each unit takes part at most once. A run that continues within a round must use the turns that were drawn for it.
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
from doppler_hf.run.processes.processes import on_all_processes
from doppler_hf.run.resuming.earlier_ledgers import Previous
from doppler_hf.run.resuming.round_secrets import RoundSecret
from doppler_hf.training_args import DopplerTrainingArguments


@final
class Rounds:
    """The rounds of a run, and their secret."""

    def __init__(self, args: DopplerTrainingArguments, train_dataset: Any, sampler: AllocationSampler) -> None:
        self._args, self._train_dataset, self._sampler = args, train_dataset, sampler

    @functools.cached_property
    def digest_of_data(self) -> DataDigest:
        """Return a digest that tells these rows, in this order, from other data."""
        # Privacy: rows may be made with random numbers, which must not come from a public seed, nor move those of the user.
        with filled_generators(self._args.noise_seed, rank=self._args.process_index):
            return digest_of_data(self._train_dataset, self._sampler)

    def continue_from(self, previous: Previous, statement: PrivacyStatement) -> bool:
        """Continue the rounds of the earlier run, if all processes know their turns, and return whether they do."""
        ledger = previous.ledger
        # With Poisson sampling each step is a round of its own.
        if self._sampler.sampling == "poisson" or ledger is None:
            return False
        allowed_to = functools.partial(ledger.steps_allowed_to, statement, from_step=previous.step)
        if not allowed_to(keeps_rounds=True):
            return False
        kept = self.secret_of(ledger)
        elsewhere = kept.secret_for_other_world_size()
        is_of_other_data = kept.is_of_other_data() or (elsewhere is not None and elsewhere.is_of_other_data())
        if is_of_other_data:
            warnings.warn(
                "train_dataset changed since the checkpoint (rows or order), so sampling starts a new round and spends "
                "additional ε. A round deals out every record once. To avoid this, stop before the first step, resume with "
                "the same data, and give shuffle() and splits a seed. After a step, keep the new order.",
                stacklevel=2,
            )
        secret = kept.secret()
        if not on_all_processes(secret is not None):
            # After a clean end between two rounds, a new round would have followed anyway.
            costs = not (ledger.runs[-1].is_closed and allowed_to(keeps_rounds=False))
            # All processes must agree, whether their machine has a file of the earlier processes or not.
            earlier = next(filter(None, gather_object([None if elsewhere is None else elsewhere.world_size])), None)
            if statement.private and costs and earlier is not None and not is_of_other_data:
                self._refuse_another_number(earlier)
            elif statement.private and costs and not is_of_other_data:
                warnings.warn(
                    "Sampling starts a new round and spends additional ε, because the secret of the earlier run's round is "
                    f"not in {kept.path.parent}. A round deals out every record once. To avoid this, resume each checkpoint "
                    "only once, on the machine that wrote it.",
                    stacklevel=2,
                )
            return False
        assert secret is not None
        # Sensitivity: start from the first turn that was not counted, so that none is taken twice, whatever steps are
        # repeated.
        self._sampler.go_on(secret, first_step=previous.step - ledger.steps_of_rounds)
        return True

    def _refuse_another_number(self, earlier: int) -> None:
        """Refuse to restart a round for a different number of processes; without a target_epsilon, only warn."""
        # Sensitivity: turns are drawn within each process's own share of the units. With another number of processes the
        # shares are different. The secret then cannot tell who has had a turn, and a unit may get a further one.
        target = self._args.target_epsilon
        ours = self._args.world_size
        what = (
            f"The earlier run had {earlier} process{'es' * (earlier > 1)}, and this run has {ours}. Each process samples "
            "from its own share of the records, and with another number of processes the shares are different. So a record "
            "that was already in a batch of the current epoch could be in another one, which costs "
        )
        again = f"Resume with {earlier} process{'es' * (earlier > 1)}"
        if target is None:
            warnings.warn(f"{what}more ε. {again} to avoid this.", stacklevel=3)
            return
        raise Refusal(
            "another-number-of-processes",
            f"{what}more ε than target_epsilon={target:g} allows. {again}, which needs no higher target. Or raise "
            "target_epsilon: the remaining steps then get a new plan, and a small raise leaves them little ε and so much "
            "noise. Or start a new run with an untrained model and another output_dir; the ε of both runs then add up.",
        )

    def secret_of(self, ledger: PrivacyLedger) -> RoundSecret:
        """Return the place where this process keeps the secret of a ledger's run."""
        return RoundSecret(ledger.run_id, self._args.process_index, self._args.world_size, self.digest_of_data)
