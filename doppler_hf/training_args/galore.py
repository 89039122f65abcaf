"""GaLore's arguments, read from the two fields that `TrainingArguments` has for it.

`optim_target_modules` selects the modules, and so switches GaLore on. `optim_args` is a line such as
"rank=64,update_proj_gap=100,scale=0.1". Names, defaults and matching of modules follow `transformers/trainer_optimizer.py`.
What Transformers would ignore silently is refused.
"""

import math
from dataclasses import dataclass
from typing import get_type_hints

from torch import nn
from transformers import TrainingArguments
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import check_target_module_exists

from doppler_hf.errors import Refusal
from doppler_hf.filters.grammar import did_you_mean, numbers_of


@dataclass(frozen=True)
class GaloreArguments:
    """The arguments in `optim_args`.

    Example:
        >>> GaloreArguments.parse("rank=64, scale=1.0").rank
        64
    """

    rank: int = 128  # columns of the projector
    update_proj_gap: int = 200  # optimizer steps from one projector to the next
    scale: float = 0.25  # factor of the update that is projected back

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name in ("rank", "update_proj_gap"):
            if (value := vars(self)[name]) < 1:
                raise Refusal("out-of-range", f"optim_args: {name} must be at least 1, got {value}.")
        if not 0.0 < self.scale < math.inf:
            raise Refusal("out-of-range", f"optim_args: scale must be a finite number > 0, got {self.scale}.")

    @classmethod
    def parse(cls, optim_args: str | None) -> "GaloreArguments":
        """Read a line of `key=value`, separated by commas; None or a blank one means the defaults."""
        kinds = get_type_hints(cls)
        text = optim_args or ""
        words = [word for word in text.replace(" ", "").split(",") if text.strip()]  # as Transformers does
        # The default of Transformers, by which a matrix is projected on its shorter side.
        pairs = [word.partition("=") for word in words if word != "proj_type=std"]
        for key, equals, value in pairs:
            if not equals or key not in kinds:
                raise Refusal(
                    "unknown-option",
                    f"optim_args must be key=value separated by commas, got {key + equals + value!r}"
                    f"{did_you_mean(key, kinds)} in {text!r}. The keys are {', '.join(kinds)}.",
                )
        return cls(**numbers_of(pairs, kinds, text=text))


def check_galore(args: TrainingArguments) -> None:
    """Refuse GaLore's arguments where they would have no effect."""
    if args.optim_target_modules is None:
        if args.optim_args:
            raise Refusal(
                "no-effect",
                f"optim_args={args.optim_args!r} has no effect without GaLore. Switch GaLore on with optim_target_modules, "
                "for instance 'all-linear', or leave optim_args out.",
            )
        return
    if args.base_optimizer == "muon":
        raise Refusal(
            "no-effect",
            "optim_target_modules has no effect with base_optimizer='muon', which takes whole matrices. Leave one out.",
        )
    GaloreArguments.parse(args.optim_args)


def target_parameters(model: nn.Module, optim_target_modules: str | list[str]) -> dict[str, nn.Parameter]:
    """Return the matrices that GaLore projects: the trainable two-dimensional `weight`s of the modules that match, by name.

    A list matches a module whose name contains one of its strings, or which one of them matches in full as a regular
    expression. A string alone must match the name in full; "all-linear" is every `nn.Linear` and `Conv1D`. Embedding tables
    are never projected, even if a linear layer shares one.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    matrices = {
        name: weight
        for name, module in model.named_modules()
        # A parameter of the module itself: `weight` of a PEFT layer is a property that returns the frozen layer's.
        for kind, weight in module.named_parameters(recurse=False)
        if kind == "weight" and weight.ndim == 2 and weight.requires_grad and weight not in tables
    }
    linear = [name for name in matrices if isinstance(model.get_submodule(name), nn.Linear | Conv1D)]
    if optim_target_modules in ("all-linear", "all_linear"):
        matched = linear
    else:
        matched = [name for name in matrices if check_target_module_exists(optim_target_modules, name)]
    if not matched:
        shown = ", ".join(linear[:5]) + (", …" if len(linear) > 5 else "") if linear else "none"
        raise Refusal(
            "no-galore-target",
            f"optim_target_modules={optim_target_modules!r} matches no module with a trainable matrix. Linear layers with "
            f"one are: {shown}. Give a list of names or parts of names (a string alone must match a whole name), or "
            "'all-linear', or leave it out.",
        )
    # A matrix that modules share has one name here, which may be the other module's.
    weights = {matrices[name] for name in matched}
    return {name: weight for name, weight in model.named_parameters() if weight in weights}
