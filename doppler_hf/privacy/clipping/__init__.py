"""Per-sample gradients, clipped and summed.

- clipped_gradients: `ClippedGradients`: norms, the factors by which gradients are clipped, and sums of what these leave
- engine: stand-ins for the layers' forward passes, and one backward pass
- gradients: what layers note of their gradients, in a few forms; the squared norms and weighted sums of these
- fused_gradients: the same norms and sums in a few kernels of a GPU
- copies: a copy of a tensor for each example, which notes its gradient
- torch_layers, attention, recurrence: rules for the layers of torch
- experts: mixtures of experts, one example after another
- transformers_layers, other_layers: rules for layers of Transformers and PEFT, and for all others
- opacus_layers: rules that ask Opacus's samplers, for `grad_sample_engine="opacus"`
- layers, refused_layers: a layer's own parameters and modes; layers that mix examples

A layer with a rule of its own is one function in a file of rules, and a line in the table of that file, such as
`torch_layers.RULES`. It computes what the layer computes, and its backward pass notes each use of a trained parameter:
`Notes.note_product`, `note_lookup`, `note_sum` or `note_rows`. Its test is a line in `tests/privacy/clipping/test_layers.py`
or a file beside it that mirrors the new one. A gradient of a new form is one class in `gradients`.
"""

from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Clipping, Engine, Granularity

__all__ = ["ClippedGradients", "Clipping", "Engine", "Granularity"]
