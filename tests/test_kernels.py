"""Where kernels work is found by a launch, before anything is counted."""

import contextlib

import pytest
import torch

from doppler_hf import kernels
from doppler_hf.privacy.noise import noise_source


def test_where_triton_does_not_work_the_cpu_makes_the_noise_and_the_user_is_told(monkeypatch):
    """As in a container without a C compiler."""

    def fails(*_, device):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "launch", fails)
    kernels.are_usable.cache_clear()
    with pytest.warns(UserWarning, match=r"Training on this GPU is slow: .* \(Failed to find C compiler\)\. Install triton"):
        assert noise_source(torch.device("cuda")).startswith("AES-256-CTR")
    kernels.are_usable.cache_clear()


def test_the_trial_is_a_launch(monkeypatch):
    """In the interpreter, on a device that is called CUDA's."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    kernels.are_usable.cache_clear()
    assert kernels.are_usable(torch.device("cuda"))
    kernels.are_usable.cache_clear()
    assert not kernels.are_usable(torch.device("cpu"))
