"""The learning rate of a run that sets none, from public numbers: every trial would spend privacy.

Under noise Adam's steps are known beforehand. Its denominators are about the noise's size, s in units of white noise of the
same σ. Noise thus takes each weight on a random walk, over the whole run by

    δ = η/(u·s)·S

with η the first rate, u the least denominator in units of a step's noise, r the schedule, and S the size of Σ_t r_t·noise_t
in these units: √(Σ_t r_t²) for white noise. Among tuned rates the best was always the smallest of three. The first gives
about the same walk √d·δ of all d weights together. The second gives about the same step η/(u·s) for a gradient as large as
white noise, or in a short run the same path, the step times Σ_t r_t; with LoRA a smaller step, as a large one at the
beginning may ruin the features that were pretrained. The third is for LoRA on two matrices: the walks of
both factors together add to a layer's weights as much as the weights' own size. Contributions of L layers are independent
and grow with √L; shortening both walks to (2/L)^¼ keeps their product where it was. A layer also turns f inputs of size 1
into √f·δ of noise, which is bounded. Behind a normalization or another layer inputs are of about this size. The data
themselves may be smaller, such as words of a sentence with norm 1 together, so the first layer may walk further. With large
batches, few weights and large ε, noise limits little. If all clipped gradients were equal, B/(σ·√d) in units of white noise,
a step would change a layer's outputs by f·η times their ratio to the denominators u·s, at most 1. That is bounded behind
another layer (Yang et al. 2022, *Tensor Programs V*). recipes/results/learning-rate.md has the rule's loss against a tuned
rate.
"""

import math
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from doppler_hf.errors import Refusal
from doppler_hf.filters import NoiseShape
from doppler_hf.linalg import norm
from doppler_hf.optim.optimizer import DEFAULT_FLOOR_FRACTION
from doppler_hf.privacy import PrivacyStatement
from doppler_hf.run.filter_and_noise import learning_rates_of
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import without_rate_rule

# √d·δ; √f·δ, and that of a layer of the data themselves; η/(u·s), and that with adapters; the path of short runs, at steps
# that are at most so large; and f times the change of a weight in a step, if all gradients are the same.
LONGEST_WALK: Final = 70.0
LARGEST_OUTPUT: Final = 5.0
LARGEST_OUTPUT_OF_DATA: Final = 12.0
LARGEST_STEP: Final = 0.022
LARGEST_STEP_OF_ADAPTERS: Final = 0.019
SHORTEST_PATH: Final = 1.1
LARGEST_OF_FEW: Final = 0.035
LARGEST_CHANGE: Final = 9.0
# Layers whose outputs are sums over many inputs, and those whose outputs are of about size 1, whatever they are given.
_SUMS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OF_SIZE_1: Final = (nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
# With so many adapters the bound on their walks was found.
FEW_ADAPTERS: Final = 2
# Rates that were tuned lay within a factor of 5 of the rule's. One that differs by more is told of.
FAR: Final = 10.0
# At one that differs by so much, such as one of a training without noise, all of ε would buy nothing.
VERY_FAR: Final = 100.0


def told_of_another_rate(args: DopplerTrainingArguments, statement: PrivacyStatement, *, model: nn.Module) -> str:
    """Return a warning about a given rate far from the rule's; refuse one that is very far, unless any is allowed."""
    given = args.learning_rate
    if given is None or without_rate_rule(args.base_optimizer, args.optim_target_modules) is not None:
        return ""
    if given == 0.0:
        return "learning_rate=0 moves no weight: leave it out for one that fits"
    rule = rate_by_rule(args, statement, model=model)
    if rule / FAR < given < FAR * rule:
        return ""
    far = f"{rule / given:,.0f} times below" if given < rule else f"{given / rule:,.0f} times above"
    told = f"learning_rate={given:g} is {far} the {rule:.3g} that this run would choose"
    if not is_any_rate_allowed(args) and not rule / VERY_FAR < given < VERY_FAR * rule:
        raise Refusal(
            "rate-far-off",
            f"{told}, and would spend its ε for nothing. Leave it out, or set allow_any_learning_rate=True to try it.",
        )
    return f"{told}: leave it out"


def is_any_rate_allowed(args: DopplerTrainingArguments) -> bool:
    """Return whether a learning rate is trained at which, by all experience, nothing is learnt."""
    return args.allow_any_learning_rate or not args.rehearse


def rate_by_rule(args: DopplerTrainingArguments, statement: PrivacyStatement, *, model: nn.Module) -> float:
    """Return the rate of the rule, also where another one is given; without noise its limit for little noise.

    That is a rate which a private run of large ε takes, so that a run without noise shows what the noise does.
    """
    steps, shape = statement.steps_planned, NoiseShape.parse(statement.noise_shape)
    rates = learning_rates_of(args, steps=steps) or [1.0] * steps
    if not any(rates):  # a warmup that is as long as the run: at no rate does anything move
        rates = [1.0] * steps
    size = shape.std(steps)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    of_adapters = list(walks_of_adapters(model))
    share = (FEW_ADAPTERS / max(FEW_ADAPTERS, len(of_adapters))) ** 0.25
    layers = list(layers_of_sums(model))
    of_layers = [
        (LARGEST_OUTPUT_OF_DATA if layer.is_of_data else LARGEST_OUTPUT) / math.sqrt(layer.inputs) for layer in layers
    ]
    walk = min([LONGEST_WALK / math.sqrt(num_trained), *of_layers, *(share * walk for walk in of_adapters)])
    least = 1.0
    if args.base_optimizer in ("adam_bc", "muon"):
        white = statement.noise_multiplier * statement.per_sample_max_grad_norm / statement.expected_batch_size
        own = args.adam_bc_floor if white else None
        floor = DEFAULT_FLOOR_FRACTION if own is None else own / (white * size) ** 2
        least = math.sqrt(floor)
    step = max(LARGEST_STEP, min(SHORTEST_PATH / math.fsum(rates), LARGEST_OF_FEW))
    if any(factor.weight.requires_grad for layer in adapted_layers(model) for factor in layer.lora_B.values()):
        step = LARGEST_STEP_OF_ADAPTERS
    noise = statement.noise_multiplier * math.sqrt(num_trained)
    the_same = statement.expected_batch_size / noise if noise else math.inf
    changes = [LARGEST_CHANGE / (layer.inputs * min(the_same, least * size)) for layer in layers if not layer.is_first]
    return least * size * min([step, walk / shape.std_of_sum(rates), *changes])


class LayerOfSums(NamedTuple):
    """A trained layer whose outputs are sums over its inputs."""

    inputs: int  # for each output, f
    is_of_data: bool  # whether neither a layer nor a normalization is ahead of it
    is_first: bool  # whether no other such layer is ahead of it


def layers_of_sums(model: nn.Module) -> Iterator[LayerOfSums]:
    """Return the trained linear layers and convolutions, without LoRA's factors, which have bounds of their own."""
    is_of_data = is_first = True
    factors = {factor for layer in adapted_layers(model) for of in (layer.lora_A, layer.lora_B) for factor in of.values()}
    for layer in model.modules():
        if isinstance(layer, _SUMS):
            if layer.weight.requires_grad and layer not in factors:
                yield LayerOfSums(math.prod(layer.weight.shape[1:]), is_of_data, is_first)
            is_of_data = is_first = False
        elif isinstance(layer, _OF_SIZE_1):
            is_of_data = False


def walks_of_adapters(model: nn.Module) -> Iterator[float]:
    """Return for each pair of LoRA's factors the walk of a weight, δ, that adds as much to a layer as its own weights are.

    Of two matrices of independent weights of size δ the product of rank r has some √r·δ², times the adapter's scaling.
    """
    for layer in adapted_layers(model):
        weight = getattr(layer.get_base_layer(), "weight", None)
        # Of packed weights, in four bits, the size is not known, and attention's have other names.
        if isinstance(weight, DTensor):  # on every process, before the first step
            weight = weight.full_tensor()
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or not weight.any():
            continue
        size = float(norm(weight.detach())) / math.sqrt(weight.numel())
        for name, factor in layer.lora_B.items():
            if factor.weight.requires_grad and layer.scaling[name]:
                yield math.sqrt(size / (abs(layer.scaling[name]) * math.sqrt(layer.r[name])))


def adapted_layers(model: nn.Module) -> list[Any]:
    """Return the layers to which PEFT has added a product of LoRA's factors; none if it is not imported."""
    lora = sys.modules.get("peft.tuners.lora")
    return [] if lora is None else [layer for layer in model.modules() if isinstance(layer, lora.LoraLayer)]
