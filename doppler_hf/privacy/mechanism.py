"""The Gaussian mechanism: the one place where clipped sums become private gradients.

    g_t = (1/B)·(Σ_{i∈draw} clip(∇fᵢ, C) + 𝒩(0, σ²C²·I))                                    (Algorithm 1, line 5)

B is the *expected* batch size, never the drawn one: the drawn size depends on who is in the data. The noise is the
mechanism's own affair; what the other side of the privacy boundary needs to know of it is one float, `noise_std`.

An optimizer that reads a matrix's gradient in a subspace only (GaLore, P with orthonormal columns) needs no more noise
than the subspace has coordinates. With S the clipped sum and Z the noise, on the side where P multiplies from the left,

    Pᵀ(S + Z) = PᵀS + PᵀZ,    columns of PᵀZ ~ 𝒩(0, σ²C²·PᵀP) = 𝒩(0, σ²C²·I), independent,

so noise drawn for PᵀS alone, r × n instead of m × n, gives the optimizer a gradient of the same distribution.
"""

import functools
import math
import weakref
from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from doppler_hf.privacy.clipping import highest_matmul_precision
from doppler_hf.privacy.noise import NoiseGenerator, add_gaussian_noise, noise_stream
from doppler_hf.privacy.noise_ahead import NoiseAhead

# A basis found in float32 has e = ‖PᵀP − I‖_F of about 1e-5. One found in TF32 or kept in bfloat16 can be beyond this
# bound, and would pay for it with noise.
MAX_ORTHONORMALITY_ERROR: Final = 1e-3


class GaussianMechanism:
    """Add Gaussian noise to clipped sums and average them over the expected batch.

    Args:
        noise_multiplier: σ, the noise's standard deviation in units of the clip norm. 0 adds no noise.
        max_grad_norm: C, the bound on one example's contribution.
        expected_batch_size: B, over all processes.
        generator: Where the random words come from: "csprng", also against who sees every step's gradient, or "philox",
            against who sees the last model only.
        floating_point_safe: Whether each normal is the sum of four, against attacks on floating-point noise.
        draw_ahead: Whether a background thread prepares the next step's noise, at most 4 bytes a coordinate. End it with
            `close`, or use the mechanism in a `with` statement; it ends with the mechanism at the latest. Only noise that
            nobody can reproduce is drawn ahead: with a `seed` it depends on the step, and is drawn in it.
        seed: None for noise from the operating system's entropy. An integer makes it reproducible, for tests only.

    Raises:
        ValueError: A negative `noise_multiplier`, a clip norm or batch size that is not positive, or an unknown
            `generator`.

    Example:
        >>> mechanism = GaussianMechanism(noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=100)
        >>> mechanism.noise_std
        0.005
        >>> mechanism.privatize({"weight": torch.zeros(3, 2)}, step=0)["weight"].shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        generator: NoiseGenerator = "csprng",
        floating_point_safe: bool = False,
        draw_ahead: bool = False,
        seed: int | None = None,
    ) -> None:
        if not 0.0 <= noise_multiplier < float("inf"):
            raise ValueError(f"noise_multiplier must be a finite number ≥ 0, got {noise_multiplier}.")
        if not 0.0 < max_grad_norm < float("inf"):
            raise ValueError(f"max_grad_norm must be a finite number > 0, got {max_grad_norm}.")
        if expected_batch_size < 1:
            raise ValueError(f"expected_batch_size must be at least 1, got {expected_batch_size}.")
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.expected_batch_size = expected_batch_size
        self._floating_point_safe = floating_point_safe
        self._stream = noise_stream(generator, seed=seed)
        self._ahead: NoiseAhead | None = None
        if draw_ahead and seed is None and noise_multiplier > 0.0:
            self._ahead = NoiseAhead(
                functools.partial(noise_stream, generator),
                std=noise_multiplier * max_grad_norm,
                floating_point_safe=floating_point_safe,
            )
            # The thread knows the store, not the mechanism: so that a mechanism nobody has any more ends its thread.
            weakref.finalize(self, self._ahead.close)

    @property
    def prepared(self) -> int:
        """How many normals are ready for the next step; 0 unless they are drawn ahead."""
        return 0 if self._ahead is None else self._ahead.prepared

    def close(self) -> None:
        """End the background thread, if there is one. The mechanism stays usable, and draws on the spot."""
        if self._ahead is not None:
            self._ahead.close()

    def __enter__(self) -> "GaussianMechanism":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        """Refuse to be pickled: prepared noise and keys would travel with the copy."""
        raise TypeError("A GaussianMechanism holds secret noise and cannot be pickled or copied; make a new one instead.")

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise per coordinate of the mean gradient, σC/B (the paper's σ_DP).

        In a subspace it is the same per coordinate there, up to the rounding of P.
        """
        return self.noise_multiplier * self.max_grad_norm / self.expected_batch_size

    @torch.no_grad()
    def privatize(
        self,
        sums: Mapping[str, Float[Tensor, "..."]],
        *,
        step: int,
        subspaces: Mapping[str, Float[Tensor, "..."]] = {},
    ) -> dict[str, Float[Tensor, "..."]]:
        """Turn clipped sums into the private gradient of step `step`.

        Args:
            sums: This process's clipped sums by parameter name, contiguous (modified in place, so that no second gradient
                is held). With several processes each passes its own; they must agree in names, shapes and order.
            step: Optimizer step, counted from 0.
            subspaces: By name, P of each matrix whose gradient is needed in a subspace only, shape (min(m, n), rank) for a
                sum of shape (m, n), with orthonormal columns; any device and floating dtype. It must be the same on every
                process, and follow from what earlier steps released (or from public data) alone.

        Returns:
            The private mean gradient by parameter name, the same on every process: the tensors that were passed. In a
            subspace it is P·(PᵀS + noise)/B for m ≤ n and (S·P + noise)·Pᵀ/B for m > n, so that PᵀG (or G·P) is the noisy
            projected mean again.

        Raises:
            ValueError: A subspace of no parameter or of another shape, or a P whose columns are not orthonormal, by name.
                No sum has been modified then, and no noise drawn.
            RuntimeError: The thread that draws ahead has failed. Nothing must be released then.
        """
        # Sensitivity: adding or removing one example changes the sum over all processes by a Δ of at most C in the joint
        # ℓ₂ norm, because each example is on one process only and contributes one clipped gradient. In a subspace
        # ‖PᵀΔ‖ ≤ ‖P‖₂·‖Δ‖ ≤ stretch·‖Δ‖, and the noise there is `stretch` times as large: in units of the noise the joint
        # change is at most C/(σC) whatever the subspaces. They depend on earlier releases alone, so that the steps
        # compose adaptively, which is what the accountant bounds; going back from the subspace is post-processing.
        #
        # Process 0 adds the noise before the sums are reduced, so no unnoised total exists anywhere, the noise is there
        # exactly once whatever the number of processes, and every replica receives the same bits.
        distributed = dist.is_available() and dist.is_initialized()
        is_noisy = self.noise_multiplier > 0.0 and (not distributed or dist.get_rank() == 0)
        bases = bases_of(subspaces, sums)
        stretches = stretches_of(bases, distributed=distributed)
        if is_noisy and self._ahead is not None:
            coordinates = sum(coordinates_of(total, bases.get(name)) for name, total in sums.items())
            self._ahead.expect(coordinates, pinned=any(total.is_cuda for total in sums.values()))
        for name, total in sums.items():
            basis = bases.get(name)
            released = total if basis is None else project(total, basis)
            if is_noisy:
                self._add_noise(released, stretch=stretches.get(name, 1.0), step=step)
            if distributed:
                dist.all_reduce(released)
            released.div_(self.expected_batch_size)
            if basis is not None:
                lift(released, basis, out=total)
        return dict(sums)

    def _add_noise(self, values: Float[Tensor, "..."], *, stretch: float, step: int) -> None:
        """Add 𝒩(0, (stretch·σC)²) to every coordinate (modified in place)."""
        # What is not prepared is drawn here, from another stream than the thread's: no coordinate goes without, and none
        # shares its noise.
        prepared = 0 if self._ahead is None else self._ahead.add_to(values, scale=stretch)
        add_gaussian_noise(
            values.view(-1)[prepared:],
            std=self.noise_multiplier * self.max_grad_norm * stretch,
            stream=self._stream,
            step=step,
            floating_point_safe=self._floating_point_safe,
        )


def coordinates_of(total: Float[Tensor, "..."], basis: Float[Tensor, "short rank"] | None) -> int:
    """Return how many coordinates of a sum get noise: all, or those in the subspace."""
    return total.numel() if basis is None else basis.shape[1] * max(total.shape)


def bases_of(
    subspaces: Mapping[str, Float[Tensor, "..."]], sums: Mapping[str, Float[Tensor, "..."]]
) -> dict[str, Float[Tensor, "..."]]:
    """Return each P on the device and in the dtype of its sum.

    Args:
        subspaces: P by parameter name.
        sums: Clipped sums by parameter name.

    Raises:
        ValueError: A name without a sum, or shapes that do not fit.
    """
    for name, basis in subspaces.items():
        if name not in sums:
            raise ValueError(f"subspaces has {name!r}, of which there is no clipped sum. Leave out what is not trained.")
        shape, short = tuple(sums[name].shape), min(sums[name].shape, default=0)
        if len(shape) != 2 or basis.ndim != 2 or basis.shape[0] != short or not 1 <= basis.shape[1] <= short:
            raise ValueError(
                f"The subspace of {name!r}, of shape {shape}, has shape {tuple(basis.shape)}. Only matrices have one, and "
                "its shape is (the shorter side, rank) with 1 ≤ rank ≤ the shorter side."
            )
    return {name: basis.to(sums[name]) for name, basis in subspaces.items()}


def stretches_of(bases: Mapping[str, Float[Tensor, "..."]], *, distributed: bool) -> dict[str, float]:
    """Return how much longer each P can make a vector, at most: √(1 + e) ≥ ‖P‖₂ with e = ‖PᵀP − I‖_F.

    Args:
        bases: P by parameter name, each as it will be multiplied with: rounding it to another dtype changes e.
        distributed: Whether other processes multiply with the same bases.

    Raises:
        ValueError: An e above `MAX_ORTHONORMALITY_ERROR`, or not a number.
    """
    if not bases:
        return {}
    errors = torch.stack([orthonormality_error(basis) for basis in bases.values()])
    if distributed:
        # Process 0's noise must do for every process, and none may stop while the others wait for its sums.
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    by_name = dict(zip(bases, errors.tolist(), strict=True))  # one synchronization with the device for all of them
    for name, error in by_name.items():
        if error > MAX_ORTHONORMALITY_ERROR:
            raise ValueError(
                f"The subspace of {name!r} is not orthonormal: ‖PᵀP − I‖_F is {error:.3g}, more than "
                f"{MAX_ORTHONORMALITY_ERROR}. Take P from a QR or a singular value decomposition."
            )
    return {name: math.sqrt(1.0 + error) for name, error in by_name.items()}


def orthonormality_error(basis: Float[Tensor, "short rank"]) -> Float[Tensor, ""]:
    """Return ‖PᵀP − I‖_F in float64, ∞ where it is not a number."""
    gram = basis.double().mT @ basis.double()
    gram.diagonal().sub_(1.0)
    return torch.nan_to_num(torch.linalg.matrix_norm(gram), nan=math.inf, posinf=math.inf)


def project(total: Float[Tensor, "m n"], basis: Float[Tensor, "short rank"]) -> Float[Tensor, "..."]:
    """Return PᵀS, shape (rank, n), for m ≤ n and S·P, shape (m, rank), for m > n."""
    # Outside of autocast and TF32, which would round P and S to fewer digits than the bound on ‖P‖₂ is about.
    with torch.autocast(total.device.type, enabled=False), highest_matmul_precision():
        return basis.mT @ total if total.shape[0] <= total.shape[1] else total @ basis


def lift(projected: Float[Tensor, "..."], basis: Float[Tensor, "short rank"], *, out: Float[Tensor, "m n"]) -> None:
    """Set `out` to P·Y for m ≤ n and to Y·Pᵀ for m > n, of which `project` gives Y back (modified in place)."""
    with torch.autocast(out.device.type, enabled=False), highest_matmul_precision():
        if out.shape[0] <= out.shape[1]:
            torch.mm(basis, projected, out=out)
        else:
            torch.mm(projected, basis.mT, out=out)
