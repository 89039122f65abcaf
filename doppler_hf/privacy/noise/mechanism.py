"""The Gaussian mechanism: the one place where clipped sums become private gradients.

    g_t = (1/B)·(Σ_{i∈draw} clip(∇fᵢ, C) + 𝒩(0, σ²C²·I))                                    (Algorithm 2, line 5)

B is the *expected* batch size, never the drawn one, which depends on the data. The other side of the privacy boundary reads
one float a step from the mechanism, `noise_std`. The noise may be white, or shaped over the steps (`filters.noise_shape`):

    y_t = z_t − Σ_{k=1}^{b−1} c_k y_{t−k},    z_t ~ 𝒩(0, σ²C²‖c‖²·I)

The noise of the last b − 1 steps is kept. It is secret, because it would reveal later noise in the gradients. It is never
saved, so a resumed run begins a new recursion, for which the ledger accounts.

The training loss may be released together with the gradient, as one more coordinate (`PrivateLoss`):

    (1/B)·(Σ_{i∈draw} wᵢ·clip(lossᵢ, ±L) + 𝒩(0, σ_L²L²)),    wᵢ the share of the example in its unit, or 1 without units

`joint_noise_multiplier` accounts for both together.

Normals are computed from uniform words by the Box–Muller transform:

    z₁ = ρ·cos θ,   z₂ = ρ·sin θ,   ρ = √(−2 ln u),   u = |t|,   θ = πt′,   t, t′ uniform on [−1, 1],
    cos θ = 2/(1 + τ²) − 1,   sin θ = 2τ/(1 + τ²),   τ = tan(θ/2)

The words come from a cipher, since the gradient of every step shows bare noise, for example in an embedding row that no
example uses. On a CPU the cipher is AES-256-CTR (`bits`), and on an accelerator ChaCha20 in a kernel (`chacha`). Without
Triton the noise comes from the CPU.

The transform is computed in float64 with a 64-bit word for each t. The smallest u is 2⁻⁶⁴, so the tail reaches 9.4 standard
deviations, which a normal exceeds once in 10²⁰ times. With a probability of 2⁻⁵⁴, u is 1 and both normals are 0; cos θ or
sin θ is 0 with a probability below 2⁻⁵². With 24-bit uniforms the tail would end at 5.8, and one pair in 2²⁵ would get no
noise. In a large model this would be several coordinates at every step, and δ allows none. Only the finished noise is
rounded, to the dtype of the values, so that every number of that dtype stays possible.

`floating_point_safe` adds four independent normals and halves the sum. The set of floating-point numbers that a single
transform can return reveals something about the value to which noise was added (Mironov 2012). For a sum of four that set
cannot feasibly be computed (Holohan and Braghin, https://arxiv.org/abs/2107.10138, section 5.1).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Final, final

import torch
import torch.distributed as dist
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.distributed.tensor import DTensor

from doppler_hf import triton_support
from doppler_hf.errors import Failure, Refusal
from doppler_hf.filters.noise_shape import WHITE, NoiseShape
from doppler_hf.privacy.randomness import BitStream, bit_stream
from doppler_hf.shards import added_up, rows_here

_CPU: Final = torch.device("cpu")
# So many normals are made at a time: enough to divide them among torch's threads, with 4 MiB of working memory.
_PIECE: Final = 1 << 18
# The number of normals that `floating_point_safe` adds.
TERMS: Final = 4


@final
class GaussianMechanism:
    """Add Gaussian noise to clipped sums and average them over the expected batch.

    Args:
        noise_multiplier: σ, the standard deviation of the noise in units of the clip norm. 0 adds no noise.
        max_grad_norm: C, the clip norm: the bound on the contribution of one example.
        expected_batch_size: B, over all processes.
        shape: The shape of the noise over the steps. White noise is independent from step to step. Shaped noise needs units
            that take part at most once in `shape.bands` steps, and keeps `shape.bands` - 1 gradients in memory.
        first_step: The step at which shaped noise begins. Later steps must follow one after the other.
        device: The device of the sums. On CUDA or ROCm with Triton, a kernel makes the noise on the device.
        floating_point_safe: Whether each normal is the sum of four, against attacks on floating-point noise.
        seed: None for secret noise, with a key from the operating system. An integer makes it reproducible, for tests only.

    Attributes:
        source: The source of the noise, in one line of text.

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
            raise Refusal("out-of-range", f"noise_multiplier must be finite and at least 0; got {noise_multiplier}.")
        if not 0.0 < max_grad_norm < float("inf"):
            raise Refusal("out-of-range", f"The clip norm, max_grad_norm, must be positive and finite; got {max_grad_norm}.")
        if expected_batch_size < 1:
            raise Refusal("out-of-range", f"expected_batch_size must be at least 1; got {expected_batch_size}.")
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.expected_batch_size = expected_batch_size
        self.shape = shape
        self._first_step = self._next_step = first_step
        # The shaped noise of the last b − 1 steps: in kernels for each parameter, the latest first, and on the CPU in the
        # rows of one matrix for each kind of values.
        self._num_past, self._past = shape.bands - 1, dict[str, list[Tensor]]()
        self._rows: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.source = noise_source(device, floating_point_safe=floating_point_safe, seed=seed)
        self._stream = bit_stream(seed, purpose="noise")
        self._in_kernel = seed is None and triton_support.are_usable(device)
        self._floating_point_safe, self._seed = floating_point_safe, seed
        # The standard deviation of the white noise z in a sum. Sensitivity: a unit's gradient is in b rows of CG, with norm
        # ‖c‖ times its own.
        self._white_std = noise_multiplier * max_grad_norm * shape.norm

    def noise_std(self, step: int) -> float:
        """Return the standard deviation of the noise per coordinate of the mean gradient at a step, from `first_step` on.

        For white noise it is σC/B (the paper's σ_DP) at every step; for shaped noise it rises during the first steps.
        """
        white = self.noise_multiplier * self.max_grad_norm / self.expected_batch_size
        return white if self._num_past == 0 else white * self.shape.std(step - self._first_step)

    @torch.no_grad()
    def privatize(
        self, sums: Mapping[str, Float[Tensor, "..."]], *, step: int, shards: Mapping[str, DTensor] = {}
    ) -> dict[str, Float[Tensor, "..."]]:
        """Turn clipped sums into the private gradient of step `step`.

        Args:
            sums: Parameter name → this process's clipped sum, contiguous (modified in place, so that no second gradient is
            in
                memory). With several processes, each passes its own sums and adds a part of the noise; names, shapes and
                order must be the same.
            step: Optimizer step, counted from 0.
            shards: Name → parameter, for parameters in shards. Their sums have the shape of the whole parameter too.

        Returns:
            Parameter name → private mean gradient, in the tensors that were passed. It is the same on every process, except
            that for parameters in shards it has this process's rows.

        Raises:
            ValueError: If a sum is not of real floating-point numbers. Then no sum has been modified, and no noise drawn.
            RuntimeError: If steps of shaped noise do not follow each other. Then nothing has been released.
        """
        if self._num_past and step != self._next_step:
            raise Failure(
                "steps-out-of-order",
                "The steps of a private run must be made in order, because their noise depends on the noise of earlier "
                f"steps: expected step {self._next_step}; got {step}. Let DopplerTrainer.train() make the steps, and start "
                "the run again with resume_from_checkpoint=True.",
            )
        # Sensitivity: the noise is real, so imaginary parts would get no noise.
        other = next((name for name, total in sums.items() if not total.is_floating_point()), None)
        if other is not None:
            raise Refusal(
                "not-real",
                f"Noise can be added to real floating-point numbers only; {other!r} has the type {sums[other].dtype}. Keep "
                "the real and the imaginary part in a real tensor (torch.view_as_real).",
            )
        # Sensitivity: adding or removing one example changes the sum over all processes by at most C in the joint ℓ₂ norm,
        # because each example is on one process only and contributes one clipped gradient.
        #
        # Each process adds the noise for its own range of coordinates to its own sum, before the sums are reduced. For a
        # parameter in shards, this range is the rows that the process keeps. Each process has a stream with its own key, so
        # every coordinate gets noise σC once, however many processes there are, and the noise of different processes is
        # independent. So no total without noise exists anywhere, and every replica receives the same bits.
        distributed = dist.is_available() and dist.is_initialized()
        rank, processes = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        own = {
            name: rows_here(total, like=shards[name]).view(-1)
            if name in shards
            else total.view(-1).tensor_split(processes)[rank]
            for name, total in sums.items()
        }
        # In one process, the kernel writes the mean directly; several processes add up their sums first.
        scale = 1.0 / self.expected_batch_size
        if self.noise_multiplier > 0.0:
            if self._in_kernel:
                self._add_in_one_kernel(own, scale=1.0 if distributed else scale)
            else:
                self._add_on_cpu(own, wholes=sums, step=step)
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
            # y_t overwrites the oldest of the b − 1 tensors, so that no more memory is needed.
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

    def _add_on_cpu(
        self, parts: Mapping[str, Float[Tensor, "_"]], *, wholes: Mapping[str, Float[Tensor, "..."]], step: int
    ) -> None:
        """Add the noise of a step to the coordinates of parts of sums (modified in place)."""
        # With a seed (in tests), each process makes the noise of a single process, and uses the part for its coordinates.
        values = parts
        if self._seed is not None:
            values = {name: whole.new_zeros(whole.numel()) for name, whole in wholes.items()}
        for device, dtype in dict.fromkeys((each.device, each.dtype) for each in values.values()):
            of_kind = {name: each for name, each in values.items() if (each.device, each.dtype) == (device, dtype)}
            self._add_to_kind(of_kind, device=device, dtype=dtype, step=step)
        if self._seed is not None:
            for name, part in parts.items():
                begin = int(part.storage_offset() - wholes[name].storage_offset())
                part.add_(values[name][begin : begin + len(part)])

    def _add_to_kind(
        self, values: Mapping[str, Float[Tensor, "_"]], *, device: torch.device, dtype: torch.dtype, step: int
    ) -> None:
        """Add the noise of a step to values of one kind, which together are one vector (modified in place)."""
        count, rows, begin = sum(each.numel() for each in values.values()), None, 0
        if self._num_past:
            if (rows := self._rows.get((device, dtype))) is None:
                rows = self._rows[device, dtype] = torch.zeros(self._num_past, count, dtype=dtype, device=device)
            # Row j has the noise of the latest step before this one whose number is j modulo b − 1.
            latest = step - self._first_step - 1
            ages = [(latest - row) % self._num_past + 1 for row in range(self._num_past)]
            c = torch.tensor([self.shape.c[age] for age in ages], dtype=dtype, device=device)
        normals = Normals(
            count, std=self._white_std, stream=self._stream, dtype=dtype, floating_point_safe=self._floating_point_safe
        )
        for piece in in_pieces(values):
            sizes = [part.numel() for part in piece]
            end = begin + sum(sizes)
            noise = normals.draw(end - begin, step=step).to(device)
            if rows is not None:
                # Privacy: y depends on the generator alone, never on an example. So its rounding to float32 makes it the
                # noise of a slightly different z, and not a function of the data.
                past = rows[:, begin:end]
                noise = noise.addmv_(past.t(), c, alpha=-1.0)
                past[(latest + 1) % self._num_past] = noise  # the oldest row
            torch._foreach_add_(piece, noise.split(sizes))
            begin = end


class PrivateLoss:
    """Adds up the losses of a draw on a device and releases their noisy mean over the expected batch.

    The mechanism has σ_L as `noise_multiplier` and L as `max_grad_norm`.

    Example:
        >>> mechanism = GaussianMechanism(noise_multiplier=0.0, max_grad_norm=2.0, expected_batch_size=2)
        >>> loss = PrivateLoss(mechanism, device=torch.device("cpu"))
        >>> loss.add(torch.tensor([0.5, 7.0]))
        >>> loss.release(step=0).item()
        1.25
    """

    def __init__(self, mechanism: GaussianMechanism, *, device: torch.device) -> None:
        self.mechanism = mechanism
        # The sum is in float64, so that the contribution of one example does not depend on the size of the sum.
        self._sum = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, losses: Float[Tensor, " batch"], *, weights: Float[Tensor, " batch"] | None = None) -> None:
        """Add the losses of some examples of the batch, each times its weight; NaN counts as L.

        A weight is the share of the example in its unit, by default 1. The weights of a unit add up to at most 1.
        """
        # Sensitivity: an example changes the sum by a number within ±L, whatever its loss, and a unit by at most L.
        bound = self.mechanism.max_grad_norm
        clipped = losses.double().nan_to_num(nan=bound).clamp(-bound, bound)
        self._sum += clipped.sum() if weights is None else clipped @ weights.double()

    def reset(self) -> None:
        """Begin the next batch, and discard losses that were added but not released."""
        self._sum = torch.zeros_like(self._sum)

    def release(self, *, step: int) -> Float[Tensor, ""]:
        """Return the private mean loss of the batch, the same on every process, and begin the next batch."""
        released = self.mechanism.privatize({"loss": self._sum}, step=step)["loss"]
        self.reset()
        return released


# --- normals ----------------------------------------------------------------------------------------------------------


def noise_source(device: torch.device, *, floating_point_safe: bool = False, seed: int | None = None) -> str:
    """Return the source of the noise for sums on a device in one line.

    Example:
        >>> noise_source(torch.device("cpu"))
        'AES-256-CTR keyed by the operating system, Box-Muller'
    """
    secret = "ChaCha20 keyed at every step" if seed is None and triton_support.are_usable(device) else "AES-256-CTR keyed"
    bits = f"{secret} by the operating system" if seed is None else "reproducible from a seed: not private"
    return f"{bits}, Box-Muller" + (", sum of four against floating-point attacks" if floating_point_safe else "")


def box_muller(words: Int64[Tensor, " n"], out: Float64[Tensor, " n"], *, std: float) -> None:
    """Turn an even number of uniform words into as many independent draws of 𝒩(0, std²) (both modified in place)."""
    half = len(words) // 2
    radius, tangent = out[:half], out[half:]
    radius[:] = words[:half]
    tangent[:] = words[half:]
    factor = words[:half].view(torch.float64)  # The words have been read, so their memory can be reused.
    # An integer t plus one half is never 0. A float64 is most precise near 0, where the logarithm needs precision.
    radius.add_(0.5).mul_(2.0**-63).abs_().log_().mul_(-2.0 * std * std).sqrt_()
    tangent.mul_(math.pi / 2.0 * 2.0**-63).tan_()
    # With f = 2ρ/(1 + τ²): z₁ = f − ρ and z₂ = τf.
    torch.mul(tangent, tangent, out=factor)
    factor.mul_(0.5).add_(0.5)
    torch.div(radius, factor, out=factor)
    tangent.mul_(factor)
    torch.sub(factor, radius, out=radius)


class Normals:
    """Makes the noise of one step on the CPU, a piece at a time: independent draws of 𝒩(0, std²), in `dtype`.

    Args:
        count: The number of draws that are needed.
        std: Their standard deviation.
        stream: The source of their words. No word is used twice.
        dtype: The dtype to which each finished draw is rounded.
        floating_point_safe: Whether each draw is the sum of four.
    """

    def __init__(
        self, count: int, *, std: float, stream: BitStream, dtype: torch.dtype, floating_point_safe: bool = False
    ) -> None:
        self._terms = TERMS if floating_point_safe else 1
        self._std, self._stream = std / math.sqrt(self._terms), stream
        most = min(_PIECE, count + count % 2)
        self._words = torch.empty(most, dtype=torch.int64, device="cpu")
        self._drawn, self._rounded = torch.empty_like(self._words, dtype=torch.float64), torch.empty(most, dtype=dtype)
        # Leaving out one pass over memory saves a seventh of the time.
        self._total = torch.empty_like(self._drawn) if floating_point_safe else self._drawn

    def draw(self, count: int, *, step: int) -> Float[Tensor, " count"]:
        """Return the next draws, at most 2¹⁸ (`in_pieces`); they are overwritten by the next call."""
        even = count + count % 2
        if self._total is not self._drawn:
            self._total.zero_()
        for _ in range(self._terms):
            self._stream.fill(self._words[:even], step=step)
            box_muller(self._words[:even], self._drawn[:even], std=self._std)
            if self._total is not self._drawn:
                self._total[:even].add_(self._drawn[:even])
        # The noise is converted as a whole, because torch adds tensors of two dtypes slowly.
        return self._rounded[:count].copy_(self._total[:count])


def in_pieces(values: Mapping[str, Float[Tensor, "_"]]) -> Iterator[list[Float[Tensor, "_"]]]:
    """Yield lists of views of `values`, in order: each list has 2¹⁸ numbers together, and the last one the rest."""
    piece: list[Tensor] = []
    room = _PIECE
    for each in values.values():
        begin, size = 0, each.numel()
        while begin < size:
            piece.append(each[begin : begin + room])
            begin, room = begin + room, room - min(room, size - begin)
            if room == 0:
                yield piece
                piece, room = [], _PIECE
    if piece:
        yield piece
