"""DOPPLER's optimizer: a low-pass filter instead of momentum (DOPPLER, Algorithms 2 and 3).

    g̃_t = g_t | Pᵀ g_t                                    (GaLore)
    m̂_t = lowpass(g̃)_t / c_t
    v̂_t = (β₂ v_{t-1} + (1 - β₂) g̃_t²) / k_t
    n̂_t = (β₂ n_{t-1} + (1 - β₂) noise_std_t²) / k_t
    d_t = m̂_t | m̂_t / max(√v̂_t, ε) | m̂_t / √max(v̂_t - n̂_t, floor)
    x_{t+1} = (1 - lr·weight_decay) x_t - lr · (d_t | scale · P d_t)

with c_t the filter's step response, and k_t = 1 - β₂ᵗ.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from doppler_hf import triton_support
from doppler_hf.errors import Refusal
from doppler_hf.filters import PAPER_FILTERS, LowPassFilter
from doppler_hf.optim.checkpoint import loaded, refuse_other_optimizer
from doppler_hf.optim.galore import add_lifted, is_projected, is_wide, project, renew_basis
from doppler_hf.optim.muon import orthogonalized
from doppler_hf.optim.update import (
    BASES,
    CORRECTED,
    Base,
    ParameterTensors,
    Step,
    StepConstants,
    bias_correction,
    full_dtype,
    padded_coefficients,
    update,
)
from doppler_hf.shards import part_here, parts_here

# Where v̂ - noise_std² is negative, as it often is at a small ε, the floor alone sets the step size. The floor must exceed
# the noise of that difference, so it is a fraction of noise_std². In recipes/results/floor.md all fractions from 0.1 to 1
# give the same result, and smaller ones a worse one.
DEFAULT_FLOOR_FRACTION: Final = 0.3
GROUP_OPTIONS: Final = ("lr", "weight_decay", "rank", "update_proj_gap", "scale", "orthogonal")
# Option → the training argument from which DopplerTrainer takes it, for messages.
_ARGUMENTS: Final = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "eps": "adam_epsilon",
    "floor": "adam_bc_floor",
    "scale": "optim_args (GaLore)",
}


@final
class DopplerOptimizer(Optimizer):
    """SGD, Adam, DP-AdamBC or Muon on the low-pass filtered gradient, with decoupled weight decay and optional GaLore.

    Momentum is a filter of first order (``PAPER_FILTERS["momentum"]``), so there is no β₁. Each parameter has
    ``low_pass_filter.order`` tensors of state, and one more for all bases but ``"sgd"``.

    Parameter groups may have their own ``lr`` and ``weight_decay``. As in GaLore's own optimizers (Zhao et al. 2024), the
    subspace is set in the groups: with ``rank`` (r, at least 1), matrices of the group whose shorter side is longer than r
    keep their state at this rank. Their basis is found again every ``update_proj_gap`` steps (default 200), and their
    updates are multiplied by ``scale`` (default 1.0). With ``orthogonal=True``, the default for base ``"muon"``, the updates
    of a group's matrices and convolutions are orthogonalized and keep their norm. Set it to False for embeddings.

    Args:
        params: Parameters, or parameter groups, as for every torch optimizer.
        lr: Learning rate, at least 0.
        low_pass_filter: The filter over the steps.
        base: The update from the filtered gradient: ``"sgd"``, ``"adam"`` (DPAdam), ``"adam_bc"`` (DPAdamBC, which
            subtracts the noise from the second moment; Tang et al. 2024), or ``"muon"`` (``"adam_bc"`` with
            orthogonalized updates of matrices).
        beta2: Decay of the second moment, in [0, 1).
        eps: Smallest denominator of ``"adam"``, positive, in units of the gradient.
        floor: Smallest squared denominator of ``"adam_bc"`` and ``"muon"`` (the γ′ of Tang et al.), positive, in units of
            the squared gradient; by default ``max(DEFAULT_FLOOR_FRACTION * noise_std**2, eps**2)``. It matters as much as
            ``lr``.
        noise_std: Standard deviation of the noise per coordinate of the mean gradient (the paper's σ_DP), for ``"adam_bc"``
            and ``"muon"``.
        weight_decay: Decoupled weight decay as in AdamW, at least 0.

    Raises:
        ValueError: If an argument is outside its range or would have no effect.

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
        low_pass_filter: LowPassFilter = PAPER_FILTERS["none"],
        base: Base = "sgd",
        beta2: float = 0.999,
        eps: float = 1e-8,
        floor: float | None = None,
        noise_std: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        # These are attributes and not group options, because load_state_dict restores group options, and with them the
        # noise_std of an earlier run.
        self.low_pass_filter = low_pass_filter
        self.base: Base = base
        self.beta2, self.eps, self._floor, self.noise_std = beta2, eps, floor, noise_std
        self._check_constants()
        options = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(
            params, options | {"rank": None, "update_proj_gap": 200, "scale": 1.0, "orthogonal": base == "muon"}
        )

    @property
    def floor(self) -> float:
        """The smallest corrected second moment of "adam_bc" and "muon"."""
        return max(DEFAULT_FLOOR_FRACTION * self.noise_std**2, self.eps**2) if self._floor is None else self._floor

    def _check_constants(self) -> None:
        if self.base not in BASES:
            raise Refusal(
                "unknown-value",
                f"The base of DopplerOptimizer must be one of {', '.join(BASES)}; got {self.base!r}. DopplerTrainer "
                "takes it from base_optimizer.",
            )
        if not 0 <= self.beta2 < 1:
            raise Refusal(
                "out-of-range",
                f"The beta2 of DopplerOptimizer must be at least 0 and below 1; got {self.beta2}. DopplerTrainer takes "
                "it from adam_beta2, which you can leave out.",
            )
        _check_finite("eps", self.eps, above_0=True)
        _check_finite("noise_std", self.noise_std)
        if self._floor is None:
            return
        if self.base not in CORRECTED:
            raise Refusal(
                "no-effect",
                f"DopplerOptimizer has floor={self._floor}, which has no effect with base={self.base!r}. Leave floor out.",
            )
        _check_finite("floor", self._floor, above_0=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of `GROUP_OPTIONS`, as every torch optimizer does."""
        own = set(param_group)  # Torch adds the defaults to this dict.
        super().add_param_group(param_group)
        added = self.param_groups[-1]  # Now its parameters are a list, and it has the defaults.
        try:
            _check_group(added, own=own)
        except ValueError:
            del self.param_groups[-1]
            raise
        added["low_pass_filter"] = str(self.low_pass_filter)  # A checkpoint then names its filter.

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient (in place).

        Raises:
            ValueError: If a closure is given, since its gradient would have no noise, or if a gradient is sparse.
        """
        if closure is not None:
            raise Refusal(
                "closure-given",
                "step() got a closure, whose gradient would have no noise. Compute the private gradient first, then call "
                "step() without arguments.",
            )
        # If a parameter is in shards, this process updates its own rows only; each coordinate is updated independently.
        stepped = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        weights, gradients = [p for p, _ in stepped], [_dense(p.grad) for p, _ in stepped]
        if any(isinstance(p, DTensor) for p in weights):
            weights, gradients = parts_here(weights), parts_here(gradients)
        # Adam has the same form with noise_var = 0 and floor = ε², since max(√v̂, ε) = √max(v̂ - 0, ε²).
        noise_var, floor = (self.noise_std**2, self.floor) if self.base in CORRECTED else (0.0, self.eps**2)

        coefficients = padded_coefficients(self.low_pass_filter)
        steps: list[Step] = []
        lifted, whole = [], []
        for (p, group), weight, grad in zip(stepped, weights, gradients, strict=True):
            state = self.state.get(p) or self.state.setdefault(p, self._new_state(p, group))
            v = state.get("exp_avg_sq")
            lr, decay = float(group["lr"]), 1 - float(group["lr"]) * float(group["weight_decay"])
            if "basis" in state:  # GaLore: the step is made on zeros in the subspace, so the result is d, without decay.
                tensors = self._in_subspace(grad, state, group)
                lifted.append((p, tensors.weight, state["basis"], group["scale"], decay))
            elif group["orthogonal"] and p.ndim > 1:  # Muon: the step is made on zeros, so the result is the update.
                tensors = ParameterTensors(torch.zeros_like(grad, dtype=full_dtype(p)), grad, state["filter_states"], v)
                whole.append((p, tensors.weight, decay))
            else:
                tensors = ParameterTensors(weight, grad, state["filter_states"], v)
            state["step"] += 1
            c, state["bias_states"][:] = bias_correction(tuple(state["bias_states"]), coefficients)  # c_t
            k, n = 1.0, 0.0  # k_t and n_t
            if v is not None:
                # The noise may differ between steps, so its mean square gets the same weights as that of the gradients.
                k = 1 - self.beta2 ** state["step"]
                n = state["noise_power"] = self.beta2 * state["noise_power"] + (1 - self.beta2) * noise_var
            step_size = lr / c * math.sqrt(k)
            steps.append((tensors, StepConstants(coefficients, self.beta2, step_size, decay, n, k * floor)))
        update_all(steps)
        for p, d, basis, scale, decay in lifted:
            add_lifted(p, d, basis, scale=scale, decay=decay)  # X ← decay·X + scale·P d
        directions = orthogonalized([d for _, d, _ in whole]) if whole else []
        for (p, _, decay), d in zip(whole, directions, strict=True):
            p.copy_(d.add_(p, alpha=decay))  # Half precision is rounded once, as in `update`.

    def _in_subspace(self, grad: Float[Tensor, "m n"], state: dict[str, Any], group: dict[str, Any]) -> ParameterTensors:
        """Return the tensors of a step in the subspace, and renew its basis when due (state modified in place)."""
        grad = grad.to(state["basis"].dtype)
        if state["steps_in_basis"] % group["update_proj_gap"] == 0:
            renew_basis(state, grad, rank=group["rank"])
        state["steps_in_basis"] += 1
        low_rank = project(grad, state["basis"])
        return ParameterTensors(torch.zeros_like(low_rank), low_rank, state["filter_states"], state.get("exp_avg_sq"))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state, learning rates and weight decays of a checkpoint.

        Raises:
            ValueError: If the checkpoint is of another optimizer, base, rank or filter, or of different parameters.
        """
        saved_states, own = state_dict["state"], [dict(group) for group in self.param_groups]
        refuse_other_optimizer(state_dict, own, base=self.base, low_pass_filter=self.low_pass_filter)
        super().load_state_dict(state_dict)
        for group, before in zip(self.param_groups, own, strict=True):
            group.update({name: before[name] for name in ("update_proj_gap", "scale", "low_pass_filter") if name in before})
        # The states are loaded a second time, without torch's cast; see `checkpoint`.
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = ((p, group) for group in self.param_groups for p in group["params"])
        for saved_id, (p, group) in zip(saved_ids, params, strict=True):
            if saved_id in saved_states:
                self.state[p] = loaded(saved_states[saved_id], parameter=p, like=self._new_state(p, group))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling and copying, with the attributes that torch's own method leaves out."""
        names = ("low_pass_filter", "base", "beta2", "noise_std", "eps", "_floor")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def _new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        # All bases but SGD have the same tensors, so the state also has the base's number (a state cannot hold strings).
        state: dict[str, Any] = {"step": 0, "base": BASES.index(self.base)}
        dtype = full_dtype(p)
        zeros = functools.partial(torch.zeros_like, part_here(p).detach(), dtype=dtype)
        if is_projected(p, group):
            rank = group["rank"]
            shape = (rank, p.shape[1]) if is_wide(p) else (p.shape[0], rank)
            zeros = functools.partial(torch.zeros, shape, dtype=dtype, device=p.device)
            state["steps_in_basis"] = 0
            state["basis"] = torch.zeros(min(p.shape), rank, dtype=dtype, device=p.device)
        # Both are kept per parameter, since a parameter may be trained from a later step on.
        order = self.low_pass_filter.order
        state |= {"filter_states": [zeros() for _ in range(order)], "bias_states": [0.0] * order}
        return state if self.base == "sgd" else state | {"exp_avg_sq": zeros(), "noise_power": 0.0}


def update_all(steps: Sequence[Step]) -> None:
    """Make the steps of many parameters, on a GPU in one kernel (everything but the gradients is modified in place)."""
    if any(triton_support.are_usable(tensors.weight.device) for tensors, _ in steps):
        from doppler_hf.optim.fused_update import fused_update  # imports Triton

        steps = fused_update(steps)
    update(steps)


def _dense(grad: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the gradient itself, and refuse a sparse one."""
    if grad.layout != torch.strided:
        raise Refusal(
            "sparse-gradient",
            f"Expected a dense gradient, since its noise is dense; got {grad.layout}. Make the embedding with sparse=False.",
        )
    return grad


def _check_group(group: dict[str, Any], *, own: set[str]) -> None:
    """Refuse a parameter group with options out of range or without effect; `own` has the options that were given."""
    for name in ("lr", "weight_decay", "scale"):
        _check_finite(name, group[name], above_0=name == "scale")
    rank = group["rank"]
    if rank is not None and not (isinstance(rank, int) and rank >= 1):
        raise Refusal(
            "out-of-range",
            f"GaLore's rank must be a whole number of at least 1; got rank={rank} in a parameter group of "
            "DopplerOptimizer. Leave rank out of the group to train it without GaLore.",
        )
    if not (isinstance(group["update_proj_gap"], int) and group["update_proj_gap"] >= 1):
        raise Refusal(
            "out-of-range",
            "GaLore's update_proj_gap must be a whole number of at least 1; got "
            f"update_proj_gap={group['update_proj_gap']} in a parameter group of DopplerOptimizer. Leave it out for the "
            "default, 200 steps.",
        )
    # A learning rate scheduler adds "initial_lr" to groups, so it is allowed.
    for name in sorted(own - {*GROUP_OPTIONS, "params", "param_names", "initial_lr"}):
        raise Refusal(
            "no-effect",
            f"{name}={group[name]!r} has no effect in a parameter group of DopplerOptimizer. Leave it out of the group.",
        )
    if group["orthogonal"] and rank is not None:
        raise Refusal(
            "projected-and-orthogonal",
            f"A parameter group has both rank={rank} (GaLore) and orthogonal=True (Muon), which cannot be combined. Leave "
            "one of them out of the group.",
        )
    if group["orthogonal"] and any(isinstance(p, DTensor) for p in group["params"]):
        raise Refusal(
            "orthogonal-shards",
            "Muon (orthogonal=True) needs whole matrices, but with FSDP no process has a whole matrix. Leave "
            "base_optimizer='muon' out of the training arguments, or orthogonal out of the parameter group.",
        )
    if rank is not None and not any(is_projected(p, group) for p in group["params"]):
        raise Refusal(
            "rank-too-large",
            f"GaLore with rank={rank} has no effect, since no matrix of the parameter group has more than {rank} rows "
            "and columns. Set a smaller rank (DopplerTrainer takes it from optim_args), or leave GaLore out.",
        )


def _check_finite(name: str, value: float, *, above_0: bool = False) -> None:
    if not (value > 0 if above_0 else value >= 0) or value == math.inf:
        argument = _ARGUMENTS.get(name)
        raise Refusal(
            "out-of-range",
            f"The option {name} of DopplerOptimizer must be finite and {'above 0' if above_0 else 'at least 0'}; got "
            f"{value}." + (f" DopplerTrainer takes it from {argument}." if argument else ""),
        )
