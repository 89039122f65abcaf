"""A GPU without a GPU: tensors without memory on a device that is far away, and what a program asks of it.

with far_away() as move, Asked() as asked:
    model, inputs = move(model), move(inputs)   # made before, on a CPU: what is left are shapes, dtypes and devices
    losses_of(model, inputs).backward()
print(asked.kernels, asked.waits)

What Python reads of such a tensor raises an error, and so does an operation between two devices. The device is one of
torch's for backends that are written in Python, with which autograd needs no driver. Our code takes it for CUDA.
"""

import contextlib
import functools
import itertools
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from doppler_hf import triton_support
from doppler_hf.privacy import randomness
from doppler_hf.run import private_run
from scripts.bench.roofline import is_free

FAR = "far"
aten = torch.ops.aten
# They give Python a number, or a tensor of as many rows as a mask has ones.
READING = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten._unique2}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Asked(TorchDispatchMode):
    """Counts kernels, Triton's and all operators but views and allocations; lists the operators that would wait on CUDA."""

    def __init__(self):
        super().__init__()
        self.kernels, self.waits = 0, []

    def __enter__(self):
        self._patch = mock.patch.object(triton_support, "launch", self._launched)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exception):
        self._patch.stop()
        return super().__exit__(*exception)

    def _launched(self, *_, **__):
        self.kernels += 1  # what it would write stays as it is

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.kernels += not is_free(operator)
        if would_wait(operator.overloadpacket, args, kwargs or {}, result):
            self.waits.append(str(operator))
        return result


def would_wait(packet, args, kwargs, result):
    """Return whether an operator needs to know a number, or copies from device to device before it returns."""
    if packet in INDEXED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if packet in (aten._to_copy, aten.copy_):
        source = args[1] if packet is aten.copy_ else args[0]
        is_async = kwargs.get("non_blocking") or (packet is aten.copy_ and args[2:] == (True,))
        return source.device.type != result.device.type and not is_async
    return packet in READING


class _Module(backend_registration._DummyBackendModule):
    """`torch.far`; outside of `far_away` there is no device of its kind, and torch's accelerator is none."""

    here = False

    def is_available(self):
        return self.here

    def device_count(self):
        return 1  # always: autograd counts them at the first backward pass of the process

    def manual_seed(self, seed):
        pass

    def get_rng_state(self, device=None):
        return torch.empty(0, dtype=torch.uint8)  # as PEFT asks every device, after some test has imported this one

    def set_rng_state(self, state, device=None):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self):
        return _Module.here


# Once a process, before its first backward pass.
if not hasattr(torch, FAR):
    backend_registration._setup_privateuseone_for_python_backend(FAR, backend_module=_Module(), hook=_Hook())


@contextlib.contextmanager
def far_away(device=FAR):
    """Make tensors without memory in the block, and yield what moves models (in place) and structures of tensors there."""
    mode, addresses = FakeTensorMode(), itertools.count(step=1 << 40)  # so far apart that no two tensors overlap
    patches = {
        (FakeTensor, "is_cuda"): property(lambda self: self.device.type == FAR),
        (torch, "Generator"): lambda device=None: torch.default_generator,
        (_Module, "here"): True,
        # What Transformers makes, words and normals, it makes with memory, and then moves in.
        (private_run, "fill_generators"): _outside(private_run.fill_generators),
        (randomness.BitStream, "bits"): _outside(randomness.BitStream.bits),
        (randomness.SecretBits, "fill"): _filled(randomness.SecretBits.fill, mode),
        (triton_support, "address_of"): lambda values: next(addresses),
        (triton_support, "are_usable"): lambda device: device.type == FAR,
    }
    with contextlib.ExitStack() as stack:
        for (owner, name), new in patches.items():
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(mode)
        yield functools.partial(_moved, mode, device=device)


def _outside(function):
    def called(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return called


def _filled(fill, mode):
    def called(self, words, *, step):
        if not isinstance(words, FakeTensor):
            return fill(self, words, step=step)
        real = _outside(torch.empty)(words.shape, dtype=words.dtype)
        _outside(fill)(self, real, step=step)
        return words.copy_(mode.from_tensor(real))

    return called


def _moved(mode, what, *, device):
    if not isinstance(what, torch.nn.Module):
        return tree_map(lambda leaf: _fake(mode, leaf, device) if isinstance(leaf, torch.Tensor) else leaf, what)
    moved = {}  # what is tied stays so
    for own in (own for module in what.modules() for own in (module._parameters, module._buffers)):
        for name, value in own.items():
            if value is not None:
                own[name] = moved[value] = moved[value] if value in moved else _fake(mode, value, device)
    return what


def _fake(mode, tensor, device):
    moved = mode.from_tensor(tensor).detach().to(device, non_blocking=True)
    return torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved
