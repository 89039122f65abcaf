"""Differentially private fine-tuning for Hugging Face Transformers, with a low-pass filter on the private gradient.

- trainer: `DopplerTrainer`, with one training step from top to bottom
- sft, dpo: `DopplerSFTTrainer` and `DopplerDPOTrainer`, which extend TRL's trainers
- trl_checks: the common parts of these two
- training_args: the arguments of a run
- gradient_recorder: `GradientRecorder`, a callback that records every private gradient
- run: one private run
- preflight: all checks before the first step of a run
- privacy: left of the privacy boundary: everything that touches an example
- optim: right of the boundary: optimizers on private gradients
- linalg: numerics that both sides of the boundary share
- triton_support: tests whether Triton works on a device, and launches kernels
- shards: tensors in shards on several processes
- filters: coefficients and responses of filters; NumPy and SciPy only
- mean_pooling: `MeanPoolingForSequenceClassification`, a classifier on the mean of an encoder's tokens
- audit: attacks on a run that measure what it leaks
- cli: the command `doppler-hf`
- errors: the classes of errors, each of which has a code
- extras: optional dependencies
- deprecated: names of earlier versions that still work
- version: the version of the package
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from doppler_hf.deprecated import attribute_of, keep_modules
from doppler_hf.errors import NO_KTO, NoTrainerError
from doppler_hf.extras import require
from doppler_hf.version import VERSION

if TYPE_CHECKING:
    from doppler_hf.dpo import DopplerDPOConfig as DopplerDPOConfig
    from doppler_hf.dpo import DopplerDPOTrainer as DopplerDPOTrainer
    from doppler_hf.gradient_recorder import GradientRecorder
    from doppler_hf.sft import DopplerSFTConfig as DopplerSFTConfig
    from doppler_hf.sft import DopplerSFTTrainer as DopplerSFTTrainer
    from doppler_hf.trainer import DopplerTrainer
    from doppler_hf.training_args import DopplerTrainingArguments

# The trainers for TRL are left out. `import *` reads every name in this list, so with them it would fail where TRL is not
# installed, and elsewhere every such import would take the seconds that TRL needs to load. A list that depended on what is
# installed would make one script work on one machine and not on another.
__all__ = ["DopplerTrainer", "DopplerTrainingArguments", "GradientRecorder", "__version__"]
__version__ = VERSION

_HOMES: Final = {
    "DopplerDPOConfig": "doppler_hf.dpo",
    "DopplerDPOTrainer": "doppler_hf.dpo",
    "DopplerSFTConfig": "doppler_hf.sft",
    "DopplerSFTTrainer": "doppler_hf.sft",
    "DopplerTrainer": "doppler_hf.trainer",
    "DopplerTrainingArguments": "doppler_hf.training_args",
    "GradientRecorder": "doppler_hf.gradient_recorder",
}


keep_modules()


def __dir__() -> list[str]:
    """List the lazily imported names too, so that notebooks can complete them."""
    return sorted({*globals(), *_HOMES})


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `doppler_hf.filters` and ledger checks do not import Transformers."""
    if name in ("DopplerKTOTrainer", "DopplerKTOConfig"):
        raise NoTrainerError("no-kto", NO_KTO)
    if name not in _HOMES:
        return attribute_of(__name__, name)
    if _HOMES[name] in ("doppler_hf.dpo", "doppler_hf.sft"):
        require("trl")
    return getattr(import_module(_HOMES[name]), name)
