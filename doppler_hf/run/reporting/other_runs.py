"""Remember, within the process, which private runs were made on which data, so that a further run can say that ε add up.

A loop over learning rates, or a search and then a training with its best settings, makes several runs on the same records.
Each ledger states the ε of its own run, which is right as long as nobody compares the runs or publishes several of them.
Other processes are not known here, nor are the same rows in another order or a part of them.
"""

from typing import Final, NamedTuple

from doppler_hf.privacy import PrivacyLedger
from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.privacy.ledger.terms import why_not_private
from doppler_hf.run.private_run import PrivateRun

_MOST_NAMED: Final = 3  # A note names the latest runs only.


class _Made(NamedTuple):
    data: DataDigest
    epsilon: float
    folder: str


# The name of a ledger → its run. Digests are small, so no data set is kept in memory.
_OF_PROCESS: Final[dict[str, _Made]] = {}


def remember_run(run: PrivateRun, *, folder: str) -> None:
    """Remember what a run has spent on its data, and the folder of its ledger, unless it has spent nothing."""
    if (ledger := run.ledger) is not None and ledger.steps_run and why_not_private(ledger) is None:
        _OF_PROCESS.pop(ledger.name, None)  # the latest run is the last
        _OF_PROCESS[ledger.name] = _Made(run.digest_of_data, ledger.epsilon(), folder)


def other_runs_note(data: DataDigest, *, ledger: PrivacyLedger | None = None, epsilon: float) -> list[str]:
    """Return a note on other private runs of this process on the same data.

    Args:
        data: The digest of the data.
        ledger: The ledger of the run that begins, if it has one. Runs whose ε it includes are left out.
        epsilon: The ε of what begins.
    """
    if not data.fields:  # all fields are random, so that nothing tells these data from others
        return []
    counted = set() if ledger is None else {ledger.name, *ledger.earlier_trainings}
    found = [made for name, made in _OF_PROCESS.items() if name not in counted and made.data.is_of_same_rows(data)]
    if not found:
        return []
    total = sum(made.epsilon for made in found) + epsilon
    latest = ", ".join(f"ε = {made.epsilon:.4g} in {made.folder}" for made in found[-_MOST_NAMED:])
    which = "the latest with " if len(found) > _MOST_NAMED else "with "
    return [
        f"this process has already made {len(found)} private run{'s' * (len(found) > 1)} on the same data, {which}{latest}. "
        f"If you publish more than one of these models, choose among them by their results, or began this run with weights "
        f"of one of them, their ε add up (to {total:.4g} with this one)"
    ]
