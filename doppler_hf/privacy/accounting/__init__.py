"""The ε that a run costs, from public numbers alone.

- accounting: the ε of releases, and of plans with terms that may depend on earlier results
- attack: the meaning of ε, as bounds on the success of a membership attack
- calibration: σ, or the number of steps, for a target ε
- selection: the ε of a search, which publishes the best of a random number of runs
- composition: the composition of rounds, by their privacy loss distributions
- round_loss: the likelihood ratio of one round
- secret_groups: bounds on ε by simulation, for units with secret groups
- importance_sampling: samples of rounds in which a large privacy loss is likely
"""

from doppler_hf.privacy.accounting.accounting import (
    Releases,
    default_delta,
    get_epsilon,
    get_total_epsilon,
    joint_noise_multiplier,
    turns_of_round,
)
from doppler_hf.privacy.accounting.calibration import get_noise_multiplier

__all__ = [
    "Releases", "default_delta", "get_epsilon", "get_noise_multiplier", "get_total_epsilon", "joint_noise_multiplier",
    "turns_of_round",
]  # fmt: skip
