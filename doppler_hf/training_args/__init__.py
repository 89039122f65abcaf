"""The arguments of a run: `DopplerTrainingArguments`, and its checks.

- arguments: the arguments, with their help
- checks: refuse arguments that would break the guarantee or have no effect
- galore: GaLore's arguments in `optim_target_modules` and `optim_args`
"""

from doppler_hf.training_args.arguments import DopplerTrainingArguments

__all__ = ["DopplerTrainingArguments"]
