"""The rule of `nn.RNN`, `nn.LSTM` and `nn.GRU`: their products, one step after another.

Sensitivity: rows stay apart at each step, so that a product's row is of one example, and the notes of all steps are joined.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from doppler_hf.privacy.clipping.gradients import Notes
from doppler_hf.privacy.clipping.torch_layers import product

# The hidden state; an LSTM has the state of its cells, too.
State = tuple[Float[Tensor, "rows _"], ...]


def recurrence(notes: Notes, module: nn.RNNBase, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
    """Compute hₜ = f(W_ih xₜ + b_ih, W_hh hₜ₋₁ + b_hh) in each layer and direction, and return what torch's layers do."""
    seen = None
    if isinstance(input, PackedSequence):
        x, lengths = pad_packed_sequence(input, batch_first=True)
        seen = (torch.arange(x.shape[1]) < lengths[:, None]).to(x.device)
    else:
        x = input if module.batch_first else input.transpose(0, 1)
    given = (hx,) if isinstance(hx, Tensor) else hx
    last: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for suffix in ("", "_reverse")[: 1 + module.bidirectional]:
            start = None if given is None else tuple(each[len(last)] for each in given)
            output, state = _over_time(notes, module, f"_l{layer}{suffix}", x, start, seen)
            outputs.append(output)
            last.append(state)
        x = torch.cat(outputs, dim=-1)
        if layer + 1 < module.num_layers:
            x = F.dropout(x, module.dropout, module.training)
    states = tuple(torch.stack(each) for each in zip(*last, strict=True))
    final = states if module.mode == "LSTM" else states[0]
    if not isinstance(input, PackedSequence):
        return x if module.batch_first else x.transpose(0, 1), final
    assert seen is not None
    if input.sorted_indices is not None:
        x, seen = x[input.sorted_indices], seen[input.sorted_indices]
    return input._replace(data=x.transpose(0, 1)[seen.T]), final


def _over_time(
    notes: Notes,
    module: nn.RNNBase,
    suffix: str,
    x: Float[Tensor, "rows time _"],
    state: State | None,
    seen: Bool[Tensor, "rows time"] | None,
) -> tuple[Float[Tensor, "rows time dim"], State]:
    """Return all hidden states of one layer in one direction, and the last state; past its end a row keeps its state."""
    own = dict(module.named_parameters(recurse=False))
    of_inputs = product(notes, x, own["weight_ih" + suffix], own.get("bias_ih" + suffix)).unbind(1)
    if state is None:
        sizes = (module.proj_size or module.hidden_size, module.hidden_size)
        state = tuple(of_inputs[0].new_zeros(len(x), size) for size in sizes[: 1 + (module.mode == "LSTM")])
    hidden: dict[int, Tensor] = {}  # time → hidden states; one direction runs backwards in time
    steps = range(len(of_inputs))
    for time in reversed(steps) if suffix.endswith("reverse") else steps:
        of_state = product(notes, state[0], own["weight_hh" + suffix], own.get("bias_hh" + suffix))
        new = _step(module.mode, of_inputs[time], of_state, state)
        if module.proj_size:
            new = (product(notes, new[0], own["weight_hr" + suffix], None), new[1])
        if seen is not None:
            new = tuple(torch.where(seen[:, time, None], *pair) for pair in zip(new, state, strict=True))
        hidden[time], state = new[0], new
    return torch.stack([hidden[time] for time in steps], dim=1), state


def _step(mode: str, of_input: Float[Tensor, "rows _"], of_state: Float[Tensor, "rows _"], state: State) -> State:
    """Return the next state."""
    if mode == "LSTM":
        enter, forget, candidate, leave = (of_input + of_state).chunk(4, dim=-1)
        cell = forget.sigmoid() * state[1] + enter.sigmoid() * candidate.tanh()
        return leave.sigmoid() * cell.tanh(), cell
    if mode == "GRU":
        parts = zip(of_input.chunk(3, dim=-1), of_state.chunk(3, dim=-1), strict=True)
        (reset_x, reset_h), (keep_x, keep_h), (new_x, new_h) = parts
        new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
        return (new + (keep_x + keep_h).sigmoid() * (state[0] - new),)
    return ((of_input + of_state).tanh() if mode == "RNN_TANH" else (of_input + of_state).relu(),)
