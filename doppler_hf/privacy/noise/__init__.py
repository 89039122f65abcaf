"""From clipped sums to a private gradient.

- mechanism: the Gaussian mechanism, with white noise or noise that takes back part of that of earlier steps
- gaussian: normals from secret words
- chacha: the same on an accelerator, and the whole release, in one kernel
- private_loss: the training loss as a private number
"""

from doppler_hf.privacy.noise.gaussian import noise_source
from doppler_hf.privacy.noise.mechanism import GaussianMechanism
from doppler_hf.privacy.noise.private_loss import PrivateLoss

__all__ = ["GaussianMechanism", "PrivateLoss", "noise_source"]
