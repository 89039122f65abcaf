"""Turn clipped sums into a private gradient.

- mechanism: the Gaussian mechanism, with white noise or noise that cancels part of the noise of earlier steps; the
  private training loss; and normals from secret words
- chacha: the whole release on an accelerator, with its normals, in one kernel
"""

from doppler_hf.privacy.noise.mechanism import GaussianMechanism, PrivateLoss, noise_source

__all__ = ["GaussianMechanism", "PrivateLoss", "noise_source"]
