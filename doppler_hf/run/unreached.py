"""Trained parameters that no loss reaches, which noise alone would move: their user decides, before anything is spent."""

from collections.abc import Set

from torch import nn

from doppler_hf.privacy.autograd_check.plain_autograd import Losses, gradients_of
from doppler_hf.privacy.batching.probe import Inputs, Probe
from doppler_hf.privacy.clipping.refused_layers import listed


def reached_by(inputs: Inputs, model: nn.Module, losses_of: Losses, *, names: Set[str]) -> set[str]:
    """Return those of some trained parameters that the losses of a batch reach in training, with dropout and all else."""
    model.train()
    return {*gradients_of(losses_of(inputs), {name: model.get_parameter(name) for name in names})}


def refuse_unreached(model: nn.Module, losses_of: Losses, probe: Probe, *, unreached: Set[str]) -> None:
    """Refuse trained parameters that no loss reaches: noise alone would move them.

    Args:
        model: The model.
        losses_of: As in `check_before_training`.
        probe: Examples of the training set, of which more are looked at, such as for experts that few of them reach.
        unreached: Names of parameters that the losses of the compared examples do not reach.

    Raises:
        ValueError: If there are others.
    """
    never = {*unreached}
    for inputs in probe.further():
        never -= reached_by(inputs, model, losses_of, names=never)
        if not never:
            break
    if never:
        tops = sorted({_top_of(model, name, never) for name in never})
        lines = "; ".join(f"trainer.model.get_{kind}({name!r}).requires_grad_(False)" for name, kind in tops)
        raise ValueError(
            f"Trained parameters must be reached by a loss, got {listed(name for name, _ in tops)}, which no loss reaches: "
            f"noise alone would move them. Freeze them before trainer.train(): {lines}. Or set "
            "train_unreached_parameters=True."
        )


def _top_of(model: nn.Module, name: str, never: Set[str]) -> tuple[str, str]:
    """Return the outermost module around a parameter of which no trained one is reached, or the parameter itself."""
    trained = [other for other, parameter in model.named_parameters() if parameter.requires_grad]
    parts = name.split(".")
    for end in range(1, len(parts)):
        prefix = ".".join(parts[:end])
        if all(other in never for other in trained if other.startswith(f"{prefix}.")):
            return prefix, "submodule"
    return name, "parameter"
