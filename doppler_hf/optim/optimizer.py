r"""DOPPLER's optimizer: a low-pass filter in the place of momentum (DOPPLER, Algorithms 1 and 2).

    m̂_t = lowpass(g)_t / c_t,    d_t = m̂_t | adam(m̂_t, v̂_t) | adam_bc(m̂_t, v̂_t)
    x_{t+1} = (1 - lr·weight_decay) x_t - lr d_t

The gradient is private already when it arrives; all that is done here is post-processing.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, Final, Literal, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from doppler_hf.filters import PAPER_FILTERS, LowPassFilter
from doppler_hf.optim.adam import adam_bc_direction, adam_direction, second_moment
from doppler_hf.optim.low_pass import bias_correction, low_pass, padded_coefficients

Base = Literal["sgd", "adam", "adam_bc"]
BASES: Final[tuple[Base, ...]] = get_args(Base)

# The floor is load-bearing: at a small privacy budget v̂ - noise_std² is mostly noise around zero, and wherever it
# is negative the floor alone sets the step size. What it must exceed is that noise, which scales with noise_std²;
# hence a fraction of it, not a constant.
DEFAULT_FLOOR_FRACTION: Final = 0.1


@final
class DopplerOptimizer(Optimizer):
    r"""SGD, Adam or DP-AdamBC on the low-pass filtered gradient, with decoupled weight decay.

    Momentum is a filter of first order (``PAPER_FILTERS["momentum"]``), so there is no β₁. Only ``lr`` and
    ``weight_decay`` may differ between parameter groups. Each parameter holds ``low_pass_filter.order`` tensors of
    state, and one more for the Adam bases: in float32 for parameters of half precision, in the parameter's own dtype
    otherwise.

    Args:
        params: Parameters, or parameter groups, as for every torch optimizer.
        lr: Learning rate, at least 0.
        low_pass_filter: The filter along the steps.
        base: What is done with the filtered gradient: ``"sgd"``, ``"adam"`` (DPAdam), or ``"adam_bc"`` (DPAdamBC,
            which subtracts the noise from the second moment).
        beta2: Decay of the second moment, in [0, 1).
        eps: Least denominator of ``"adam"``, positive, in units of the gradient.
        floor: Least squared denominator of ``"adam_bc"`` (the γ′ of Tang et al.), positive, in units of the squared
            gradient. By default ``max(DEFAULT_FLOOR_FRACTION * noise_std**2, eps**2)``: it matters as much as the
            learning rate, and follows the noise.
        noise_std: Standard deviation of the noise, per coordinate of the mean gradient (the paper's σ_DP). Read by
            ``"adam_bc"``.
        weight_decay: Decoupled weight decay as in AdamW, at least 0.

    Raises:
        ValueError: If an argument lies outside its range, or a floor is given to another base than ``"adam_bc"``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = DopplerOptimizer([weight], lr=0.5, low_pass_filter=PAPER_FILTERS["second-order"])
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 0.5000])

    Source:
        DOPPLER, Algorithms 1 and 2; Tang et al. 2024 for ``"adam_bc"``.
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
        _check_constants(base=base, beta2=beta2, eps=eps, floor=floor, noise_std=noise_std)
        # These are attributes and no group options: load_state_dict replaces the groups by those of the checkpoint,
        # and with them it would silently put back the noise_std of an earlier run, which is wrong as soon as the
        # privacy arguments have changed.
        self.low_pass_filter = low_pass_filter
        self.base: Base = base
        self.beta2 = beta2
        self.noise_std = noise_std
        self.eps = eps
        self.floor = max(DEFAULT_FLOOR_FRACTION * noise_std**2, eps**2) if floor is None else floor
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as every torch optimizer does.

        Args:
            param_group: ``params``, and ``lr`` and ``weight_decay`` where they differ from the optimizer's.

        Raises:
            ValueError: If the learning rate or the weight decay is negative.
        """
        for name in ("lr", "weight_decay"):
            value = param_group.get(name, self.defaults[name])
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}: give a finite number of at least 0")
        super().add_param_group(param_group)

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
        b, a = padded_coefficients(self.low_pass_filter)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._state_of(p)
                grad = _dense(p.grad).to(_state_dtype(p))
                state["step"] += 1
                m_hat = low_pass(grad, state["filter_states"], b=b, a=a)
                m_hat /= bias_correction(state["bias_states"], b=b, a=a)
                if self.base == "sgd":
                    direction = m_hat
                else:
                    v_hat = second_moment(grad, state["exp_avg_sq"], beta2=self.beta2, step=state["step"])
                    if self.base == "adam":
                        direction = adam_direction(m_hat, v_hat, eps=self.eps)
                    else:
                        direction = adam_bc_direction(m_hat, v_hat, noise_std=self.noise_std, floor=self.floor)
                apply_direction(p, direction, lr=group["lr"], weight_decay=group["weight_decay"])

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a checkpoint of an optimizer with the same base and a filter of the same order.

        The learning rates and weight decays are those of the checkpoint; filter, noise and the other constants stay
        those of this optimizer.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If the checkpoint was written by another optimizer, for another base, or for a filter of
                another order.
        """
        saved_states = state_dict["state"]
        for saved_state in saved_states.values():
            self._check_saved_state(saved_state)
        super().load_state_dict(state_dict)
        # torch casts floating-point state to the dtype of its parameter
        # (Optimizer._process_value_according_to_param_policy). For a bfloat16 parameter that rounds the float32
        # state to 8 bits, so the state is taken from the checkpoint a second time, uncast.
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, p in zip(saved_ids, params, strict=True):
            if saved_id in saved_states:
                self.state[p] = _copied_state(saved_states[saved_id], p)

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            order = self.low_pass_filter.order
            state["step"] = 0
            # Adam and AdamBC have the same state, and strings do not belong in it: the number tells a checkpoint of
            # one from the other's.
            state["base"] = BASES.index(self.base)
            state["filter_states"] = [torch.zeros_like(p, dtype=_state_dtype(p)) for _ in range(order)]
            # One per parameter, not one for all: a parameter that had no gradient yet has taken no step.
            state["bias_states"] = [0.0] * order
            if self.base != "sgd":
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=_state_dtype(p))
        return state

    def _check_saved_state(self, saved_state: dict[str, Any]) -> None:
        if not {"base", "filter_states", "bias_states"} <= saved_state.keys():
            raise ValueError(
                f"the checkpoint holds {sorted(saved_state)} for a parameter and was not written by DopplerOptimizer: "
                "load one that was, or start afresh"
            )
        saved_base, saved_order = BASES[saved_state["base"]], len(saved_state["filter_states"])
        if saved_base != self.base:
            raise ValueError(
                f"the checkpoint is of base {saved_base!r}, this optimizer of {self.base!r}: set base={saved_base!r}"
            )
        if saved_order != self.low_pass_filter.order:
            raise ValueError(
                f"the checkpoint is of a filter of order {saved_order}, this optimizer's {self.low_pass_filter} is of "
                f"order {self.low_pass_filter.order}: set the low_pass_filter of the checkpoint's run"
            )


def apply_direction(
    p: Float[Tensor, "*shape"], direction: Float[Tensor, "*shape"], *, lr: float, weight_decay: float
) -> None:
    """Decays the parameter and moves it against the direction (modified in place).

    Args:
        p: The parameter, any shape.
        direction: d_t, same shape, in the dtype of the state.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.

    Example:
        >>> p = torch.ones(1)
        >>> apply_direction(p, torch.ones(1), lr=0.25, weight_decay=1.0)
        >>> p
        tensor([0.5000])

    Source:
        DOPPLER, Algorithm 2, last line; Loshchilov and Hutter 2019 for the decay.
    """
    # In half precision, decay and step are rounded once, together; a decay of 1 - 1e-5 rounded by itself is lost.
    weight = p.to(direction.dtype)
    weight.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
    p.copy_(weight)


def _state_dtype(p: Tensor) -> torch.dtype:
    return torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype


def _dense(grad: Tensor) -> Tensor:
    if grad.layout != torch.strided:
        raise ValueError(
            f"a gradient has layout {grad.layout}, but privacy noise is dense: build the embedding with sparse=False"
        )
    return grad


def _copied_state(saved_state: dict[str, Any], p: Tensor) -> dict[str, Any]:
    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(item) for item in value]
        return value.to(p.device, _state_dtype(p), copy=True) if isinstance(value, Tensor) else value

    return {key: copied(value) for key, value in saved_state.items()}


def _check_constants(*, base: str, beta2: float, eps: float, floor: float | None, noise_std: float) -> None:
    if base not in BASES:
        raise ValueError(f"base is {base!r}: choose one of {', '.join(BASES)}")
    if not 0 <= beta2 < 1:
        raise ValueError(f"beta2 is {beta2}: give a decay in [0, 1)")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps}: give a positive number")
    if not 0 <= noise_std < math.inf:
        raise ValueError(f"noise_std is {noise_std}: give a finite number of at least 0")
    if floor is None:
        return
    if base != "adam_bc":
        raise ValueError(f"floor is {floor}, but base {base!r} has none: leave it out or set base='adam_bc'")
    if not 0 < floor < math.inf:
        raise ValueError(f"floor is {floor}: give a positive number, or leave it out to follow noise_std")
