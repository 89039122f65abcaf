"""The arguments of GaLore, read from the two fields that `TrainingArguments` has for it.

`optim_target_modules` selects the modules and thereby switches GaLore on. `optim_args` is a line such as
"rank=64,update_proj_gap=100,scale=0.1". Names, defaults and the matching of modules follow
`transformers/trainer_optimizer.py`. Options that Transformers would silently ignore are refused.
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

    rank: int = 128  # The number of columns of the projector.
    update_proj_gap: int = 200  # The number of optimizer steps between two projectors.
    scale: float = 0.25  # The factor by which the projected update is multiplied.

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name in ("rank", "update_proj_gap"):
            if (value := vars(self)[name]) < 1:
                raise Refusal(
                    "out-of-range",
                    f"GaLore's {name} must be at least 1; got {value}. Change it in optim_args, or leave it out there "
                    "for the default.",
                )
        if not 0.0 < self.scale < math.inf:
            raise Refusal(
                "out-of-range",
                f"GaLore's scale must be positive and finite; got {self.scale}. Change it in optim_args, or leave it out "
                "there for the default.",
            )

    @classmethod
    def parse(cls, optim_args: str | None) -> "GaloreArguments":
        """Read pairs `key=value`, separated by commas; None or a blank text means the defaults.

        Raises:
            ValueError: If the text has another form, a key is unknown, or a value is out of range.
        """
        kinds = get_type_hints(cls)
        text = optim_args or ""
        words = [word for word in text.replace(" ", "").split(",") if text.strip()]  # Transformers splits it like this.
        # `proj_type=std` is Transformers' default, which projects the shorter side of a matrix, as we do.
        pairs = [word.partition("=") for word in words if word != "proj_type=std"]
        for key, equals, value in pairs:
            if not equals or key not in kinds:
                raise Refusal(
                    "unknown-option",
                    f"Expected key=value pairs separated by commas as optim_args; got {key + equals + value!r}"
                    f"{did_you_mean(key, kinds)} in {text!r}. The keys are {', '.join(kinds)}.",
                )
        return cls(**numbers_of(pairs, kinds, text=text))


def check_galore(args: TrainingArguments) -> None:
    """Refuse GaLore's arguments if they would have no effect."""
    if args.optim_target_modules is None:
        if args.optim_args:
            raise Refusal(
                "no-effect",
                f"optim_args={args.optim_args!r} has no effect without GaLore. Switch GaLore on with optim_target_modules "
                "(for example 'all-linear'), or leave optim_args out.",
            )
        return
    if args.base_optimizer == "muon":
        raise Refusal(
            "no-effect",
            "optim_target_modules (GaLore) has no effect with base_optimizer='muon', which updates whole matrices. Leave "
            "out one of these two arguments.",
        )
    GaloreArguments.parse(args.optim_args)


def target_parameters(model: nn.Module, optim_target_modules: str | list[str]) -> dict[str, nn.Parameter]:
    """Return name → matrix for the matrices that GaLore projects: trainable two-dimensional `weight`s of matching modules.

    A list matches a module if the module's name contains one of the strings, or matches one of them in full as a regular
    expression. A single string must match the name in full; "all-linear" means every `nn.Linear` and `Conv1D`. Embedding
    tables are never projected, even if a linear layer shares them.

    Raises:
        ValueError: If no module with a trainable matrix matches.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    matrices = {
        name: weight
        for name, module in model.named_modules()
        # Only the module's own parameters are read, because `weight` of a PEFT layer is a property that returns the weight
        # of the frozen layer.
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
            f"such a matrix are: {shown}. Give a list of names or parts of names (a single string must match a whole name), "
            "or 'all-linear', or leave it out.",
        )
    # A matrix that several modules share has only one name among the parameters, which may be the other module's.
    weights = {matrices[name] for name in matched}
    return {name: weight for name, weight in model.named_parameters() if weight in weights}
