"""Differentially private fine-tuning for Hugging Face Transformers, with a low-pass filter on the private gradient."""

from doppler_hf.trainer import DopplerTrainer
from doppler_hf.training_args import DopplerTrainingArguments

__all__ = ["DopplerTrainer", "DopplerTrainingArguments"]
