"""How long the checks before the first step look in most tests; a user's take up to three seconds."""

from doppler_hf.privacy import shared_coins
from doppler_hf.privacy.batching import probe, random_data, same_distribution
from doppler_hf.privacy.clipping import model_coins


def take_few_trials(set_attribute):
    """Let the checks look at few examples, in few trials; `set_attribute` is `setattr`, or what undoes it later."""
    for seconds in ("_SECONDS_OF_SIZES", "_SECONDS_OF_LABELS"):
        set_attribute(probe, seconds, 0.0)
    set_attribute(random_data, "_SECONDS", 0.0)
    set_attribute(random_data, "_TRIALS", 4)
    set_attribute(same_distribution, "_SECONDS", 0.0)
    set_attribute(model_coins, "_SECONDS", 0.0)
    set_attribute(shared_coins, "_TRIALS", 256)
