r"""DOPPLER's optimizer: a low-pass filter in the place of momentum (DOPPLER, Algorithms 1 and 2).

    g̃_t = g_t | Pᵀ g_t                                    (GaLore)
    m̂_t = lowpass(g̃)_t / c_t
    d_t = m̂_t | m̂_t / max(√v̂_t, ε) | m̂_t / √max(v̂_t - noise_std², floor)
    x_{t+1} = (1 - lr·weight_decay) x_t - lr · (d_t | scale · P d_t)

The gradient is private already when it arrives; all that is done here is post-processing.
"""

import functools
import math
from collections.abc import Callable
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter
from doppler_hf.linalg import in_float32, is_wide, project
from doppler_hf.optim.adaptive_fir import OptimalFIR, advance_fir, found_anew, new_estimate, record
from doppler_hf.optim.checks import RANK_WITHOUT_EFFECT, check_constants, check_group
from doppler_hf.optim.galore import (
    PROJECTOR_SOURCES,
    BasisChange,
    Projector,
    ProjectorSource,
    add_lifted,
    find_basis,
    has_projected,
    is_projected,
    rotated,
)
from doppler_hf.optim.low_pass import bias_correction, padded_coefficients
from doppler_hf.optim.one_pass import OnePass, Work
from doppler_hf.optim.state import BASES, Base, copied_state, dense, full_dtype, refuse_other_group, refuse_other_state
from doppler_hf.optim.update import Numbers, descend, filtered

# The floor is load-bearing: at a small privacy budget v̂ - noise_std² is mostly noise around zero, and wherever it
# is negative the floor alone sets the step size. What it must exceed is that noise, which scales with noise_std²;
# hence a fraction of it, not a constant. Measured on two tasks and two ε (scripts/experiments/tune_floor.py), with a rate
# for each: 0.1 to 1 are the same, below that accuracy falls.
DEFAULT_FLOOR_FRACTION: Final = 0.3
# Parameters from which on compiling, some twenty seconds, is worth its time.
WORTH_COMPILING: Final = 20_000_000


@final
class DopplerOptimizer(Optimizer):
    r"""SGD, Adam or DP-AdamBC on the low-pass filtered gradient, with decoupled weight decay, in a subspace if wanted.

    Momentum is a filter of first order (``PAPER_FILTERS["momentum"]``), so there is no β₁. ``lr``, ``weight_decay``,
    ``rank``, ``update_proj_gap`` and ``scale`` may differ between parameter groups. Each parameter holds
    ``low_pass_filter.order`` tensors of state, and one more for the Adam bases.

    With ``rank`` the matrices of a group whose shorter side is longer than that are updated by GaLore, and hold their
    state at this rank; its other parameters are updated as without, and so are groups without a rank, for which
    the other arguments of GaLore say nothing.

    Args:
        params: Parameters, or parameter groups, as for every torch optimizer.
        lr: Learning rate, at least 0.
        low_pass_filter: The filter along the steps; or an `OptimalFIR`, whose taps are estimated from the gradients of each
            parameter group. The latter keeps the last gradients, and neither GaLore nor a compiled update goes with it.
        base: What is done with the filtered gradient: ``"sgd"``, ``"adam"`` (DPAdam), or ``"adam_bc"`` (DPAdamBC,
            which subtracts the noise from the second moment).
        beta2: Decay of the second moment, in [0, 1).
        eps: Least denominator of ``"adam"``, positive, in units of the gradient.
        floor: Least squared denominator of ``"adam_bc"`` (the γ′ of Tang et al.), positive, in units of the squared
            gradient. By default ``max(DEFAULT_FLOOR_FRACTION * noise_std**2, eps**2)``: it matters as much as the
            learning rate, and follows the noise.
        noise_std: Standard deviation of the noise, per coordinate of the mean gradient (the paper's σ_DP). Read by
            ``"adam_bc"`` and by an `OptimalFIR`.
        weight_decay: Decoupled weight decay as in AdamW, at least 0.
        rank: r of GaLore, or None for none.
        update_proj_gap: After how many steps GaLore's basis is found anew.
        scale: Factor of GaLore's updates.
        basis_change: What becomes of filter and second moment when the basis changes: ``"rotate"`` takes them along,
            ``"reset"`` begins anew, ``"keep"`` takes old coordinates for new ones, as the first implementation did.
        projector: How a basis is found; see `galore.find_basis`.
        projector_source: In what: the ``"gradient"`` of the step, or the ``"filtered"`` one, in which there is less noise.
            For the latter the filter runs ahead of the projection and keeps its states in full size.
        state_dtype: ``torch.bfloat16`` for filter states and second moment of half the size, rounded at random. By
            default float32 for parameters of half precision, and the parameter's own dtype otherwise.
        compiled: Whether torch compiles the update, which takes some twenty seconds once. By default from
            ``WORTH_COMPILING`` parameters on.

    Raises:
        ValueError: If an argument lies outside its range, or would have no effect.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = DopplerOptimizer([weight], lr=0.5, low_pass_filter=PAPER_FILTERS["second-order"])
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 0.5000])

    Source:
        DOPPLER, Algorithms 1 and 2; Tang et al. 2024 for ``"adam_bc"``; Zhao et al. 2024 for ``rank``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        low_pass_filter: LowPassFilter | OptimalFIR = PAPER_FILTERS["none"],
        base: Base = "sgd",
        beta2: float = 0.999,
        eps: float = 1e-8,
        floor: float | None = None,
        noise_std: float = 0.0,
        weight_decay: float = 0.0,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        basis_change: BasisChange = "rotate",
        projector: Projector = "warm",
        projector_source: ProjectorSource = "gradient",
        state_dtype: torch.dtype | None = None,
        compiled: bool | None = None,
    ) -> None:
        check_constants(
            low_pass_filter=low_pass_filter,
            base=base,
            beta2=beta2,
            eps=eps,
            floor=floor,
            noise_std=noise_std,
            basis_change=basis_change,
            projector=projector,
            projector_source=projector_source,
            state_dtype=state_dtype,
            compiled=compiled,
        )
        # These are attributes and no group options: load_state_dict replaces the groups by those of the checkpoint,
        # and with them it would silently put back the noise_std of an earlier run, which is wrong as soon as the
        # privacy arguments have changed.
        self.low_pass_filter = low_pass_filter
        self.basis_change: BasisChange = basis_change
        self.projector: Projector = projector
        self.projector_source: ProjectorSource = projector_source
        self.state_dtype = state_dtype
        self.compiled = compiled
        self.base: Base = base
        self.beta2 = beta2
        self.noise_std = noise_std
        self.eps = eps
        self._floor = floor
        options = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, options | {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale})
        if rank is not None and not any(has_projected(group) for group in self.param_groups):
            raise ValueError(RANK_WITHOUT_EFFECT.format(rank))

    @property
    def floor(self) -> float:
        """The smallest corrected second moment of "adam_bc"."""
        return max(DEFAULT_FLOOR_FRACTION * self.noise_std**2, self.eps**2) if self._floor is None else self._floor

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as every torch optimizer does.

        Args:
            param_group: ``params``, and those of `arguments.GROUP_OPTIONS` that differ from the optimizer's.

        Raises:
            ValueError: If an option lies outside its range, or there is none of that name.
        """
        own = set(param_group)  # torch adds the defaults to the dict itself
        super().add_param_group(param_group)
        added = self.param_groups[-1]  # only now are its parameters a list, and the defaults in it
        try:
            check_group(added, own=own, low_pass_filter=self.low_pass_filter, state_dtype=self.state_dtype)
        except ValueError:
            del self.param_groups[-1]
            raise
        if isinstance(self.low_pass_filter, OptimalFIR):
            added["taps"] = [1 / self.low_pass_filter.taps] * self.low_pass_filter.taps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient (modified in place).

        Args:
            closure: Must be None: evaluating the loss again would make a second gradient that was never privatized.

        Raises:
            ValueError: If a closure is given, or a gradient is sparse.
        """
        if closure is not None:
            raise ValueError(f"closure is {closure!r}: compute the gradient before step() and call it without a closure")
        updated = [(p, dense(p.grad), group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        works: dict[Numbers, list[Work]] = {}  # most parameters share the numbers of a step
        lifted = []
        for p, grad, group in updated:
            state, decay = self._state_of(p, group), 1 - float(group["lr"]) * float(group["weight_decay"])
            if "basis" not in state:
                work = Work(p.detach(), grad, state["filter_states"], state.get("exp_avg_sq"))
                numbers = self._numbers(state, group, decay=decay)
                if "taps" in group:
                    products = advance_fir(work, taps=group["taps"], beta2=self.beta2, numbers=numbers)
                    record(state, products, numel=p.numel(), noise_std=self.noise_std)
                else:
                    works.setdefault(numbers, []).append(work)
                continue
            grad, filtered_grad = self._projected(grad, state, group)
            numbers = self._numbers(state, group, decay=1.0)
            # What the plain update does to weights of zero is the update itself.
            update, v = torch.zeros_like(grad), state.get("exp_avg_sq")
            if filtered_grad is None:
                works.setdefault(numbers, []).append(Work(update, grad, state["filter_states"], v))
            else:
                descend(update, grad, filtered_grad, v, beta2=self.beta2, **vars(numbers))
            lifted.append((p, update, state["basis"], group["scale"], decay))
        for numbers, some in works.items():
            self._one_pass(some, numbers)
        for p, update, basis, scale, decay in lifted:
            add_lifted(p, update, basis, scale=scale, decay=decay)
        if isinstance(self.low_pass_filter, OptimalFIR):
            self._adapt(self.low_pass_filter.update_gap)

    def _adapt(self, update_gap: int) -> None:
        """Finds the taps of each group anew where its steps have come to a multiple of the gap."""
        for group in self.param_groups:
            states = [self.state[p] for p in group["params"] if p in self.state]
            if max((state["step"] for state in states), default=1) % update_gap == 0:
                group["taps"] = found_anew(group["taps"], states, noise_std=self.noise_std)

    def _projected(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Returns the projected gradient, and the projected filtered one where the filter runs ahead of the projection."""
        filtered_grad = None
        if self.projector_source == "filtered":
            b, a = self._coefficients
            filtered_grad = filtered(in_float32(grad), state["filter_states"], b=b, a=a)
        if state["steps_in_basis"] % group["update_proj_gap"] == 0:
            source = in_float32(grad) if filtered_grad is None else filtered_grad
            self._renew_basis(source, state, rank=group["rank"])
        state["steps_in_basis"] += 1
        basis = state["basis"]
        return project(grad.to(basis.dtype), basis), None if filtered_grad is None else project(filtered_grad, basis)

    def _numbers(self, state: dict[str, Any], group: dict[str, Any], *, decay: float) -> Numbers:
        """Advances the step count, and takes the corrections of the zero start into the constants and the step size."""
        state["step"] += 1
        if "taps" in group:
            response = math.fsum(group["taps"][: state["step"]])
        else:
            b, a = self._coefficients
            response = bias_correction(state["bias_states"], b=b, a=a)
        step_size = float(group["lr"]) / response
        if self.base == "sgd":
            return Numbers(step_size=step_size, decay=decay)
        k = 1 - self.beta2 ** state["step"]
        noise_var, floor = (self.noise_std**2, self.floor) if self.base == "adam_bc" else (0.0, self.eps**2)
        return Numbers(step_size=step_size * math.sqrt(k), decay=decay, noise_var=k * noise_var, floor=k * floor)

    def _renew_basis(self, source: Tensor, state: dict[str, Any], *, rank: int) -> None:
        is_first, old, v = state["steps_in_basis"] == 0, state["basis"], state.get("exp_avg_sq")
        state["basis"] = find_basis(source, rank, projector=self.projector, previous=None if is_first else old)
        if is_first or self.basis_change == "keep":
            return
        # A filter ahead of the projection knows nothing of bases.
        states = [] if self.projector_source == "filtered" else state["filter_states"]
        if self.basis_change == "reset":
            for tensor in (*states, *(() if v is None else (v,))):
                tensor.zero_()
            state["step"] = 0
            state["bias_states"] = state["bias_states"] if not states else [0.0] * len(states)
            return
        moved, moved_v = rotated(states, v, old=old, new=state["basis"], wide=is_wide(source))
        state |= ({"filter_states": moved} if states else {}) | ({"exp_avg_sq": moved_v} if v is not None else {})

    def subspaces(self) -> dict[Tensor, Tensor]:
        """Returns for which parameters the next step reads no more of the gradient than its projection, and onto what.

        Noise for these may be drawn in the subspace. They are the ones whose basis stays for the next step, unless the
        filter runs ahead of the projection.

        Returns:
            Parameter → P, shape (shorter side, rank), with orthonormal columns.
        """
        if self.projector_source == "filtered":
            return {}
        return {
            p: self.state[p]["basis"]
            for group in self.param_groups
            for p in group["params"]
            if p in self.state and self.state[p].get("steps_in_basis", 0) % group["update_proj_gap"] != 0
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a checkpoint of an optimizer with the same base, the same rank, and a filter of the same order.

        The learning rates and weight decays are those of the checkpoint; filter, noise and the other constants stay
        those of this optimizer.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If the checkpoint was written by another optimizer, for another base or rank, or for a filter of
                another order.
        """
        saved_states, own = state_dict["state"], [dict(group) for group in self.param_groups]
        for saved_group, group in zip(state_dict["param_groups"], own, strict=False):
            refuse_other_group(saved_group, group)
        for saved_state in saved_states.values():
            refuse_other_state(
                saved_state,
                base=self.base,
                order=self.low_pass_filter.order,
                filter_name=str(self.low_pass_filter),
                projector_source=self.projector_source,
            )
        super().load_state_dict(state_dict)
        for group, before in zip(self.param_groups, own, strict=True):
            group.update({name: before[name] for name in ("update_proj_gap", "scale")})
        # A second time, uncast; see `state`.
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, p in zip(saved_ids, params, strict=True):
            if saved_id in saved_states:
                self.state[p] = copied_state(
                    saved_states[saved_id], device=p.device, dtype_of=functools.partial(self._dtype_of_state, p)
                )

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickling and copying take along; torch's own would leave the attributes out."""
        names = ("low_pass_filter", "base", "beta2", "noise_std", "eps", "_floor", "basis_change", "projector")
        more = ("projector_source", "state_dtype", "compiled")
        return super().__getstate__() | {name: getattr(self, name) for name in names + more}

    @functools.cached_property
    def _coefficients(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        assert isinstance(self.low_pass_filter, LowPassFilter), "the taps of the other kind are its groups'"
        return padded_coefficients(self.low_pass_filter)

    @functools.cached_property
    def _one_pass(self) -> OnePass:
        numel = sum(p.numel() for group in self.param_groups for p in group["params"])
        compiled = numel >= WORTH_COMPILING if self.compiled is None else self.compiled
        b, a = self._coefficients
        return OnePass(b=b, a=a, beta2=self.beta2, compiled=compiled)

    def _dtype_of_state(self, p: Tensor, name: str) -> torch.dtype:
        if name == "products":
            return torch.float64
        return full_dtype(p) if self.state_dtype is None or name == "basis" else self.state_dtype

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if p not in self.state:
            self.state[p] = self._new_state(p, group)
        state: dict[str, Any] = self.state[p]
        return state

    def _new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        order = self.low_pass_filter.order
        # Adam and AdamBC have the same state, and strings do not belong in it: the number tells a checkpoint of one from
        # the other's. The step response is kept for each parameter: one that had no gradient yet has taken no step.
        state: dict[str, Any] = {"step": 0, "base": BASES.index(self.base), "bias_states": [0.0] * order}
        shape, filtered_shape = p.shape, p.shape
        if is_projected(p, group):
            rank = group["rank"]
            shape = torch.Size((rank, p.shape[1]) if is_wide(p) else (p.shape[0], rank))
            filtered_shape = p.shape if self.projector_source == "filtered" else shape
            state["steps_in_basis"] = 0
            state["projector_source"] = PROJECTOR_SOURCES.index(self.projector_source)
            state["basis"] = torch.zeros(min(p.shape), rank, dtype=full_dtype(p), device=p.device)
        state["filter_states"] = [self._zeros(p, filtered_shape) for _ in range(order)]
        if self.base != "sgd":
            state["exp_avg_sq"] = self._zeros(p, shape)
        if isinstance(self.low_pass_filter, OptimalFIR):
            state |= new_estimate(self.low_pass_filter.taps, p.device)
        return state

    def _zeros(self, p: Tensor, shape: torch.Size) -> Tensor:
        dtype = self._dtype_of_state(p, "filter_states")
        return torch.zeros_like(p, dtype=dtype) if shape == p.shape else torch.zeros(shape, dtype=dtype, device=p.device)
