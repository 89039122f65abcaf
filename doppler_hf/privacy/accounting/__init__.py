"""The ε that a run costs, from public numbers alone.

- accounting: ε of what was released, and of plans whose terms may follow from results
- attack: what that ε means, as the best rates of a membership attack
- calibration: σ, or the number of steps, for a target ε
- composition: rounds composed, by their privacy loss distributions
- round_loss: the likelihood ratio of one round
- secret_groups: bounds on ε by simulation, where a unit's group is secret
- importance_sampling: the rounds that are drawn for it, whose losses are likely
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
