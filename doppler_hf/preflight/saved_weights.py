"""Check that the saved files will hold the trained model, and that they can be loaded again.

PEFT saves adapters and `modules_to_save`, and nothing else. Weights that were unfrozen by hand would be trained, paid for
with ε, and lost. A new head that is frozen is in no file either, so a loaded adapter would get a different random head.
"""

import copy
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import ADAPTER_CONFIG_NAME

from doppler_hf.errors import Refusal
from doppler_hf.privacy.losses import without_adapters
from doppler_hf.run.own_code import overrides
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.saving.renamed_weights import colliding_names

_HEADS: Final = ("classifier", "score")  # PEFT saves layers with these names if task_type is a classification
_LIBRARIES: Final = ("transformers", "peft", "doppler_hf", "torch")


def refuse_unsaved_weights(run: PrivateRun, trainer: Any) -> None:
    """Refuse trained weights, and new frozen weights next to adapters, that no saved file would hold."""
    model = trainer.model
    if is_saved_by_own_code(trainer):
        return
    adapters = saved_adapters(model)
    with run.unwatched():  # PEFT computes prompts when it saves them
        kept = _kept(model, adapters)
        named = dict(model.named_parameters())
        lost = {name: each for name, each in named.items() if each.requires_grad and id(each) not in kept}
        if lost and adapters and _has_embeddings(model, lost):
            # PEFT saves embeddings that were resized. To find out, it reads the base model's configuration, maybe on the
            # hub.
            kept |= _kept(model, adapters, save_embedding_layers="auto")
            lost = {name: each for name, each in lost.items() if id(each) not in kept}
    if lost:
        raise _lost(model, lost, adapters)
    if adapters:
        run.notes += [*_refuse_new_frozen(model, kept)]
        _refuse_unloadable_adapters(trainer, adapters)
        run.notes += [*_other_names_of_heads(model, adapters)]
    elif isinstance(model, PreTrainedModel) and (collided := colliding_names(model)):
        raise Refusal(
            "weights-not-saved",
            f"{type(model).__name__} is saved under names of an older version of Transformers, and {collided[0]!r} would "
            "get a name that another weight already has, so it would be lost. Rename that layer of the model.",
        )


def is_saved_by_own_code(trainer: Any) -> bool:
    """Return whether the user's own code saves the model, so that it is unknown what the files will hold."""
    saves_itself = getattr(type(trainer.model), "save_pretrained", None)
    is_known = saves_itself is None or saves_itself.__module__.partition(".")[0] in _LIBRARIES
    return not is_known or any(overrides(trainer, name) for name in ("save_model", "_save"))


def note_another_model_when_loaded(run: PrivateRun, trainer: Any) -> None:
    """Note a model that `from_pretrained` would not restore, because a layer was replaced after the model was made."""
    if trainer._sharding.is_cut or saved_adapters(trainer.model) or not isinstance(trainer.model, PreTrainedModel):
        return
    if why := why_not_loaded(trainer.model):
        run.why_not_loaded = why
        name = type(trainer.model).__name__
        run.notes.append(
            f"{name}.from_pretrained will not restore this model: {why}. Save its weights after train() with "
            "torch.save(trainer.model.state_dict(), 'weights.pt'). To load them, make the model in the same way as this "
            "one, and call model.load_state_dict(torch.load('weights.pt'))"
        )


def note_another_base(run: PrivateRun, trainer: Any) -> None:
    """Note a resumed adapter that was trained on a base model of another name.

    A base of the same shapes would be taken silently, and the adapter fits the base that it was trained on alone. The base
    itself is in no checkpoint, and it may be loaded in another precision, so only the names can be compared.
    """
    model, checkpoint = trainer.model, run.previous.checkpoint
    now = getattr(without_adapters(model), "name_or_path", None)
    if checkpoint is None or not now:
        return
    for name in saved_adapters(model):
        file = Path(checkpoint, *([] if name == "default" else [name]), ADAPTER_CONFIG_NAME)
        before = json.loads(file.read_text("utf-8")).get("base_model_name_or_path") if file.is_file() else None
        if before and Path(before).name != Path(now).name:  # the same model may lie in another folder, or have another owner
            run.notes.append(
                f"the adapter in {checkpoint} was trained on the base model {before}, and this run continues it on {now}. "
                "If they are two models, stop here, and resume with the first one: the adapter does not fit another base"
            )
            return


def why_not_loaded(model: PreTrainedModel) -> str | None:
    """Return how a model made from the same class and configuration would differ, or None if it would not."""
    if getattr(model, "is_quantized", False):
        return None
    try:
        # The meta device computes nothing. Draws on the CPU, as of Wav2Vec2's mask, are taken back.
        with torch.device("meta"), no_init_weights(), torch.random.fork_rng([]), warnings.catch_warnings(action="ignore"):
            made = type(model)(copy.deepcopy(model.config))
    except TypeError:
        return "its class needs more arguments than a configuration"
    except Exception:  # the user's own code may need a real device
        return None
    own, theirs = dict(_with_weights(model)), dict(_with_weights(made))
    for name in [*theirs, *own]:
        if name not in own or name not in theirs:
            where = "has" if name in own else "does not have"
            return f"it {where} a layer {name!r}, unlike a new {type(model).__name__}"
    for name in own:
        if (kind := _kind(own[name])) != (other := _kind(theirs[name])):
            return f"{name!r} is a {_words(kind)}, but would be a {_words(other)}"
        if _shapes(own[name]) != _shapes(theirs[name]):
            return f"{name!r} would have weights of a different shape"
    return None


def _with_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that have weights or saved buffers of their own, or a parametrization that computes them."""
    return (
        (name, module) for name, module in model.named_modules() if _shapes(module) or parametrize.is_parametrized(module)
    )


def _kind(module: nn.Module) -> list[type]:
    """Return the class of a layer, or of all that computes a parametrized weight."""
    if isinstance(module, parametrize.ParametrizationList):
        return [type(each) for each in module]
    # Torch makes a new class for each parametrized layer, so the class before that is compared.
    return [parametrize.type_before_parametrizations(module)]


def _words(kinds: list[type]) -> str:
    return " and a ".join(kind.__name__ for kind in kinds)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    saved = {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return {name: each.shape for name, each in (module._parameters | saved).items() if each is not None}


def saved_adapters(model: Any) -> list[str]:
    """Return the adapters that are saved in place of the model, or an empty list if the whole model is saved."""
    if not hasattr(model, "peft_config"):
        return []
    if isinstance(model, PreTrainedModel):  # after `add_adapter`, Transformers saves the first active adapter
        return [*model.active_adapters()][:1] if model._hf_peft_config_loaded else []
    return [*model.peft_config]


def _kept(model: nn.Module, adapters: list[str], *, save_embedding_layers: Any = False) -> set[int]:
    """Return the identities of the tensors that a saved model would hold."""
    state = model.state_dict(keep_vars=True)
    if not adapters:
        ignored = [*(getattr(model, "_keys_to_ignore_on_save", None) or ())]
        kept = {id(each) for name, each in state.items() if not any(re.search(key, name) for key in ignored)}
        return kept
    from peft import get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    kept = set()
    for adapter in adapters:
        with warnings.catch_warnings(action="ignore"):
            saved = get_peft_model_state_dict(
                model, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=save_embedding_layers
            )
        kept |= {id(each) for each in saved.values()}
    # Some adapters are saved as a tensor that is computed from their weights.
    prompts = getattr(model, "prompt_encoder", None)
    parts = [prompts[name] for name in adapters if name in prompts] if isinstance(prompts, nn.ModuleDict) else []
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for attribute in layer.adapter_layer_names:
                of_each = getattr(layer, attribute, None)
                if isinstance(of_each, nn.ModuleDict | nn.ParameterDict):
                    parts += [of_each[name] for name in adapters if name in of_each]
    for part in parts:
        kept |= {id(each) for each in ([part] if isinstance(part, Tensor) else part.parameters())}
    return kept


def _has_embeddings(model: Any, named: dict[str, Tensor]) -> bool:
    try:
        tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (NotImplementedError, AttributeError):
        return False
    of_tables = {id(each) for table in tables if isinstance(table, nn.Module) for each in table.parameters()}
    return any(id(each) in of_tables for each in named.values())


def _lost(model: nn.Module, lost: dict[str, Tensor], adapters: list[str]) -> Refusal:
    places = outermost_modules(model, {*lost})
    first = _listed(places)
    if not adapters:
        return Refusal(
            "weights-not-saved",
            f"The weights {first} would be trained but not saved, because {type(model).__name__} leaves them out of its "
            "saved state. Remove them from _keys_to_ignore_on_save, or freeze them with requires_grad_(False).",
        )
    others = [name for name in getattr(model, "peft_config", {}) if name not in adapters]
    if others and all(any(f".{name}" in place for name in others) for place in places):
        return Refusal(
            "weights-not-saved",
            f"The weights {first} would be trained but not saved, because Transformers saves only the adapter "
            f"{adapters[0]!r}. Train one adapter at a time, or attach the adapters with peft.get_peft_model, which saves "
            "all of them.",
        )
    return Refusal(
        "weights-not-saved",
        f"The weights {first} would be trained but not saved: PEFT saves only adapters and modules_to_save, so the trained "
        f"weights would be lost after all of ε is spent. {adapter_fix(model, places)}, instead of calling "
        "requires_grad_(True).",
    )


def outermost_modules(model: nn.Module, names: set[str]) -> list[str]:
    """Return the outermost modules whose parameters are all among `names`, and the remaining single parameters."""
    all_names, found = [name for name, _ in model.named_parameters()], []
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            top = ".".join(parts[:end])
            if end == len(parts) or all(each in names for each in all_names if each.startswith(f"{top}.")):
                found.append(top)
                break
    return [*dict.fromkeys(sorted(found))]


def adapter_fix(model: nn.Module, places: list[str]) -> str:
    """Return in words which option of an adapter's configuration trains and saves these modules and parameters."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    kinds = {type(config).__name__: hasattr(config, "modules_to_save") for config in configs.values()}
    if other := next((kind for kind, takes_them in kinds.items() if not takes_them), None):
        more = " and trainable_token_indices" if other == "TrainableTokensConfig" else ""
        return f"{other} trains and saves no other layers. Use LoraConfig, which has modules_to_save" + more
    parameters = dict(model.named_parameters())
    inner = [without_prefix(model, place) for place in places]
    if all(place in parameters and place.endswith("bias") for place in places):
        return "Set bias='all' in the adapter's configuration"
    wanted = {each.rpartition(".")[0] if place in parameters else each for place, each in zip(places, inner, strict=True)}
    names = [without_prefix(model, name) for name, _ in model.named_modules()]
    short: list[str] = []
    for each in sorted(wanted):
        last = each.rpartition(".")[-1]
        # PEFT matches the ends of names.
        matched = {name for name in names if name.endswith(last)}
        is_exact = all(any(name == one or name.startswith(f"{one}.") for one in wanted) for name in matched)
        short.append(last if is_exact and not last.isdigit() else each)
    return f"Set modules_to_save={[*dict.fromkeys(short)]} in the adapter's configuration"


def without_prefix(model: nn.Module, name: str) -> str:
    """Return a name in an adapted model as it is in the base model."""
    return name.removeprefix("base_model.model.").removeprefix("base_model.") if hasattr(model, "base_model") else name


def _listed(places: list[str]) -> str:
    more = f" and {len(places) - 2} others" if len(places) > 2 else ""
    return " and ".join(map(repr, places[:2])) + more if not more else f"{places[0]!r}, {places[1]!r}{more}"


def _refuse_new_frozen(model: nn.Module, kept: set[int]) -> list[str]:
    """Refuse new weights of the base model that are neither trained nor saved; return a note if all weights are new."""
    base = without_adapters(model)
    ours = {id(each) for each in base.parameters()}
    left = {
        name: each
        for name, each in model.named_parameters()
        if id(each) in ours and id(each) not in kept and each.is_floating_point()
    }
    is_loaded = {name: getattr(each, "_is_hf_initialized", False) for name, each in left.items()}
    if not isinstance(base, PreTrainedModel):
        # A module of the user's own around a model of Transformers: its own weights may come from a file of the user's.
        return _frozen_head(
            model, {name for name, was_read in is_loaded.items() if not was_read} if any(is_loaded.values()) else set()
        )
    # Transformers marks each tensor that it reads from a file. Models that were copied or made from a configuration have no
    # marks.
    if not any(is_loaded.values()) and left and not base.name_or_path:
        return [
            "the base model of the adapters was made from a configuration and is in no file. Save it with save_pretrained "
            "before you attach the adapters, or nobody can use them later"
        ]
    if sum(is_loaded.values()) * 2 < len(is_loaded):
        # The marks are lost, as in a copy, so that values must tell.
        return _frozen_head(model, {name for name in left if _looks_new(model, base, name)})
    # Weights such as tables of sines are computed and need no file.
    made = [*(base._keys_to_ignore_on_load_missing or ()), *(base._keys_to_ignore_on_save or ())]
    wrapped = re.compile(r"\.original_module\.")  # PEFT's original of a module whose copy is trained and saved
    new = {
        name
        for name, was_read in is_loaded.items()
        if not was_read and not wrapped.search(name) and not any(re.search(key, name) for key in made)
    }
    if new:
        places = outermost_modules(model, new)
        raise Refusal(
            "head-not-saved",
            f"The weights {_listed(places)} are new and random, and would be neither trained nor saved: a loaded adapter "
            f"would get different random weights there. {adapter_fix(model, places)}" + _task_type(model, places),
        )
    return []


def _looks_new(model: nn.Module, base: PreTrainedModel, name: str) -> bool:
    """Return whether a weight belongs to a head below which nothing was trained: its layer's bias is still 0 everywhere."""
    inner = without_prefix(model, name)
    layer = model.get_submodule(name.rpartition(".")[0])
    bias = getattr(layer, "bias", None)
    is_of_head = (
        bool(base.base_model_prefix) and base.base_model is not base and not inner.startswith(f"{base.base_model_prefix}.")
    )
    return is_of_head and isinstance(layer, nn.Linear) and isinstance(bias, Tensor) and not bias.any()


def _frozen_head(model: nn.Module, names: set[str]) -> list[str]:
    """Return a note on weights that are probably new and random, and neither trained nor saved."""
    if not names:
        return []
    places = outermost_modules(model, names)
    return [
        f"The weights {_listed(places)} seem to be new and random, and are neither trained nor saved with the "
        f"adapter. If they are new, stop here: {adapter_fix(model, places)}" + _task_type(model, places).removesuffix(".")
    ]


def _task_type(model: nn.Module, places: list[str]) -> str:
    ends = all(place.rpartition(".")[-1] in _HEADS for place in places)
    has_type = any(getattr(config, "task_type", None) for config in getattr(model, "peft_config", {}).values())
    kind = "TOKEN_CLS" if "Token" in type(without_adapters(model)).__name__ else "SEQ_CLS"
    return f", or task_type={kind!r}, which does the same." if ends and not has_type else "."


def _refuse_unloadable_adapters(trainer: Any, adapters: list[str]) -> None:
    """Refuse a best model, or a resume, that Transformers and PEFT cannot load into these adapters."""
    model, args = trainer.model, trainer.args
    if isinstance(model, PreTrainedModel):
        return  # the rehearsal of the checkpoint refuses these
    prompts = getattr(model, "prompt_encoder", None)
    parts = [prompts[name] for name in adapters if name in prompts] if isinstance(prompts, nn.ModuleDict) else []
    is_computed = any(len([*part.parameters()]) > 1 for part in parts)
    is_resumed = trainer.privacy.previous.checkpoint is not None
    if is_computed and (is_resumed or args.load_best_model_at_end):
        asked = "resume_from_checkpoint" if is_resumed else "load_best_model_at_end"
        raise Refusal(
            "prompt-not-loaded",
            f"{asked} does not work with a prompt that an encoder computes: PEFT saves the computed prompt without the "
            "encoder that was trained, so the run cannot continue from it. Use PromptTuningConfig, or PrefixTuningConfig "
            "without prefix_projection" + (", or leave load_best_model_at_end out." if not is_resumed else "."),
        )
    if args.load_best_model_at_end:
        trained = [name for name in adapters if _is_trained(model, name)]
        if trained != ["default"]:
            raise Refusal(
                "best-adapter-not-loaded",
                f"load_best_model_at_end can only load an adapter named 'default'; this run trains the adapter "
                f"{', '.join(map(repr, trained)) or 'of another name'}. Call get_peft_model without adapter_name, or leave "
                "load_best_model_at_end out.",
            )


def _is_trained(model: nn.Module, adapter: str) -> bool:
    ends = re.compile(rf"\.{re.escape(adapter)}(\.|$)")
    return any(each.requires_grad and ends.search(name) for name, each in model.named_parameters())


def _other_names_of_heads(model: Any, adapters: list[str]) -> Iterator[str]:
    """Yield notes on layers that PEFT trains in full only because their names end like a head's."""
    if "peft" not in sys.modules:
        return
    from peft.utils.other import ModulesToSaveWrapper

    wanted = {name for adapter in adapters for name in getattr(model.peft_config[adapter], "modules_to_save", None) or ()}
    for name, module in model.named_modules():
        last = name.rpartition(".")[-1]
        if isinstance(module, ModulesToSaveWrapper) and last not in wanted and not any("." in each for each in wanted):
            yield f"{last!r} is trained in full next to the adapter, because its name ends like one of modules_to_save"
