"""The learning rate of a run that names none: from public numbers, since every trial would spend privacy.

Under noise Adam's steps are known beforehand. Its denominators are about the noise's size, s in units of white noise of the
same σ, so that noise moves each of d weights by a random walk of known length: over the run by

    D = η/(u·s)·S·√d

with η the first rate, u the least denominator in units of the noise of a step, and S that of Σ_t r_t·noise_t, with the
schedule r; of white noise it is √(Σ_t r_t²). Wherever noise limited the rates that were tuned, the best of them had about
the same D; elsewhere the best had about the same step for a gradient as large as white noise, η/(u·s). The rule is the
smaller of the two rates. What it loses against a tuned rate is in recipes/results/learning-rate.md.
"""

import math
from typing import Final

from doppler_hf.filters import NoiseShape
from doppler_hf.optim.optimizer import DEFAULT_FLOOR_FRACTION
from doppler_hf.privacy import PrivacyStatement
from doppler_hf.run.choices import learning_rates_of
from doppler_hf.training_args import DopplerTrainingArguments

# η/(u·s), and D.
LARGEST_STEP: Final = 0.022
LONGEST_WAY: Final = 70.0


def chosen_learning_rate(args: DopplerTrainingArguments, statement: PrivacyStatement, *, num_trained: int) -> float:
    """Return the first learning rate of a run: that of the arguments, or of the rule, for Adam under noise.

    Args:
        args: The arguments.
        statement: The run's statement.
        num_trained: d, the number of weights that are trained.
    """
    if args.learning_rate is not None:
        return args.learning_rate
    steps, shape = statement.steps_planned, NoiseShape.parse(statement.noise_shape)
    rates = learning_rates_of(args, steps=steps) or [1.0] * steps
    size = shape.std(steps)
    way = shape.std_of_sum(rates) / size * math.sqrt(num_trained)
    least = 1.0
    if args.base_optimizer == "adam_bc":
        white = statement.noise_multiplier * statement.per_sample_max_grad_norm / statement.expected_batch_size
        floor = DEFAULT_FLOOR_FRACTION if args.adam_bc_floor is None else args.adam_bc_floor / (white * size) ** 2
        least = math.sqrt(floor)
    return least * min(LARGEST_STEP * size, LONGEST_WAY / way)
