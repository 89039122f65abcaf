"""The filter alone, ahead of any torch optimizer (DOPPLER, Algorithm 2, lines 6-8).

m̂_t = lowpass(g)_t / c_t,    x_{t+1} = base(x_t, m̂_t)
"""

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from doppler_hf.filters import LowPassFilter
from doppler_hf.optim.low_pass import FixedFilter, bias_correction, low_pass, padded_coefficients
from doppler_hf.optim.optimizer import DopplerOptimizer
from doppler_hf.optim.state import dense, full_dtype, loaded


@final
class LowPassOptimizer(Optimizer):
    """Any torch optimizer, built already, on the low-pass filtered gradient.

    ``param_groups``, ``defaults`` and ``state`` are the base's own, so schedulers and ``add_param_group`` work as without
    the filter. The filter adds ``low_pass_filter.order`` tensors per parameter (float32 for half precision), and during a
    step one filtered gradient each.

    A base's own momentum (β₁ of Adam, Lion and schedule-free, Muon's ``momentum``) is a low-pass filter too. Set it to 0 to
    have this filter alone, and ``cycle_momentum=False`` in schedulers. ``AdamW(betas=(0, beta2))`` divides by the second
    moment of the *filtered* gradient; for Algorithm 3's Adam and AdamBC use `DopplerOptimizer`.

    Args:
        base: The optimizer, which does not filter the gradient itself. It may have taken steps already.
        low_pass_filter: The filter along the steps.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = LowPassOptimizer(torch.optim.SGD([weight], lr=0.5), LowPassFilter.parse("second-order"))
    """

    base: Optimizer
    low_pass_filter: LowPassFilter
    filter_state: dict[Tensor, dict[str, Any]]

    def __init__(self, base: Optimizer, low_pass_filter: LowPassFilter) -> None:
        if not isinstance(base, Optimizer):
            raise ValueError(f"base must be a torch.optim.Optimizer, got {base!r}. Build one first and give it here.")
        if isinstance(base, LowPassOptimizer | DopplerOptimizer):
            raise ValueError(
                f"base must be an optimizer without a filter, got a {type(base).__name__} with {base.low_pass_filter}. Set "
                "the filter there."
            )
        if not isinstance(low_pass_filter, LowPassFilter):
            raise ValueError(
                f"low_pass_filter must be a fixed LowPassFilter, got {low_pass_filter!r}. DopplerOptimizer takes others."
            )
        # Optimizer.__init__ would make parameter groups of its own; this is torch's way to make an optimizer around
        # groups that exist (it unpickles with it).
        self.__setstate__({"base": base, "low_pass_filter": low_pass_filter, "filter_state": {}})

    # Without setters: another list or dict here would part the wrapper from its base.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base's parameter groups."""
        return self.base.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base's defaults."""
        return self.base.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base's state. The filter's is ``filter_state``."""
        return self.base.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the base, with the base's options."""
        self.base.add_param_group(param_group)

    def train(self) -> None:
        """Switch a base that trains and evaluates at different points (schedule-free) to training."""
        if hasattr(self.base, "train"):
            self.base.train()

    def eval(self) -> None:
        """Switch such a base to evaluation."""
        if hasattr(self.base, "eval"):
            self.base.eval()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the base on the filtered gradients and put back every ``p.grad``; a closure is refused."""
        if closure is not None:
            raise ValueError(f"closure must be None, got {closure!r}. Compute the gradient before step().")
        grads = {p: dense(p.grad) for p in self._params() if p.grad is not None}
        try:
            for p, grad in grads.items():
                p.grad = self._filtered(p, grad)
            self.base.step()
        finally:
            for p, grad in grads.items():
                p.grad = grad

    def state_dict(self) -> StateDict:
        """Return the base's checkpoint, with the filter's state beside it as ``"low_pass"``."""
        # torch runs the hooks inside the methods that are overridden here (torch/optim/optimizer.py), hence by hand.
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        numbers = {p: number for number, p in enumerate(self._params())}
        filter_state = {numbers[p]: state for p, state in self.filter_state.items()}
        state_dict = {**self.base.state_dict(), "low_pass": {"order": self.low_pass_filter.order, "state": filter_state}}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of the same kind of base and order of filter; refuse others before anything changes."""
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        if "low_pass" not in state_dict:
            raise ValueError(
                f"The checkpoint holds {list(state_dict)} and was not written by LowPassOptimizer. Load one that was, or "
                "load it into the base before it is wrapped, to begin filtering now."
            )
        saved = state_dict["low_pass"]
        if saved["order"] != self.low_pass_filter.order:
            raise ValueError(
                f"The checkpoint is of a filter of order {saved['order']}, this optimizer's {self.low_pass_filter} is of "
                f"order {self.low_pass_filter.order}. Set the low_pass_filter of the checkpoint's run."
            )
        self.base.load_state_dict({key: value for key, value in state_dict.items() if key != "low_pass"})
        params = list(self._params())
        self.filter_state = {}
        for number, state in saved["state"].items():
            parameter = params[number]
            self.filter_state[parameter] = loaded(state, parameter=parameter, like=self._new_state(parameter))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "low_pass_filter": self.low_pass_filter, "filter_state": self.filter_state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.base = state["base"]
        self.low_pass_filter = state["low_pass_filter"]
        self.filter_state = state["filter_state"]
        super().__setstate__({})  # hooks and profiling

    def __repr__(self) -> str:
        return f"LowPassOptimizer(low_pass_filter={self.low_pass_filter}, base={self.base!r})"

    def _params(self) -> chain[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _new_state(self, p: Tensor) -> dict[str, Any]:
        return FixedFilter(self.low_pass_filter).new_state(functools.partial(torch.zeros_like, p, dtype=full_dtype(p)))

    def _filtered(self, p: Float[Tensor, "*shape"], grad: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        if self.low_pass_filter.order == 0:
            return grad.clone()  # m̂_t = b_0 g_t / b_0, without its two roundings
        if p not in self.filter_state:
            self.filter_state[p] = self._new_state(p)
        state = self.filter_state[p]
        b, a = padded_coefficients(self.low_pass_filter)
        m_hat = low_pass(grad.to(full_dtype(p)), state["filter_states"], b=b, a=a)
        m_hat /= bias_correction(state["bias_states"], b=b, a=a)
        return m_hat.to(grad.dtype)
