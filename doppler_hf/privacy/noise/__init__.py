"""From clipped sums to a private gradient.

- mechanism: the Gaussian mechanism, with white noise or noise that takes back part of that of earlier steps; the training
  loss as a private number; normals from secret words
- chacha: normals on an accelerator, and the whole release, in one kernel
"""

from doppler_hf.privacy.noise.mechanism import GaussianMechanism, PrivateLoss, noise_source

__all__ = ["GaussianMechanism", "PrivateLoss", "noise_source"]
