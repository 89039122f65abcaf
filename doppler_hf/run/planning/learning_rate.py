"""Compute the learning rate of a run that sets none from public numbers, since every trial would spend privacy.

Under noise, Adam's steps are known beforehand. Its denominators are about the noise's size, s in units of white noise of the
same σ. Noise thus takes each weight on a random walk, whose length over the whole run is

    δ = η/(u·s)·S

with η the first rate, u the least denominator in units of a step's noise, r the schedule, and S the size of Σ_t r_t·noise_t
in these units: √(Σ_t r_t²) for white noise. Among tuned rates the best was always the smallest of three. The first rate
gives about the same walk √d·δ of all d weights together. The second rate gives about the same step η/(u·s) for a gradient as
large as white noise. In a short run it gives the same path, which is the step times Σ_t r_t. With LoRA the step is smaller,
since a large step at the beginning may ruin pretrained features. The third rate is for LoRA on two matrices: the walks of
both factors together add to a layer's weights as much as the weights' own size. Contributions of L layers are independent
and grow with √L; shortening both walks to (2/L)^¼ of their length keeps their product the same.

Two further bounds are for layers. A layer turns f inputs of size 1 into √f·δ of noise, which is bounded. Inputs are about
this size if they come from a normalization or another layer. The data themselves may be smaller, such as the words of a
sentence with norm 1 together, so the first layer may walk further. With large batches, few weights and large ε, noise limits
little. If all clipped gradients were equal, B/(σ·√d) in units of white noise, a step would change a layer's outputs by f·η
times their ratio to the denominators u·s, at most 1. This change is bounded for layers after the first (Yang et al. 2022,
*Tensor Programs V*). recipes/results/learning-rate.md compares the rule's loss with that of a tuned rate.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from doppler_hf.errors import Refusal
from doppler_hf.filters import NoiseShape
from doppler_hf.linalg import norm
from doppler_hf.optim.optimizer import DEFAULT_FLOOR_FRACTION
from doppler_hf.privacy import PrivacyStatement
from doppler_hf.run.planning.filter_and_noise import learning_rates_of
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import setting_without_default_rate

# These numbers bound the following, in this order: √d·δ; √f·δ, and √f·δ of a layer that reads the data; η/(u·s), and η/(u·s)
# with adapters; the path of short runs, and their steps; and f times the change of a weight in a step if all gradients are
# the same.
LONGEST_WALK: Final = 70.0
LARGEST_OUTPUT: Final = 5.0
LARGEST_OUTPUT_OF_DATA: Final = 12.0
LARGEST_STEP: Final = 0.022
LARGEST_STEP_OF_ADAPTERS: Final = 0.019
SHORTEST_PATH: Final = 1.1
LARGEST_OF_FEW: Final = 0.035
LARGEST_CHANGE: Final = 9.0
# Layers whose outputs are sums over many inputs, and layers whose outputs have a size of about 1 for any input.
_SUMS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OF_SIZE_1: Final = (nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# The bound on the walks of adapters was found with this number of adapters.
FEW_ADAPTERS: Final = 2
# Tuned rates were within a factor of 5 of the rule's rate. The run notes a rate that differs by more than this factor.
FAR: Final = 10.0
# A rate that differs by this factor, such as a rate of training without noise, would spend all of ε without learning.
VERY_FAR: Final = 100.0


def check_given_learning_rate(args: DopplerTrainingArguments, statement: PrivacyStatement, *, model: nn.Module) -> str:
    """Return a warning if the given rate is far from the rule's, or 0; refuse it if very far, unless any is allowed."""
    given = args.learning_rate
    if given == 0.0:
        return check_rate_of_0(args)
    if given is None or not has_automatic_rate(args):
        return ""
    rule = automatic_learning_rate(args, statement, model=model)
    if rule / FAR < given < FAR * rule:
        return ""
    far = f"{rule / given:,.0f} times smaller" if given < rule else f"{given / rule:,.0f} times larger"
    told = f"learning_rate={given:g} is {far} than the automatic value ({rule:.3g})"
    if not rule / VERY_FAR < given < VERY_FAR * rule:
        _refuse_far_rate(args, told)
    return f"{told}: leave it out to use the automatic value"


def check_rate_of_0(args: DopplerTrainingArguments) -> str:
    """Refuse a learning rate of 0, unless any rate is allowed, and return a warning of it; '' for other rates."""
    if args.learning_rate != 0.0:
        return ""
    told = "learning_rate=0 trains nothing"
    _refuse_far_rate(args, told)
    return f"{told}: leave it out to use the automatic value" if has_automatic_rate(args) else told


def _refuse_far_rate(args: DopplerTrainingArguments, told: str) -> None:
    if is_any_rate_allowed(args):
        return
    other = "Leave learning_rate out" if has_automatic_rate(args) else "Set a learning_rate above 0"
    raise Refusal(
        "rate-far-off",
        f"{told}, so the run would spend its ε without learning. {other}, or set allow_any_learning_rate=True to use it "
        "anyway.",
    )


def has_automatic_rate(args: DopplerTrainingArguments) -> bool:
    """Return whether the rule knows a learning rate for the optimizer of the arguments."""
    return setting_without_default_rate(args.base_optimizer, args.optim_target_modules) is None


def is_any_rate_allowed(args: DopplerTrainingArguments) -> bool:
    """Return whether the run accepts a learning rate at which, by all experience, nothing is learnt."""
    return args.allow_any_learning_rate or not args.rehearse


def automatic_learning_rate(args: DopplerTrainingArguments, statement: PrivacyStatement, *, model: nn.Module) -> float:
    """Return the rate of the rule, even if a rate is given; without noise, return the rule's limit for little noise.

    A private run of large ε uses that rate, so comparing it with a run without noise shows the effect of the noise.
    """
    rates = learning_rates_of(args, steps=statement.steps_planned)
    return learning_rate_for(trained_weights(model), args, statement, rates=rates)


def learning_rate_for(
    weights: "TrainedWeights",
    args: DopplerTrainingArguments,
    statement: PrivacyStatement,
    *,
    rates: Sequence[float] | None,
) -> float:
    """Return the `automatic_learning_rate` for some weights and the arguments' schedule, which may be unknown."""
    steps, shape = statement.steps_planned, NoiseShape.parse(statement.noise_shape)
    white = statement.noise_multiplier * statement.per_sample_max_grad_norm / statement.expected_batch_size
    least = 1.0
    if args.base_optimizer in ("adam_bc", "muon"):
        own = args.adam_bc_floor if white else None
        floor = DEFAULT_FLOOR_FRACTION if own is None else own / (white * shape.std(steps)) ** 2
        least = math.sqrt(floor)
    return learning_rate_of_rule(
        weights,
        noise_multiplier=statement.noise_multiplier,
        batch_size=statement.expected_batch_size,
        shape=shape,
        rates=rates or [1.0] * steps,
        least=least,
    )


class TrainedWeights(NamedTuple):
    """What the rule needs to know of a model's trained weights."""

    number: int
    layers: "Sequence[LayerOfSums]" = ()
    walks_of_adapters: Sequence[float] = ()  # see `lora_step_limits`
    has_adapters: bool = False


def trained_weights(model: nn.Module) -> TrainedWeights:
    """Return what the rule needs to know of the trained weights of a model."""
    return TrainedWeights(
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        [*linear_layers(model)],
        [*lora_step_limits(model)],
        any(factor.weight.requires_grad for layer in lora_layers(model) for factor in layer.lora_B.values()),
    )


def learning_rate_of_rule(
    weights: TrainedWeights,
    *,
    noise_multiplier: float,
    batch_size: int,
    shape: NoiseShape,
    rates: Sequence[float],
    least: float = math.sqrt(DEFAULT_FLOOR_FRACTION),
) -> float:
    """Return the rate of the rule for some weights. Without layers and adapters, it is the most that it can be.

    Args:
        weights: The trained weights.
        noise_multiplier: σ of the gradient.
        batch_size: The expected batch size B.
        shape: The shape of the noise.
        rates: The schedule, as a share of the first rate for each step.
        least: The least denominator u in units of a step's noise.
    """
    steps = len(rates)
    if not any(rates):  # the warmup is as long as the run, so no rate would train anything
        rates = [1.0] * steps
    size = shape.std(steps)
    of_adapters = weights.walks_of_adapters
    share = (FEW_ADAPTERS / max(FEW_ADAPTERS, len(of_adapters))) ** 0.25
    of_layers = [
        (LARGEST_OUTPUT_OF_DATA if layer.is_of_data else LARGEST_OUTPUT) / math.sqrt(layer.inputs)
        for layer in weights.layers
    ]
    walk = min([LONGEST_WALK / math.sqrt(weights.number), *of_layers, *(share * walk for walk in of_adapters)])
    step = max(LARGEST_STEP, min(SHORTEST_PATH / math.fsum(rates), LARGEST_OF_FEW))
    if weights.has_adapters:
        step = LARGEST_STEP_OF_ADAPTERS
    noise = noise_multiplier * math.sqrt(weights.number)
    the_same = batch_size / noise if noise else math.inf
    changes = [
        LARGEST_CHANGE / (layer.inputs * min(the_same, least * size)) for layer in weights.layers if not layer.is_first
    ]
    return least * size * min([step, walk / shape.std_of_sum(rates), *changes])


class LayerOfSums(NamedTuple):
    """A trained layer whose outputs are sums over its inputs."""

    inputs: int  # The number f of inputs for each output.
    is_of_data: bool  # Whether neither a layer nor a normalization comes before it.
    is_first: bool  # Whether no other such layer comes before it.


def linear_layers(model: nn.Module) -> Iterator[LayerOfSums]:
    """Return the trained linear layers and convolutions, without LoRA's factors, which have their own bounds."""
    is_of_data = is_first = True
    factors = {factor for layer in lora_layers(model) for of in (layer.lora_A, layer.lora_B) for factor in of.values()}
    for layer in model.modules():
        if isinstance(layer, _SUMS):
            if layer.weight.requires_grad and layer not in factors:
                yield LayerOfSums(math.prod(layer.weight.shape[1:]), is_of_data, is_first)
            is_of_data = is_first = False
        elif isinstance(layer, _OF_SIZE_1):
            is_of_data = False


def lora_step_limits(model: nn.Module) -> Iterator[float]:
    """Return for each pair of LoRA factors the walk δ of a weight that adds as much to a layer as the size of its weights.

    The product of rank r of two matrices of independent weights of size δ has a size of about √r·δ², times the scaling.
    """
    for layer in lora_layers(model):
        weight = getattr(layer.get_base_layer(), "weight", None)
        # The size of packed 4-bit weights is not known, and attention layers name their weights differently.
        if isinstance(weight, DTensor):  # all processes come here together, before the first step
            weight = weight.full_tensor()
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or not weight.any():
            continue
        size = float(norm(weight.detach())) / math.sqrt(weight.numel())
        for name, factor in layer.lora_B.items():
            if factor.weight.requires_grad and layer.scaling[name]:
                yield math.sqrt(size / (abs(layer.scaling[name]) * math.sqrt(layer.r[name])))


def lora_layers(model: nn.Module) -> list[Any]:
    """Return the layers to which PEFT has added a product of LoRA's factors, or none if PEFT is not imported."""
    lora = sys.modules.get("peft.tuners.lora")
    return [] if lora is None else [layer for layer in model.modules() if isinstance(layer, lora.LoraLayer)]
