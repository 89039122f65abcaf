"""Per-sample gradients, clipped and summed.

- clipped_gradients: `ClippedGradients`: norms, clip factors, and sums of clipped gradients
- engine: replaces the forward passes of layers, and runs one backward pass
- gradients: the forms in which layers note their gradients, with their squared norms and weighted sums
- fused_gradients: the same norms and sums in a few kernels of a GPU
- copies: one copy of a tensor for each example, whose gradient is noted
- torch_layers, attention, recurrence: rules for the layers of torch
- experts: mixtures of experts, one example after another
- transformers_layers, other_layers: rules for layers of Transformers and PEFT, and for all other layers
- opacus_layers: rules that use Opacus's samplers, for `grad_sample_engine="opacus"`
- layers: the parameters and modes of a layer
- refused_layers: refuses layers that mix examples or cannot be trained privately

A rule for a layer is one function in a file of rules, and a line in the table of that file, such as
`torch_layers.RULES`. It computes what the layer computes, and its backward pass notes each use of a trained parameter:
`Notes.note_product`, `note_lookup`, `note_sum` or `note_rows`. Its test is a line in `tests/privacy/clipping/test_layers.py`
or in a new file next to it. A new form of gradients is one class in `gradients`.
"""

from doppler_hf.privacy.clipping.clipped_gradients import ClippedGradients, Clipping, Engine, Granularity

__all__ = ["ClippedGradients", "Clipping", "Engine", "Granularity"]
