"""From clipped sums to a private gradient.

- mechanism: what a mechanism is; the Gaussian one
- shaped: noise that takes back part of the noise of earlier steps
- gaussian: normals from secret words
- chacha: the same on an accelerator, and the whole release, in one kernel
- private_loss: the training loss as a private number
"""

from doppler_hf.privacy.noise.gaussian import noise_source
from doppler_hf.privacy.noise.mechanism import GaussianMechanism
from doppler_hf.privacy.noise.private_loss import PrivateLoss

__all__ = ["GaussianMechanism", "PrivateLoss", "noise_source"]
