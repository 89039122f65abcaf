"""The rule of `nn.MultiheadAttention`, which multiplies by its weights and those of `out_proj` without calling a layer.

Sensitivity: each product has the batch first, whatever `batch_first` says of the layer's own inputs, so that a row is of one
example. Keys and values that are parameters are one copy for each example.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from doppler_hf.privacy.clipping.copies import one_per_example
from doppler_hf.privacy.clipping.gradients import Notes
from doppler_hf.privacy.clipping.torch_layers import product

Mask = Bool[Tensor, "..."] | Float[Tensor, "..."]


def has_rule(module: nn.Module) -> bool:
    """Return whether a module is torch's own attention and has a trained parameter."""
    if not isinstance(module, nn.MultiheadAttention) or "forward" in vars(module):
        return False
    weights = (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (module.in_proj_bias, module.bias_k, module.bias_v)
    used = [each for each in (*weights, *biases, module.out_proj.weight, module.out_proj.bias) if each is not None]
    # A weight may be computed from other parameters, as pruning does. The rule would then leave those parameters without a
    # gradient, so it applies only if all weights are parameters themselves.
    is_plain = type(module).forward is nn.MultiheadAttention.forward and all(isinstance(each, nn.Parameter) for each in used)
    return is_plain and any(each.requires_grad for each in used)


def attention(
    notes: Notes,
    module: nn.MultiheadAttention,
    query: Float[Tensor, "_ _ dim"],
    key: Float[Tensor, "_ _ _"],
    value: Float[Tensor, "_ _ _"],
    key_padding_mask: Mask | None = None,
    need_weights: bool = True,
    attn_mask: Mask | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Float[Tensor, "_ _ dim"], Float[Tensor, "batch *heads queries keys"] | None]:
    """Compute Y = [A₁V₁, A₂V₂, …] Wᵀ + b with Aₕ = softmax(QₕKₕᵀ/√d + mask), and A if it is wanted."""
    if is_causal and attn_mask is None:
        return nn.MultiheadAttention.forward(
            module, query, key, value, is_causal=True
        )  # Torch then raises an error that asks for the mask.
    q, k, v = _projected(notes, module, query, key, value)
    keys, own = k.shape[1], dict(module.named_parameters(recurse=False))
    if "bias_k" in own:
        k = torch.cat([k, one_per_example(notes, own["bias_k"], (1, module.embed_dim))], dim=1)
        v = torch.cat([v, one_per_example(notes, own["bias_v"], (1, module.embed_dim))], dim=1)
    if module.add_zero_attn:
        k, v = (F.pad(each, (0, 0, 0, 1)) for each in (k, v))
    q, k, v = (each.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for each in (q, k, v))
    # Like torch, this does not read a mask that is declared causal.
    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = None
    if attn_mask is not None and not is_causal:
        mask = _added(attn_mask if attn_mask.ndim == 2 else attn_mask.view(*q.shape[:3], keys), query.dtype)
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, query.dtype)[:, None, None]
        mask = padding if mask is None else mask + padding
    if mask is not None:
        mask = F.pad(mask, (0, k.shape[2] - keys))  # keys that the layer adds are never masked
    dropout, shares = module.dropout if module.training else 0.0, None
    if need_weights:
        scores = q * q.shape[-1] ** -0.5 @ k.mT
        shares = F.dropout((scores if mask is None else scores + mask).softmax(dim=-1), dropout)
        heads = shares @ v
        shares = shares.mean(dim=1) if average_attn_weights else shares
    else:
        heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    output = product(notes, heads.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    return output if module.batch_first else output.transpose(0, 1), shares


def _projected(
    notes: Notes, module: nn.MultiheadAttention, *inputs: Float[Tensor, "_ _ _"]
) -> list[Float[Tensor, "batch _ dim"]]:
    """Return query, key and value, with the batch first, multiplied by their weights."""
    first = {each: each if module.batch_first else each.transpose(0, 1) for each in inputs}
    bias, width = module.in_proj_bias, 3 * module.embed_dim
    if module.in_proj_weight is not None:
        # Each input is multiplied by the weights of query, key and value together, although only one product is used. The
        # gradients of the unused ones are zero, and the gradient of the weight keeps one form.
        packed = {each: product(notes, x, module.in_proj_weight, bias).chunk(3, dim=-1) for each, x in first.items()}
        return [packed[each][place] for place, each in enumerate(inputs)]
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    products = [product(notes, first[each], weight, None) for each, weight in zip(inputs, weights, strict=True)]
    if bias is None:
        return products
    shifts = [one_per_example(notes, bias, (1, width)) for _ in products]
    return [x + shift.chunk(3, dim=-1)[place] for place, (x, shift) in enumerate(zip(products, shifts, strict=True))]


def _added(mask: Mask, dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Return a mask as numbers that are added to the scores."""
    return mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
