"""Reference gradients of half-precision layers on a CPU, added up in float32.

On a CPU, torch adds up the weight gradient of a layer norm or an embedding in bfloat16 token by token in bfloat16. Such a
sum stops growing at 256 equal contributions, since 256 + 1 rounds to 256. So plain autograd is far off for long rows, while
the engine adds up in float32 and is right. In the reference pass each trained layer therefore computes in float32, between
inputs and outputs in its own precision. Autograd then rounds the finished gradient once.

Only trained weights are copied to float32, and only for the duration of the pass. A training step keeps a sum of the same
size for each of them, so this needs no more memory than a step.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from doppler_hf.privacy.clipping.layers import substituted, trainable_of
from doppler_hf.privacy.clipping.other_layers import is_floating


@contextlib.contextmanager
def sums_in_float32(model: nn.Module) -> Iterator[None]:
    """Let trained layers in half precision compute in float32 in the block, forward and backward, if they are on a CPU."""
    with contextlib.ExitStack() as restored:
        for module in model.modules():
            if _adds_in_half(module):
                before = vars(module).get("forward")
                vars(module)["forward"] = _in_float32(module, module.forward)
                restored.callback(_restore, module, before)
        yield


def _restore(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = forward


def _adds_in_half(module: nn.Module) -> bool:
    own = [parameter for _, parameter in trainable_of(module)]
    # A layer with further layers inside would pass them float32 inputs, which do not fit their weights.
    has_layers = any(True for child in module.children() for _ in child.parameters())
    # A recurrent layer keeps its weights in a second list.
    is_usual = not has_layers and not isinstance(module, nn.RNNBase)
    return is_usual and bool(own) and all(p.device.type == "cpu" and p.itemsize == 2 for p in own)


def _in_float32(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        # Look the parameters up here: if weights are sharded, they are whole only during the forward.
        own = dict(module.named_parameters(recurse=False))
        weights = {name: weight.float() for name, weight in own.items() if is_floating(weight) and weight.itemsize == 2}
        dtype = next((own[name].dtype for name in weights), torch.bfloat16)
        in_float32 = pytree.tree_map(lambda value: _cast(value, dtype, torch.float32), (args, kwargs))
        try:
            with substituted(module, weights):
                outputs = forward(*in_float32[0], **in_float32[1])
        except (RuntimeError, TypeError):
            return forward(*args, **kwargs)  # the layer works only in half precision
        return pytree.tree_map(lambda value: _cast(value, torch.float32, dtype), outputs)

    return compute


def _cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    return value.to(after) if isinstance(value, Tensor) and value.dtype == before else value
