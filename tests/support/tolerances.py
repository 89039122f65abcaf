"""How far apart the same arithmetic may end on two processors, from the dtype, the operations and what amplifies them."""

import torch

# By how much a norm in float32 is raised, so that no rounding leaves a contribution above C.
RAISED = 1 + 2**13 * torch.finfo(torch.float32).eps


def of_optimizer_steps(steps, *, largest, dtypes):
    """Return the absolute tolerance for weights after steps that another program made, or in another order of memory.

    A step of a filter of second order, second moment, division and decay rounds some 20 times, each time by eps/2 of a
    number no larger than the largest weight or update, in float32 at least. Subtracting the variance of the noise amplifies
    what came before by (noise_var + floor) / floor, which is 4 for the default floor.

    What is stored in half precision, and lies between two numbers within such a rounding, falls to the other one: once in
    2¹⁵ times, so that it may happen to one of many numbers, in one step.

    Args:
        steps: How many.
        largest: The largest number, weights and updates alike.
        dtypes: Of the weights.
    """
    spacings = [torch.finfo(dtype).eps for dtype in dtypes if dtype.itemsize < 4]
    return (steps * 20 * 4 * torch.finfo(torch.float32).eps / 2 + max(spacings, default=0.0)) * largest
