"""Compute the most bytes that a private step uses, on tensors that have a shape but no memory.

A model on torch's "meta" device computes a pass with tensors that only report the memory they would take. So neither weights
nor the device are needed. CUDA's kernels of dropout and attention are imitated. Libraries, gaps between an allocator's
blocks, and temporary tensors of noise and optimizer (some MiB) are not included.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READING: Final = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.allclose.default}


class Peak(TorchDispatchMode):
    """Tracks the bytes of all tensors that are made in the block: the bytes in use, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._sizes: dict[int, int] = {}

    def forget(self) -> None:
        """Reset the most bytes to the bytes in use now."""
        self.most = self.bytes

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = operator(*args, **(kwargs or {}))
        for storage in {tensor.untyped_storage() for tensor in tree_leaves(result) if isinstance(tensor, Tensor)}:
            if storage._cdata not in given | self._sizes.keys():
                self._sizes[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.most = max(self.most, self.bytes)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, address: int) -> None:
        self.bytes -= self._sizes.pop(address)


class _ReadsOnes(TorchDispatchMode):
    """Lets Python read a 1 from tensors without numbers, so that comparisons are true and gradients count as finite."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if operator in _READING else operator(*args, **(kwargs or {}))


class _AsOnCuda(TorchFunctionMode):
    """Makes dropout keep one byte per number, and attention no probabilities, as CUDA's kernels do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            kwargs |= {"dropout_p": 0.0}
        if function is F.dropout and kwargs.get("training", True) and kwargs.get("p", 0.5) > 0.0:
            return torch.native_dropout(args[0], kwargs.get("p", 0.5), True)[0]
        return function(*args, **kwargs)


@contextlib.contextmanager
def without_memory(*, on_cuda: bool) -> Iterator[Peak]:
    """Use tensors without memory in the block, and track the bytes they would take, with kernels like CUDA's if asked."""
    with FakeTensorMode(), _ReadsOnes(), Peak() as peak, _AsOnCuda() if on_cuda else contextlib.nullcontext():
        yield peak


def move_in(model: nn.Module) -> None:
    """Give a model that was made on the "meta" device before the block the block's tensors; tied tensors stay tied."""
    moved: dict[Tensor, Tensor] = {}
    tables: list[dict[str, Any]] = [own for each in model.modules() for own in (each._parameters, each._buffers)]
    for own in tables:
        for name, value in own.items():
            if value is not None and value not in moved:
                empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                is_parameter = isinstance(value, nn.Parameter)
                moved[value] = nn.Parameter(empty, value.requires_grad) if is_parameter else empty
            own[name] = None if value is None else moved[value]
