"""The loss of a pair of answers to one prompt, one of them preferred (Rafailov et al. 2023, arXiv:2305.18290).

    loss = −log σ(β·m),   m = (log π(chosen) − log ref(chosen)) − (log π(rejected) − log ref(rejected))

A pair is one example, and two rows of the model. Its loss, and so its gradient, is of the whole pair: it is clipped once.

Sensitivity. A row's log-probability is the sum over that row's own labelled tokens. The loss of a pair depends on its own
two rows, and on two numbers that the reference computed from that pair alone. Nothing is divided by a count of the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.privacy.losses import IGNORED_LABEL, places_of_prompt, summed_token_losses

REFERENCES: Final = ("ref_chosen_logps", "ref_rejected_logps")  # as TRL names the reference's log-probabilities
_COMPLETION: Final = "completion_mask"  # 1 for the tokens of the answer

_Rule = Callable[[Tensor, Tensor, float, float], Tensor]
# Of the margin m, and of its mean over the tokens of each answer, with β and the share ε of pairs that are labelled wrongly.
PAIR_LOSSES: Final[dict[str, _Rule]] = {
    "sigmoid": lambda margin, _, beta, __: -F.logsigmoid(beta * margin),
    "hinge": lambda margin, _, beta, __: torch.relu(1 - beta * margin),
    "robust": lambda margin, _, beta, share: (
        (share * F.logsigmoid(-beta * margin) - (1 - share) * F.logsigmoid(beta * margin)) / (1 - 2 * share)
    ),
    "ipo": lambda _, mean, beta, __: (mean - 1 / (2 * beta)).square(),
}


def collate_pairs(examples: Sequence[Any], *, collator: Collator) -> dict[str, Any]:
    """Collate pairs as TRL does, all chosen answers before all rejected ones, and put the two rows of each side by side."""
    return {
        name: value if name in REFERENCES else value.unflatten(0, (2, -1)).transpose(0, 1)
        for name, value in collator(examples).items()
    }


def log_ratios(model: nn.Module, inputs: Mapping[str, Any]) -> Float[Tensor, "pairs 2"]:
    """Call the model once, and return log π − log ref of both answers of each pair."""
    rows = {name: value.flatten(0, 1) for name, value in inputs.items() if name not in REFERENCES}
    labels = rows["input_ids"].masked_fill(rows.pop(_COMPLETION) == 0, IGNORED_LABEL)
    labels = F.pad(labels, (places_of_prompt(model), 0), value=IGNORED_LABEL)
    log_probabilities = -summed_token_losses(model(**rows).logits, labels, shift=True)
    references = torch.stack([inputs[name] for name in REFERENCES], dim=1)
    return log_probabilities.unflatten(0, (-1, 2)) - references


def lengths_of_answers(inputs: Mapping[str, Any]) -> Int[Tensor, "pairs 2"]:
    """Return the number of tokens of each answer, at least 1: one may have been cut off."""
    mask: Tensor = inputs[_COMPLETION]
    return mask.sum(dim=-1).clamp(min=1)


def pair_losses(
    ratios: Float[Tensor, "pairs 2"],
    lengths: Int[Tensor, "pairs 2"],
    *,
    weights: Sequence[tuple[str, float]],
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Tensor, " pairs"]:
    """Return the loss of each pair: the weighted sum of the given `PAIR_LOSSES`.

    `label_smoothing` is for "robust": the share of pairs whose labels are taken to be the wrong way round, below ½.

    Example:
        >>> pair_losses(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.long), weights=[("sigmoid", 1.0)], beta=0.1)
        tensor([0.6931])
    """
    margin, mean = (of_answers[:, 0] - of_answers[:, 1] for of_answers in (ratios, ratios / lengths))
    parts = [weight * PAIR_LOSSES[name](margin, mean, beta, label_smoothing) for name, weight in weights]
    return torch.stack(parts).sum(dim=0)
