"""The loss of a pair of answers to one prompt, one of them preferred (Rafailov et al. 2023, arXiv:2305.18290).

    loss = −log σ(β·m),   m = (log π(chosen) − log ref(chosen)) − (log π(rejected) − log ref(rejected))

A pair is one example, and two rows of the model. Its loss, and so its gradient, is of the whole pair: it is clipped once.

Sensitivity. A row's log-probability is the sum over that row's own labelled tokens. The loss of a pair depends on its own
two rows, and on two numbers that the reference computed from that pair alone. Nothing is divided by a count of the batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from doppler_hf.privacy.batching.collators import Collator
from doppler_hf.privacy.losses import places_of_prompt, without_adapters
from doppler_hf.privacy.token_losses import IGNORED_LABEL, head_in_chunks, next_labels, summed_token_losses

REFERENCES: Final = (
    "ref_chosen_logps",
    "ref_rejected_logps",
)  # TRL's names of the log-probabilities under the reference model
_COMPLETION: Final = "completion_mask"  # 1 for the tokens of the answer


class PairTerms(NamedTuple):
    """The public numbers in the losses of pairs, with the names of TRL's arguments."""

    beta: float
    label_smoothing: float = 0.0  # for "robust" and "exo_pair": the assumed share of wrongly labelled pairs, below ½
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5


class _Pairs(NamedTuple):
    """The quantities on which the loss of a pair depends."""

    chosen: Float[Tensor, " pairs"]  # log π − log ref of the chosen answer
    rejected: Float[Tensor, " pairs"]
    mean: Float[Tensor, " pairs"]  # the difference of both log-ratios, each divided by the number of tokens of its answer
    policy_margin: Float[Tensor, " pairs"]  # the difference of log π
    likelihoods: tuple[
        Float[Tensor, " pairs"], Float[Tensor, " pairs"]
    ]  # log π of each answer, divided by its number of tokens
    beta: float  # This field and the next three are those of `PairTerms`.
    share: float
    tau: float
    gamma: float

    @property
    def margin(self) -> Float[Tensor, " pairs"]:
        return self.chosen - self.rejected

    @property
    def log_odds(self) -> Float[Tensor, " pairs"]:
        # At log π = 0, for example for an answer that was truncated to nothing, the odds would be infinite.
        odds = [each - torch.log(-torch.expm1(each.clamp(max=-1e-6))) for each in self.likelihoods]
        return odds[0] - odds[1]


# Name in TRL → loss. The other losses of its `DPOTrainer` sort the log-ratios of a batch, so they are left out. The losses
# without a reference are those of its CPOTrainer and ORPOTrainer, without the likelihood term, which is "sft" here.
PAIR_LOSSES: Final[dict[str, Callable[[_Pairs], Float[Tensor, " pairs"]]]] = {
    "sigmoid": lambda p: -F.logsigmoid(p.beta * p.margin),
    "sigmoid_norm": lambda p: -F.logsigmoid(p.beta * p.mean),
    "hinge": lambda p: torch.relu(1 - p.beta * p.margin),
    "ipo": lambda p: (p.mean - 1 / (2 * p.beta)).square(),
    "robust": lambda p: (
        (p.share * F.logsigmoid(-p.beta * p.margin) - (1 - p.share) * F.logsigmoid(p.beta * p.margin)) / (1 - 2 * p.share)
    ),
    "exo_pair": lambda p: (
        torch.sigmoid(p.beta * p.margin) * (F.logsigmoid(p.beta * p.margin) - math.log(1 - p.share))
        + torch.sigmoid(-p.beta * p.margin) * (F.logsigmoid(-p.beta * p.margin) - math.log(p.share))
    ),
    "nca_pair": lambda p: (
        -F.logsigmoid(p.beta * p.chosen) - (F.logsigmoid(-p.beta * p.chosen) + F.logsigmoid(-p.beta * p.rejected)) / 2
    ),
    "bco_pair": lambda p: -F.logsigmoid(p.beta * p.chosen) - F.logsigmoid(-p.beta * p.rejected),
    "sppo_hard": lambda p: (p.chosen - 1 / (2 * p.beta)).square() + (p.rejected + 1 / (2 * p.beta)).square(),
    "apo_zero": lambda p: torch.sigmoid(-p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(-p.beta * p.margin),
    "discopop": lambda p: torch.lerp(
        -F.logsigmoid(p.beta * p.margin), torch.exp(-p.beta * p.margin), torch.sigmoid(p.beta * p.margin / p.tau)
    ),
    "sft": lambda p: -p.likelihoods[0],
    "cpo": lambda p: -F.logsigmoid(p.beta * p.policy_margin),
    "simpo": lambda p: -F.logsigmoid(p.beta * (p.likelihoods[0] - p.likelihoods[1]) - p.gamma),
    "orpo": lambda p: -p.beta * F.logsigmoid(p.log_odds),
}
WITHOUT_REFERENCE: Final = {"sft", "cpo", "simpo", "orpo"}


def collate_pairs(examples: Sequence[Any], *, collator: Collator) -> dict[str, Any]:
    """Collate pairs as TRL does, then reorder the rows so that the two rows of each pair are neighbours."""
    return side_by_side(collator(examples))


def side_by_side(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's batch with the two rows of each pair as neighbours."""
    return {
        name: value if name in REFERENCES else value.unflatten(0, (2, -1)).transpose(0, 1) for name, value in inputs.items()
    }


def log_ratios(model: nn.Module, inputs: Mapping[str, Any]) -> Float[Tensor, "pairs 2"]:
    """Call the model once, and return log π − log ref of both answers of each pair."""
    rows = {name: value.flatten(0, 1) for name, value in inputs.items() if name not in REFERENCES}
    labels = rows["input_ids"].masked_fill(rows.pop(_COMPLETION) == 0, IGNORED_LABEL)
    labels = next_labels(F.pad(labels, (places_of_prompt(model), 0), value=IGNORED_LABEL))
    with head_in_chunks(without_adapters(model), labels) as found:
        logits = model(**rows).logits
    log_probabilities = -summed_token_losses(logits, labels, found=found)
    return log_probabilities.unflatten(0, (-1, 2)) - references_of(inputs)


def references_of(inputs: Mapping[str, Any]) -> Float[Tensor, "pairs 2"]:
    """Return log ref of both answers of each pair, which was computed before training."""
    return torch.stack([inputs[name] for name in REFERENCES], dim=1)


def lengths_of_answers(inputs: Mapping[str, Any]) -> Int[Tensor, "pairs 2"]:
    """Return the number of tokens of each answer, at least 1, since an answer may have been truncated to nothing."""
    mask: Tensor = inputs[_COMPLETION]
    return mask.sum(dim=-1).clamp(min=1)


def pair_losses(
    ratios: Float[Tensor, "pairs 2"],
    references: Float[Tensor, "pairs 2"],
    lengths: Int[Tensor, "pairs 2"],
    *,
    weights: Sequence[tuple[str, float]],
    terms: PairTerms,
) -> Float[Tensor, " pairs"]:
    """Return the loss of each pair: the weighted sum of the given `PAIR_LOSSES`; `references` is for those without one.

    Example:
        >>> zeros = torch.zeros(1, 2)
        >>> pair_losses(zeros, zeros, torch.ones(1, 2, dtype=torch.long), weights=[("sigmoid", 1.0)], terms=PairTerms(0.1))
        tensor([0.6931])
    """
    # Sensitivity: every term depends on the two rows of one pair only, and on their log-probabilities under the reference
    # model.
    chosen, rejected = ratios.unbind(dim=1)
    of_tokens, policy = ratios / lengths, ratios + references
    first, second = (policy / lengths).unbind(dim=1)
    mean, policy_margin = (each[:, 0] - each[:, 1] for each in (of_tokens, policy))
    pairs = _Pairs(chosen, rejected, mean, policy_margin, (first, second), *terms)
    return torch.stack([weight * PAIR_LOSSES[name](pairs) for name, weight in weights]).sum(dim=0)


def loss_of_untrained(*, weights: Sequence[tuple[str, float]], terms: PairTerms, vocabulary: int) -> float:
    """Return the loss of every pair for a model that prefers no answer and no word: log-ratios of 0, log π = −ln V a token.

    Example:
        >>> round(loss_of_untrained(weights=[("sigmoid", 1.0)], terms=PairTerms(0.1), vocabulary=50_000), 4)
        0.6931
    """
    references = torch.full((1, 2), -math.log(max(2, vocabulary)))
    lengths = torch.ones(1, 2, dtype=torch.long)
    return float(pair_losses(torch.zeros(1, 2), references, lengths, weights=weights, terms=terms))
