"""What a run costs, from public numbers alone.

- accounting: ε of what was released, and which σ and how many steps a target affords
- upper_bounds: the accountants' bounds, from above all of them
"""

from doppler_hf.privacy.accounting.accounting import (
    Accountant,
    Releases,
    default_delta,
    get_epsilon,
    get_epsilons,
    get_noise_multiplier,
    get_steps,
    get_total_epsilon,
    joint_noise_multiplier,
)

__all__ = [
    "Accountant",
    "Releases",
    "default_delta",
    "get_epsilon",
    "get_epsilons",
    "get_noise_multiplier",
    "get_steps",
    "get_total_epsilon",
    "joint_noise_multiplier",
]
