"""From clipped sums to a private gradient.

- mechanism: the Gaussian mechanism
- gaussian: normals from secret words
- ahead: those of the next step, prepared in the background
- subspace_noise: fewer of them, where the optimizer reads a subspace
- private_loss: the training loss as a private number
"""

from doppler_hf.privacy.noise.gaussian import NoiseGenerator, add_gaussian_noise, noise_source, noise_stream
from doppler_hf.privacy.noise.mechanism import GaussianMechanism
from doppler_hf.privacy.noise.private_loss import PrivateLoss

__all__ = ["GaussianMechanism", "NoiseGenerator", "PrivateLoss", "add_gaussian_noise", "noise_source", "noise_stream"]
