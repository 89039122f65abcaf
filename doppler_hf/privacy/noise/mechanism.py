"""The Gaussian mechanism: the one place where clipped sums become private gradients.

    g_t = (1/B)·(Σ_{i∈draw} clip(∇fᵢ, C) + 𝒩(0, σ²C²·I))                                    (Algorithm 2, line 5)

B is the *expected* batch size, never the drawn one, which depends on the data. The other side of the privacy boundary reads
one float a step from the mechanism, `noise_std`. The noise may be white, or shaped over the steps (`filters.noise_shape`):

    y_t = z_t − Σ_{k=1}^{b−1} c_k y_{t−k},    z_t ~ 𝒩(0, σ²C²‖c‖²·I)

The b − 1 steps of noise that this remembers are secret: they would reveal later noise in the gradients. They are never
saved, and a run that is resumed begins a new recursion, which the ledger accounts for as such.
"""

from collections.abc import Mapping
from typing import Final, final

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from doppler_hf import triton_support
from doppler_hf.filters.noise_shape import WHITE, NoiseShape
from doppler_hf.privacy.noise.gaussian import TERMS, add_gaussian_noise, noise_source
from doppler_hf.privacy.randomness import bit_stream
from doppler_hf.shards import added_up, rows_here

_CPU: Final = torch.device("cpu")


@final
class GaussianMechanism:
    """Add Gaussian noise to clipped sums and average them over the expected batch.

    Args:
        noise_multiplier: σ, the noise's standard deviation in units of the clip norm. 0 adds no noise.
        max_grad_norm: C, the bound on one example's contribution.
        expected_batch_size: B, over all processes.
        shape: The shape of the noise over the steps. White noise is independent from step to step. Shaped noise needs units
            that take part at most once in `shape.bands` steps, and keeps `shape.bands` - 1 gradients in memory.
        first_step: The step at which shaped noise begins. Its steps are to be taken one after the other.
        device: Where the sums are. On an accelerator of CUDA or ROCm with Triton a kernel makes the noise there.
        floating_point_safe: Whether each normal is the sum of four, against attacks on floating-point noise.
        seed: None for noise from the operating system's entropy. An integer makes it reproducible, for tests only.

    Attributes:
        source: Where the noise comes from, in one line.

    Raises:
        ValueError: If `noise_multiplier` is negative, or the clip norm or the batch size is not positive.

    Example:
        >>> mechanism = GaussianMechanism(noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=100)
        >>> mechanism.noise_std(step=0)
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
        shape: NoiseShape = WHITE,
        first_step: int = 0,
        device: torch.device = _CPU,
        floating_point_safe: bool = False,
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
        self.shape = shape
        self._first_step = self._next_step = first_step
        # Of each parameter the shaped noise of so many earlier steps, the last one first.
        self._num_past, self._past = shape.bands - 1, dict[str, list[Tensor]]()
        self.source = noise_source(device, floating_point_safe=floating_point_safe, seed=seed)
        self._stream = bit_stream(seed, purpose="noise")
        self._in_kernel = seed is None and triton_support.are_usable(device)
        self._floating_point_safe, self._seed = floating_point_safe, seed
        # Of the white noise z in a sum. Sensitivity: a unit's gradient stands in b rows of CG, with norm ‖c‖ times its own.
        self._white_std = noise_multiplier * max_grad_norm * shape.norm

    def noise_std(self, step: int) -> float:
        """Return the standard deviation of the noise per coordinate of the mean gradient at a step, from `first_step` on.

        Of white noise it is σC/B, the paper's σ_DP, at all of them; of other noise it rises at first.
        """
        white = self.noise_multiplier * self.max_grad_norm / self.expected_batch_size
        return white if self.shape.is_white else white * self.shape.std(step - self._first_step)

    @torch.no_grad()
    def privatize(
        self, sums: Mapping[str, Float[Tensor, "..."]], *, step: int, shards: Mapping[str, DTensor] = {}
    ) -> dict[str, Float[Tensor, "..."]]:
        """Turn clipped sums into the private gradient of step `step`.

        Args:
            sums: This process's clipped sums by parameter name, contiguous (modified in place, so that no second gradient
                is held). With several processes each passes its own, and all add some of the noise; they must agree in
                names, shapes and order.
            step: Optimizer step, counted from 0.
            shards: By name the parameters that lie in shards. Their sums are of whole parameters like all others.

        Returns:
            The private mean gradient by parameter name, in the tensors that were passed. It is the same on every process;
            for parameters in shards it has this process's rows.

        Raises:
            ValueError: If a sum is not of real numbers, by name. No sum has been modified then, and no noise drawn.
            RuntimeError: If steps of shaped noise do not follow each other. Nothing must be released then.
        """
        if self._num_past and step != self._next_step:
            raise RuntimeError(
                f"Steps of shaped noise must follow each other: the next one is {self._next_step}, got {step}. Make a new "
                "mechanism for a new run."
            )
        # Sensitivity: the noise is of real numbers, and would leave imaginary parts as they are.
        other = next((name for name, total in sums.items() if not total.is_floating_point()), None)
        if other is not None:
            raise ValueError(
                f"Sums must be of floating-point numbers, got {other!r} of type {sums[other].dtype}. Keep the real and the "
                "imaginary part in a real tensor (torch.view_as_real)."
            )
        # Sensitivity: adding or removing one example changes the sum over all processes by at most C in the joint ℓ₂ norm,
        # because each example is on one process only and contributes one clipped gradient.
        #
        # Each process adds the noise of its own run of coordinates to its own sum, before these are reduced; of a parameter
        # in shards these are the rows that it keeps. Each from a stream under a key of its own: σC for every coordinate,
        # once, however many processes there are, and independent between them. So no total without noise exists anywhere,
        # and every replica receives the same bits.
        distributed = dist.is_available() and dist.is_initialized()
        rank, processes = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        own = {
            name: rows_here(total, like=shards[name]).view(-1)
            if name in shards
            else total.view(-1).tensor_split(processes)[rank]
            for name, total in sums.items()
        }
        # In one process the kernel writes the mean at once; several add up first.
        scale = 1.0 / self.expected_batch_size
        if self.noise_multiplier > 0.0:
            if self._in_kernel:
                self._add_in_one_kernel(own, scale=1.0 if distributed else scale)
            else:
                for name, part in own.items():
                    self._add_on_cpu(name, part, whole=sums[name], step=step)
        private, reductions = dict(sums), []
        for name, total in sums.items():
            if name in shards:
                private[name] = added_up(total, like=shards[name])
            elif distributed:
                reductions.append(dist.all_reduce(total, async_op=True))
        for reduction in reductions:
            reduction.wait()
        if distributed or not self._in_kernel or self.noise_multiplier == 0.0:
            torch._foreach_div_(list(private.values()), self.expected_batch_size)
        self._next_step = step + 1
        return private

    def _add_in_one_kernel(self, parts: Mapping[str, Float[Tensor, " n"]], *, scale: float) -> None:
        """Add the noise of a step to coordinates on an accelerator, and multiply them (modified in place)."""
        from doppler_hf.privacy.noise.chacha import add_noise_and_scale  # imports Triton

        states = []
        for name, part in parts.items() if self._num_past else ():
            past = self._past.setdefault(name, [])
            before = [*past]
            # Of b − 1 tensors y_t overwrites the oldest one, so that no more memory is needed.
            past.insert(0, past.pop() if len(past) == self._num_past else torch.empty_like(part))
            states.append((past[0], *before))
        for kind in {(part.device, part.dtype) for part in parts.values()}:
            add_noise_and_scale(
                [part for part in parts.values() if (part.device, part.dtype) == kind],
                std=self._white_std,
                scale=scale,
                terms=TERMS if self._floating_point_safe else 1,
                coefficients=self.shape.c[1 : len(states[0])] if states else (),
                states=[state for state in states if (state[0].device, state[0].dtype) == kind],
            )

    def _add_on_cpu(self, name: str, part: Float[Tensor, " n"], *, whole: Float[Tensor, "..."], step: int) -> None:
        """Add the noise of a step to the coordinates of a part of a sum (modified in place)."""
        begin = int(part.storage_offset() - whole.storage_offset())

        def add_white(values: Float[Tensor, " n"]) -> None:
            # With a seed, for tests, each process makes the noise that one would, and takes what is of its coordinates.
            drawn = values if self._seed is None else values.new_zeros(whole.numel())
            add_gaussian_noise(
                drawn, std=self._white_std, stream=self._stream, step=step, floating_point_safe=self._floating_point_safe
            )
            if drawn is not values:
                values.add_(drawn[begin : begin + len(values)])

        if self._num_past == 0:
            add_white(part)
            return
        # Privacy: y depends on the generator alone, never on an example, so that what it is rounded to in float32 is noise
        # of a slightly other z, and not a function of the data.
        past = self._past.setdefault(name, [])
        # In place of the oldest one, since another tensor of that size takes longer than what is computed.
        y = torch.zeros_like(part) if len(past) < self._num_past else past.pop().mul_(-self.shape.c[-1])
        for c, before in zip(self.shape.c[1:], past, strict=False):
            y.sub_(before, alpha=c)
        add_white(y)
        part.add_(y)
        past.insert(0, y)
