"""Errors that say that memory does not suffice, and none about the model."""

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation has failed. For the memory of the processor torch has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
