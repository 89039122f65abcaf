"""DOPPLER's optimizer: a low-pass filter instead of momentum (DOPPLER, Algorithms 2 and 3).

    g̃_t = g_t | Pᵀ g_t                                    (GaLore)
    m̂_t = lowpass(g̃)_t / c_t
    v̂_t = (β₂ v_{t-1} + (1 - β₂) g̃_t²) / k_t
    n̂_t = (β₂ n_{t-1} + (1 - β₂) noise_std_t²) / k_t
    d_t = m̂_t | m̂_t / max(√v̂_t, ε) | m̂_t / √max(v̂_t - n̂_t, floor)
    x_{t+1} = (1 - lr·weight_decay) x_t - lr · (d_t | scale · P d_t)

with c_t the filter's response to ones, and k_t = 1 - β₂ᵗ.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from doppler_hf import kernels
from doppler_hf.filters import PAPER_FILTERS, LowPassFilter
from doppler_hf.optim.adaptive_fir import OptimalFIR
from doppler_hf.optim.checks import RANK_WITHOUT_EFFECT, check_constants, check_group
from doppler_hf.optim.galore import (
    ALREADY_FILTERED,
    PROJECTOR_SOURCES,
    BasisChange,
    Projector,
    ProjectorSource,
    add_lifted,
    has_projected,
    is_projected,
    is_wide,
    project,
    renew_basis,
)
from doppler_hf.optim.low_pass import FixedFilter
from doppler_hf.optim.state import (
    BASES,
    Base,
    dense,
    filter_name_of,
    full_dtype,
    loaded,
    refuse_other_group,
    refuse_other_parameters,
    refuse_other_state,
)
from doppler_hf.optim.update import Coefficients, ParameterTensors, Step, StepConstants, slices, update
from doppler_hf.shards import part_here

# Wherever v̂ - noise_std² is negative, often at a small budget, the floor alone sets the step size. It must exceed the noise
# of that difference, hence a fraction of noise_std². In recipes/results/floor.md 0.1 to 1 are the same, less is worse.
DEFAULT_FLOOR_FRACTION: Final = 0.3


@final
class DopplerOptimizer(Optimizer):
    """SGD, Adam or DP-AdamBC on the low-pass filtered gradient, with decoupled weight decay, in a subspace if wanted.

    Momentum is a filter of first order (``PAPER_FILTERS["momentum"]``), so there is no β₁. ``lr``, ``weight_decay``,
    ``rank``, ``update_proj_gap`` and ``scale`` may differ between parameter groups. Each parameter holds
    ``low_pass_filter.order`` tensors of state, and one more for the Adam bases. With ``rank`` the matrices of a group whose
    shorter side is longer are updated by GaLore, and hold their state at this rank.

    Args:
        params: Parameters, or parameter groups, as for every torch optimizer.
        lr: Learning rate, at least 0.
        low_pass_filter: The filter along the steps; or an `OptimalFIR`, whose taps are estimated from the gradients, without
            GaLore.
        base: The update from the filtered gradient: ``"sgd"``, ``"adam"`` (DPAdam), or ``"adam_bc"`` (DPAdamBC, which
            subtracts the noise from the second moment; Tang et al. 2024).
        beta2: Decay of the second moment, in [0, 1).
        eps: Least denominator of ``"adam"``, positive, in units of the gradient.
        floor: Least squared denominator of ``"adam_bc"`` (the γ′ of Tang et al.), positive, in units of the squared
            gradient. By default ``max(DEFAULT_FLOOR_FRACTION * noise_std**2, eps**2)``; it matters as much as ``lr``.
        noise_std: Standard deviation of the noise, per coordinate of the mean gradient (the paper's σ_DP). Read by
            ``"adam_bc"`` and by an `OptimalFIR`.
        weight_decay: Decoupled weight decay as in AdamW, at least 0.
        rank: r of GaLore (Zhao et al. 2024), or None for none.
        update_proj_gap: After how many steps GaLore's basis is found anew.
        scale: Factor of GaLore's updates.
        basis_change: How filter and second moment follow a new basis: ``"rotate"`` rotates them, ``"reset"`` begins anew,
            ``"keep"`` leaves the numbers unchanged, as the first implementation did.
        projector: How a basis is found; see `galore.find_basis`.
        projector_source: The matrix for the basis: the step's ``"gradient"``, or the less noisy ``"filtered"`` one, for
            which the filter keeps its states in full size.

    Raises:
        ValueError: If an argument lies outside its range, or would have no effect.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = DopplerOptimizer([weight], lr=0.5, low_pass_filter=PAPER_FILTERS["second-order"])
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 0.5000])
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
    ) -> None:
        self._filter = FixedFilter(low_pass_filter) if isinstance(low_pass_filter, LowPassFilter) else low_pass_filter
        # Attributes, not group options: load_state_dict would put back an earlier run's noise_std with its groups.
        self.low_pass_filter = low_pass_filter
        self.basis_change: BasisChange = basis_change
        self.projector: Projector = projector
        self.projector_source: ProjectorSource = projector_source
        self.base: Base = base
        self.beta2 = beta2
        self.noise_std = noise_std
        self.eps = eps
        self._floor = floor
        check_constants(self, floor=floor)
        options = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, options | {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale})
        if rank is not None and not any(has_projected(group) for group in self.param_groups):
            raise ValueError(RANK_WITHOUT_EFFECT.format(rank))

    @property
    def floor(self) -> float:
        """The smallest corrected second moment of "adam_bc"."""
        return max(DEFAULT_FLOOR_FRACTION * self.noise_std**2, self.eps**2) if self._floor is None else self._floor

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of `checks.GROUP_OPTIONS`, as every torch optimizer does."""
        own = set(param_group)  # torch adds the defaults to the dict itself
        super().add_param_group(param_group)
        added = self.param_groups[-1]  # only now are its parameters a list, and the defaults in it
        try:
            check_group(self, added, own=own)
        except ValueError:
            del self.param_groups[-1]
            raise
        added.update(self._filter.new_group())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient (in place); a closure, whose gradient has no noise, is refused."""
        if closure is not None:
            raise ValueError(f"closure must be None, got {closure!r}. Compute the gradient before step().")
        # Of a parameter in shards the rows that are here: each coordinate is updated by itself.
        stepped = [
            (p, part_here(dense(p.grad)), group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        # Adam's max(√v̂, ε) is √max(v̂ - 0, ε²).
        noise_var, floor = (self.noise_std**2, self.floor) if self.base == "adam_bc" else (0.0, self.eps**2)

        @functools.cache  # most parameters share the constants of a step
        def constants_of(coefficients: Coefficients, c: float, k: float, n: float, lr: float, decay: float) -> StepConstants:
            return StepConstants(self._filter.advance, coefficients, self.beta2, lr / c * math.sqrt(k), decay, n, k * floor)

        steps: list[Step] = []
        lifted = []
        for p, grad, group in stepped:
            state = self.state.get(p) or self.state.setdefault(p, self._new_state(p, group))
            v = state.get("exp_avg_sq")
            coefficients = self._filter.coefficients(group)
            lr, decay = float(group["lr"]), 1 - float(group["lr"]) * float(group["weight_decay"])
            if "basis" in state:  # GaLore: d is what the same step makes of zeros in the subspace
                tensors, coefficients = self._in_subspace(p, grad, state, group)
                lifted.append((p, tensors.weight, state["basis"], group["scale"], decay))
                decay = 1.0
            else:
                tensors = ParameterTensors(part_here(p), grad, state["filter_states"], v, state.get("products"))
            state["step"] += 1
            c = self._filter.begin(state, group, noise_std=self.noise_std)  # c_t
            k, n = 1.0, 0.0  # k_t and n_t
            if v is not None:
                # The noise may differ from step to step, and its mean square is weighted as that of the gradients.
                k = 1 - self.beta2 ** state["step"]
                n = state["noise_power"] = self.beta2 * state["noise_power"] + (1 - self.beta2) * noise_var
            steps.append((tensors, constants_of(coefficients, c, k, n, lr, decay)))
        make(steps)
        for p, d, basis, scale, decay in lifted:
            add_lifted(p, d, basis, scale=scale, decay=decay)  # X ← decay·X + scale·P d
        for group in self.param_groups:
            states = (self.state[p] for p in group["params"] if p in self.state)
            self._filter.end(group, states, noise_std=self.noise_std)

    def _in_subspace(
        self, p: Float[Tensor, "m n"], grad: Float[Tensor, "m n"], state: dict[str, Any], group: dict[str, Any]
    ) -> tuple[ParameterTensors, Coefficients]:
        """Return the tensors of a step in the subspace, and its filter's coefficients; now and then renew the basis."""
        grad = source = grad.to(state["basis"].dtype)
        coefficients = self._filter.coefficients(group)
        if self.projector_source == "filtered":
            tensors = ParameterTensors(p.detach(), grad, state["filter_states"])
            source = self._filter.advance(grad, tensors, coefficients)
        if state["steps_in_basis"] % group["update_proj_gap"] == 0:
            renew_basis(
                state,
                source,
                rank=group["rank"],
                projector=self.projector,
                projector_source=self.projector_source,
                basis_change=self.basis_change,
            )
        state["steps_in_basis"] += 1
        low_rank = project(grad, state["basis"])
        states = state["filter_states"]
        if self.projector_source == "filtered":
            states, coefficients = [project(source, state["basis"])], ALREADY_FILTERED
        return ParameterTensors(torch.zeros_like(low_rank), low_rank, states, state.get("exp_avg_sq")), coefficients

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint's state, learning rates and weight decays; refuse another optimizer's, base, rank or filter."""
        saved_states, own = state_dict["state"], [dict(group) for group in self.param_groups]
        for saved_group, group in zip(state_dict["param_groups"], own, strict=False):
            refuse_other_group(saved_group, group)
        refuse_other_parameters(*([len(group["params"]) for group in each] for each in (state_dict["param_groups"], own)))
        for saved_state in saved_states.values():
            refuse_other_state(saved_state, self, saved_filter_name=filter_name_of(state_dict))
        super().load_state_dict(state_dict)
        for group, before in zip(self.param_groups, own, strict=True):
            group.update({name: before[name] for name in ("update_proj_gap", "scale", "low_pass_filter") if name in before})
        # A second time, uncast; see `state`.
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = ((p, group) for group in self.param_groups for p in group["params"])
        for saved_id, (p, group) in zip(saved_ids, params, strict=True):
            if saved_id in saved_states:
                self.state[p] = loaded(saved_states[saved_id], parameter=p, like=self._new_state(p, group))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and copying; torch's own method would leave the attributes out."""
        names = ("low_pass_filter", "_filter", "base", "beta2", "noise_std", "eps", "_floor", "basis_change", "projector")
        return super().__getstate__() | {name: getattr(self, name) for name in (*names, "projector_source")}

    def _new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        # Adam and AdamBC have the same state: this number, since a state holds no strings, tells them apart.
        state: dict[str, Any] = {"step": 0, "base": BASES.index(self.base)}
        dtype = full_dtype(p)
        zeros = zeros_in_full = functools.partial(torch.zeros_like, part_here(p).detach(), dtype=dtype)
        if is_projected(p, group):
            rank = group["rank"]
            shape = (rank, p.shape[1]) if is_wide(p) else (p.shape[0], rank)
            zeros = functools.partial(torch.zeros, shape, dtype=dtype, device=p.device)
            state["steps_in_basis"] = 0
            state["projector_source"] = PROJECTOR_SOURCES.index(self.projector_source)
            state["basis"] = torch.zeros(min(p.shape), rank, dtype=dtype, device=p.device)
        state |= self._filter.new_state(zeros_in_full if self.projector_source == "filtered" else zeros)
        return state if self.base == "sgd" else state | {"exp_avg_sq": zeros(), "noise_power": 0.0}


def make(steps: Sequence[Step]) -> None:
    """Make the steps of many parameters (all but the gradients modified in place), on a GPU in one kernel."""
    if any(map(kernels.are_usable, {tensors.weight.device for tensors, _ in steps})):
        from doppler_hf.optim.fused_update import fused_update  # imports Triton

        steps = fused_update(steps)
    for tensors, constants in steps:
        for part in slices(tensors):
            update(part, constants)
