"""The global generators of torch, NumPy and Python during a private run.

Dropout masks, random crops and masked tokens come from these generators, in the order of the draw. After a public seed they
would be public numbers: one example more shifts everybody's mask, and the sum then moves by more than C. With secret words,
the others' masks are as likely with the example as without it. A coupling then leaves them unchanged, and the sum moves by
at most C.

Metrics, callbacks and other code seed these generators too (`set_seed`). So they are filled when a private run starts, in
each worker of the data loader, and before the passes of each piece of a draw.
"""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from doppler_hf.privacy.random_words import bit_stream

# MT19937 in each of the three: 624 words of 32 bits. Python's and NumPy's own seeding spreads a key of 256 bits over them;
# torch's keeps 32 bits of a seed on the CPU, which can be tried out, so that its words are filled.
_KEY, _WORDS = 8, 624
# In torch's state a 64-bit seed, two 32-bit fields and a 64-bit position precede torch's words, which take 64 bits each.
_TORCH_STATE = torch.Generator().manual_seed(0).get_state()
_TORCH_WORDS = slice(24, 24 + 8 * _WORDS)


def fill_generators(seed: int | None, *, rank: int = 0, worker: int = 0, step: int = 0) -> None:
    """Fill the global generators from new random words, at least 256 bits each; with a seed, for tests, reproducible ones.

    Workers of the data loader are counted from 1; 0 is the process itself. `step` numbers the fillings.
    """
    if not isinstance(kind := np.random.mtrand._rand._bit_generator, np.random.MT19937):
        raise ValueError(
            f"NumPy's global generator must be its own, MT19937, in a private run, got {type(kind).__name__}. Leave out "
            "np.random.set_bit_generator, or draw from a generator that is made for each example."
        )
    stream = bit_stream(seed, purpose=f"generators of worker {worker}", rank=rank)
    of_python, of_numpy, of_torch = np.split(stream.bits(_KEY + _WORDS // 2, step=step).view(np.uint32), [_KEY, 2 * _KEY])
    random.seed(int.from_bytes(of_python.tobytes(), "little"))
    np.random.seed(of_numpy)
    torch.set_rng_state(torch_state(of_torch))
    if worker == 0 and torch.accelerator.is_available():  # Philox on CUDA: its 64 bits are the whole key.
        torch.get_device_module().manual_seed(int(stream.bits(1, step=step)[0] >> np.uint64(1)))


def torch_state(words: np.ndarray) -> torch.Tensor:
    """Return a state of torch's CPU generator whose Mersenne twister holds `words`, uint32 of shape (624,)."""
    state = _TORCH_STATE.clone()
    state.numpy()[_TORCH_WORDS].view(np.uint64)[:] = words
    return state


def fill_in_worker(worker: int, *, seed: int | None, rank: int) -> None:
    """Fill the generators of a worker of the data loader, as `worker_init_fn`."""
    fill_generators(seed, rank=rank, worker=worker + 1)


def next_numbers() -> tuple[float, float, float]:
    """Return the next number of each global generator: after the same fillings others, if one was drawn from."""
    return random.random(), np.random.random(), torch.rand(()).item()


@contextlib.contextmanager
def filled_generators(seed: int | None, *, rank: int = 0) -> Iterator[None]:
    """Fill the global generators for the duration of the block, and give the caller's states back."""
    # A build for CUDA names its accelerator also on a machine that has none.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if accelerator is None else accelerator.type):
            fill_generators(seed, rank=rank)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
