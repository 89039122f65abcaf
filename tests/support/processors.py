"""Products of matrices and sums as another processor may round them, whatever this one does."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}  # where their matrices begin
TILE = 16  # rows that such a processor multiplies at a time; what is left over by other instructions


class OfAnotherProcessor(TorchDispatchMode):
    """Rounds what whole tiles of rows give once, and changes what is left over by what a sum may lose, at random.

    In whatever order K terms are added up, (K − 1)·2⁻²⁴·Σ|terms| is the most that float32 loses (Higham 2002, section 4.2),
    and bfloat16 another unit.
    """

    def __init__(self, seed=0):
        super().__init__()
        self.seed, self.products = seed, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs, first = kwargs or {}, PRODUCTS.get(operator)
        if first is None or args[first].dtype not in (torch.float32, torch.bfloat16):
            return operator(*args, **kwargs)
        self.products += 1
        found = operator(*(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)
        left, right = (matrix.double().abs() for matrix in args[first : first + 2])
        lost = (left.shape[-1] - 1) * 2.0**-24 * (left @ right)
        if args[first].dtype == torch.bfloat16:
            lost += 2.0**-8 * found.abs()
        lost[..., : found.shape[-2] // TILE * TILE, :] = 0.0
        generator = torch.Generator().manual_seed(self.seed + found.numel())
        coins = torch.rand(found.shape, generator=generator).to(found.device)
        return (found + lost * (2 * coins - 1)).to(args[first].dtype)


SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.linalg_vector_norm.default}


class OneAfterAnother(TorchDispatchMode):
    """Adds up numbers of float32 one after another, as a processor may: a sum that is large swallows what comes then.

    Some of torch's own kernels on a CPU do so for some layouts.
    """

    def __init__(self):
        super().__init__()
        self.sums = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs, values = kwargs or {}, args[0] if args else None
        if operator not in SUMS or (kwargs.get("dtype") or values.dtype) != torch.float32 or not values.numel():
            return operator(*args, **kwargs)
        self.sums += 1
        is_norm = operator is aten.linalg_vector_norm.default
        order = (args[1] if len(args) > 1 else 2) if is_norm else 1
        assert order == 2 or not is_norm
        place = 2 if is_norm else 1
        dims, keep = (args[place] if len(args) > place else None), (args[place + 1] if len(args) > place + 1 else False)
        dims = sorted(dim % values.ndim for dim in (range(values.ndim) if dims is None or dims == [] else dims))
        kept = [dim for dim in range(values.ndim) if dim not in dims]
        terms = values.float().permute(*kept, *dims).reshape(*(values.shape[dim] for dim in kept), -1).numpy()
        found = np.add.accumulate(terms * terms if is_norm else terms, axis=-1, dtype=np.float32)[..., -1]
        found = torch.from_numpy(np.array(np.sqrt(found) if is_norm else found))
        return found.view([1 if dim in dims else values.shape[dim] for dim in range(values.ndim)]) if keep else found
