"""Differentially private fine-tuning for Hugging Face Transformers, with a low-pass filter on the private gradient.

- trainer: `DopplerTrainer`: one training step from top to bottom
- training_args: what is asked for
- run: one private run, its parts
- privacy: left of the privacy boundary: everything that touches an example
- optim: right of it: optimizers on private gradients
- linalg: what both wings must agree on about matrices
- filters: coefficients and responses; NumPy and SciPy only
- workloads: from a recipe to model and data
- audit: an attacked run
- reports: tables and pictures
- cli: the command `doppler-hf`
"""

from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments

__all__ = ["DopplerTrainer", "DopplerTrainingArguments"]
