"""The releases of a step, each with its own noise: the gradient, and on request the loss."""

from doppler_hf.filters import NoiseShape
from doppler_hf.filters.noise_shape import WHITE
from doppler_hf.privacy import GaussianMechanism, PrivacyStatement
from doppler_hf.privacy.noise import Mechanism, PrivateLoss
from doppler_hf.training_args import DopplerTrainingArguments


def mechanisms_of(
    args: DopplerTrainingArguments,
    statement: PrivacyStatement,
    *,
    shape: NoiseShape,
    first_step: int,
) -> tuple[Mechanism, PrivateLoss | None]:
    """Return what turns clipped sums into private gradients, and the private training loss if there is one.

    Args:
        args: The arguments.
        statement: The run's statement, with the size of each noise.
        shape: The shape of the gradient's noise.
        first_step: The step at which the run begins.
    """

    def gaussian(noise_multiplier: float, max_norm: float, *, shape: NoiseShape = WHITE) -> GaussianMechanism:
        return GaussianMechanism(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_norm,
            expected_batch_size=statement.expected_batch_size,
            shape=shape,
            first_step=first_step,
            device=args.device,
            floating_point_safe=args.floating_point_safe,
            seed=args.noise_seed,
        )

    of_gradient = gaussian(statement.noise_multiplier, args.per_sample_max_grad_norm, shape=shape)
    loss: PrivateLoss | None = None
    if statement.loss_noise_multiplier is not None:
        assert args.per_sample_max_loss is not None
        loss = PrivateLoss(gaussian(statement.loss_noise_multiplier, args.per_sample_max_loss), device=args.device)
    return of_gradient, loss
