"""What a run knows about its model, as the sections of a model card: privacy first, then loading, model, results, training.

What it does not know is left out. Lists rather than tables, so that a phone shows whole lines.

Privacy: everything here is the ledger's, the arguments', a name or a shape of the model or the data set, or comes from the
logs of the training, where no raw loss is kept. The number of records is public; how many rows a user has is not said.
"""

import contextlib
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modelcard import TASK_MAPPING, extract_hyperparameters_from_trainer

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.ledger.terms import account_in_words, claim_in_words, not_covered_in_words
from doppler_hf.run.optimizer import optimizer_in_words
from doppler_hf.run.precision import computes_in_bf16
from doppler_hf.run.private_run import PrivateRun
from doppler_hf.run.reporting.published_results import Evaluation, published_results
from doppler_hf.run.saving.model_card import HEADING, is_hub_id
from doppler_hf.run.saving.training_curve import PICTURE_NAME
from doppler_hf.run.weights.config_differences import config_differences

# How `datasets` has read rows, which does not say what they are.
_BUILDERS: Final = {
    "arrow", "audiofolder", "csv", "default", "generator", "hdf5", "imagefolder", "json", "pandas", "parquet", "pdffolder",
    "spark", "sql", "text", "videofolder", "webdataset", "xml",
}  # fmt: skip
_MOST_EVALUATIONS: Final = 10
TAGS: Final = ["differential-privacy", "doppler_hf"]
_ROUNDING: Final = (
    "the rounding of bfloat16, if {}records have different lengths and are padded to the longest of their micro-batch"
)
# A ledger alone does not say in which precision its run computed.
ROUNDING_IF_ANY: Final = _ROUNDING.format("the training computed in it, ")
# What loads each kind of `processing_class`, by the name of a base class: a video processor is an image processor, too.
_LOADERS: Final = {
    "ProcessorMixin": ("processor", "AutoProcessor"),
    "PreTrainedTokenizerBase": ("tokenizer", "AutoTokenizer"),
    "BaseVideoProcessor": ("video_processor", "AutoVideoProcessor"),
    "ImageProcessingMixin": ("image_processor", "AutoImageProcessor"),
    "FeatureExtractionMixin": ("feature_extractor", "AutoFeatureExtractor"),
}


def written_part(run: PrivateRun, trainer: Any, folder: Path) -> str:
    """Return what a run writes into the card of a model in a folder."""
    assert run.ledger is not None
    sections = [
        privacy_section(run.ledger, also_not_covered=uncovered_rounding(run, trainer.model)),
        loading_section(trainer, folder, why_not_loaded=run.why_not_loaded),
        model_section(run, trainer),
        results_section(run, trainer, folder),
        training_section(run, trainer),
        software_section(trainer.model),
    ]
    return "\n".join(section for section in sections if section)


def uncovered_rounding(run: PrivateRun, model: nn.Module) -> list[str]:
    """Return what ε does not cover of rounding: in bfloat16, how a row is rounded if its neighbours decide on its padding.

    # Privacy: this follows from precision, collator and columns, and not from how long records are, since it is published.
    """
    is_rounded = computes_in_bf16(model, run.mixed_precision) and not run.pads_each_row_alone
    if not is_rounded or (run.sampler.lengths is None and run.probe.are_of_one_length):
        return []
    return [_ROUNDING.format("")]


def privacy_section(ledger: PrivacyLedger, *, also_not_covered: Sequence[str] = ()) -> str:
    """Return what is guaranteed, what is not, how to verify it, and all terms.

    `also_not_covered` is what the ledger does not know.
    """
    lines = [
        HEADING,
        "",
        claim_in_words(ledger).replace("Not differentially private", "**Not differentially private**"),
        "",
        *(
            ["ε covers the weights saved here, and whatever is computed from them.", ""]
            if ledger.why_not_private is None
            else []
        ),
        "Not covered by ε:",
        "",
        *(f"- {line}" for line in (*not_covered_in_words(ledger), *also_not_covered)),
        "",
        "### How to verify it",
        "",
        f"`doppler-hf verify` recomputes ε from `{LEDGER_NAME}`, which is beside the model, and checks that this ledger "
        "belongs to these weights. Run it in this folder:",
        "",
        *fenced("sh", "doppler-hf verify ."),
        "",
        "The last hash of the ledger, for `--head`, is",
        "",
        f"    {ledger.head}",
        "",
        "### Terms of the guarantee",
        "",
        *(f"- **{name}**: {value}" for name, value in account_in_words(ledger)),
    ]
    return "\n".join(lines) + "\n"


def fenced(language: str, *lines: str) -> list[str]:
    """Return lines as a block of code."""
    return [f"```{language}", *lines, "```"]


def base_of(model: Any) -> Any:
    """Return the model within an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def base_name(model: Any) -> str:
    """Return the name of the weights with which the training began: on the hub, or that of a folder; "" if unknown.

    A module of the user's own has the name of its part that is a model of Transformers, if all such parts have one name.
    """
    base = base_of(model)
    known = [base] if hasattr(base, "config") else [part for part in base.modules() if isinstance(part, PreTrainedModel)]
    names = {str(getattr(each.config, "_name_or_path", "") or "") for each in known}
    return names.pop() if len(names) == 1 else ""


def shown_name(name: str) -> str:
    """Return a name as a card may have it: of a folder on this machine its last part alone."""
    return name if is_hub_id(name) else Path(name).name


def hub_name(trainer: Any) -> str | None:
    """Return the name under which the model is on the hub, if the run puts it there."""
    args = trainer.args
    return getattr(trainer, "hub_model_id", None) or args.hub_model_id if args.push_to_hub or args.hub_model_id else None


def loading_section(trainer: Any, folder: Path, *, why_not_loaded: str = "") -> str:
    """Return a snippet that loads the model: an adapter on its base, a model of Transformers, or one of the user's own."""
    model = trainer.model
    # A checkpoint has another name on the hub than the model, if it is there at all.
    where = hub_name(trainer) if folder.resolve() == Path(trainer.args.output_dir).resolve() else None
    lines = [f'folder = "{where}"'] if where else ['folder = "."  # the folder of this card']
    said: list[str] = []
    kind = type(base_of(model))
    is_known = getattr(transformers, kind.__name__, None) is kind
    how = kind.__name__ if is_known else f"{kind.__module__}.{kind.__name__}"
    name = base_name(model)
    imports: list[str] = []
    processor = loader_of(trainer.processing_class)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        named = shown_name(name)
        if is_known and name:
            config = base_of(model).config
            options = {**labels_of_head(base_of(model)), **changes_of_base(config, name)}
            given = "".join(f", {option}={value!r}" for option, value in options.items())
            imports = [f"from transformers import {kind.__name__}"]
            lines.append(f'base = {kind.__name__}.from_pretrained("{named}"{given})')
            size = getattr(config, "vocab_size", None)
            if size not in (None, getattr(own_config(config, name), "vocab_size", size)):  # for new tokens
                lines.append(f"base.resize_token_embeddings({size})")
            if not is_hub_id(name):
                said.append(f"`{named}` was a folder where the model was trained. Give yours.")
        else:
            said.append(f"Make `base`, a `{how}`, as in the training: its weights have no name by which to load them.")
        adapter = model.active_adapter if isinstance(model.active_adapter, str) else "default"
        # PEFT saves an adapter of another name in a folder of its own.
        within = "folder" if adapter == "default" else f'folder, subfolder="{adapter}"'
        imports.insert(0, "from peft import PeftModel")
        lines.append(f"model = PeftModel.from_pretrained(base, {within})")
    elif isinstance(model, PreTrainedModel):
        imports = [f"from {'transformers' if is_known else kind.__module__} import {kind.__name__}"]
        lines.append(f"model = {kind.__name__}.from_pretrained(folder)")
        if why_not_loaded:
            said.append(f"`{kind.__name__}.from_pretrained` does not restore this model: {why_not_loaded}.")
            said.append("Make `model` as in the training, and load the weights of this folder into it.")
            lines.pop()
        if kind.__module__ == "__main__":
            said.append(f"`{kind.__name__}` is a class of the training script: import it from there.")
            imports = []
    else:
        said.append(f"Make `model`, a `{kind.__name__}`, as in the training.")
        imports = ["from safetensors.torch import load_model"]
        lines = [*(lines if processor else []), 'load_model(model, "model.safetensors")']
    if processor is not None:
        imports.append(f"from {processor.module} import {processor.loader}")
        lines.append(f"{processor.name} = {processor.loader}.from_pretrained(folder)")
        if processor.module == "__main__":
            said.append(f"`{processor.loader}` is a class of the training script: import it from there.")
            imports.pop()
    imports = joined_imports(imports)
    said = [*said, ""] if said else []
    return "\n".join(["## How to load it", "", *said, *fenced("python", *imports, "", *lines), ""])


class Loader(NamedTuple):
    """What loads a tokenizer, processor or the like: a name for it, and a class with its module."""

    name: str
    module: str
    loader: str


def loader_of(processor: Any) -> Loader | None:
    """Return what loads a trainer's `processing_class`: one of Transformers' Auto classes, or a class of the user's own."""
    kind = type(processor)
    bases = {each.__name__ for each in kind.__mro__}
    for base, (name, loader) in _LOADERS.items():
        if base in bases:
            is_known = kind.__module__.startswith("transformers.")
            return Loader(name, "transformers", loader) if is_known else Loader(name, kind.__module__, kind.__name__)
    return None


def labels_of_head(model: Any) -> dict[str, Any]:
    """Return the option of `from_pretrained` that gives a new head its outputs, with their names if they have any."""
    if not classifies(model):
        return {}
    names: dict[int, str] = model.config.id2label
    if all(name == f"LABEL_{number}" for number, name in names.items()):
        return {"num_labels": model.config.num_labels}
    return {"id2label": names}


def changes_of_base(config: Any, name: str) -> dict[str, Any]:
    """Return the options of `from_pretrained` with which the base was changed, such as fewer layers, if they can be read."""
    own, simple = own_config(config, name), (bool, int, float, str, type(None))
    return {
        option: value
        for option, value, _ in (() if own is None else config_differences(config, own))
        if isinstance(value, simple) and option.isidentifier() and not option.startswith("_")
    }


def own_config(config: Any, name: str) -> Any:
    """Return the base's own configuration, read from its folder or from the cache of the hub; None if it is in neither."""
    with contextlib.suppress(OSError, ValueError):
        return type(config).from_pretrained(name, local_files_only=True)
    return None


def joined_imports(imports: list[str]) -> list[str]:
    """Return imports with one line for each module."""
    names: dict[str, list[str]] = {}
    for line in imports:
        _, module, _, name = line.split()
        names.setdefault(module, []).append(name)
    return [f"from {module} import {', '.join(sorted(each))}" for module, each in names.items()]


def classifies(model: Any) -> bool:
    """Return whether a model has a head with one output for each label."""
    return "Classification" in type(model).__name__ and hasattr(model.config, "num_labels")


def hub_task_of(model: Any) -> str | None:
    """Return the hub's name of a model's task, by Transformers' own table; None if it has none there."""
    name = type(base_of(model)).__name__
    for task, models in TASK_MAPPING.items():
        names = models.values() if hasattr(models, "values") else ()
        if any(name == each or (isinstance(each, tuple) and name in each) for each in names):
            return task
    return None


def dataset_name(dataset: Any) -> str | None:
    """Return the name of a data set of `datasets`, with its configuration; None for files, lists and the like."""
    info = getattr(dataset, "info", None)
    name = getattr(info, "dataset_name", None)
    if not name or name in _BUILDERS:
        return None
    config = getattr(info, "config_name", None)
    return name if config in (None, "default", name) else f"{name} ({config})"


def dataset_on_hub(dataset: Any) -> str | None:
    """Return the hub's name of a data set, which `datasets` keeps in the addresses of its files; None if there are none."""
    for address in getattr(getattr(dataset, "info", None), "download_checksums", None) or ():
        if str(address).startswith("hf://datasets/"):
            name = str(address).removeprefix("hf://datasets/").partition("@")[0]
            return name if is_hub_id(name) else None
    return None


def model_section(run: PrivateRun, trainer: Any) -> str:
    """Return base model, task, what was trained, and on which data."""
    assert run.ledger is not None
    model, statement, dataset = trainer.model, run.ledger.statement, run.train_dataset
    name = base_name(model)
    sizes = {parameter: parameter.numel() for parameter in model.parameters()}
    trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    kinds = sorted({config.peft_type.value for config in getattr(model, "peft_config", {}).values()})
    what = f"adapter {', '.join(kinds)}, " if kinds else ""
    task = hub_task_of(model)
    units = f"{statement.num_units:,} {statement.noun}s"
    data = dataset_on_hub(dataset)
    linked = dataset_name(dataset) if data is None else f"[{data}](https://huggingface.co/datasets/{data})"
    facts = {
        "base model": (f"[{name}](https://huggingface.co/{name})" if is_hub_id(name) else f"`{shown_name(name)}`")
        if name
        else None,
        "class": f"`{type(base_of(model)).__name__}`",
        "task": task and task.replace("-", " "),
        "trained": f"{what}{trained:,} of {sum(sizes.values()):,} parameters" if trained else None,
        "training data": f"{linked}, {units}" if linked else units,
    }
    return "\n".join(["## The model", "", *(f"- **{name}**: {value}" for name, value in facts.items() if value), ""])


def results_section(run: PrivateRun, trainer: Any, folder: Path) -> str:
    """Return the results of the weights, the evaluations in the training, and its picture, as far as there are any."""
    published = published_results(trainer)
    has_picture = run.has_picture and (folder / PICTURE_NAME).exists()
    picture = [f"![Results over the steps of the training]({PICTURE_NAME})", ""] if has_picture else []
    if published.of_weights is None and not picture:
        return ""
    lines = ["## Results", ""]
    if published.of_weights is not None:
        step, results = published.of_weights.step, published.of_weights.results
        if published.is_chosen:
            went_on = f"; the training went on to step {last:,}" if (last := trainer.state.global_step) > step else ""
            lines += [f"The weights are those of step {step:,}, chosen by `{published.best_by}`{went_on}.", ""]
        lines += [f"On the evaluation data, after step {step:,}:", ""]
        lines += [f"- **{name.replace('_', ' ')}**: {number(value)}" for name, value in results.items()] + [""]
    lines += picture
    shown = evenly(published.evaluations, _MOST_EVALUATIONS)
    if len(shown) > 1:
        names = [*published.losses()[:1], *published.main_metrics()[:1]]
        lines += ["| step | " + " | ".join(name.replace("_", " ") for name in names) + " |", "|--:" * (len(names) + 1) + "|"]
        lines += [f"| {each.step:,} | {' | '.join(number(each.results.get(name)) for name in names)} |" for each in shown]
        lines.append("")
    return "\n".join(lines)


def evenly(values: Sequence[Evaluation], count: int) -> Sequence[Evaluation]:
    """Return at most so many of the values, from the first to the last."""
    if len(values) <= count:
        return values
    return [values[(len(values) - 1) * index // (count - 1)] for index in range(count)]


def number(value: float | None) -> str:
    """Return a result as a card has it; empty for none."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def training_section(run: PrivateRun, trainer: Any) -> str:
    """Return the trainer and its arguments, with learning rate, optimizer and filter in place of Transformers' own."""
    values = extract_hyperparameters_from_trainer(trainer)
    optimizer = f"{optimizer_in_words(trainer.args)}, of doppler_hf; filter: {run.words['filter']}"
    values |= {"learning_rate": run.words["rate"], "optimizer": optimizer}
    lines = [f"- trainer: {type(trainer).__name__}", *(f"- {name}: {value}" for name, value in values.items())]
    return "\n".join(["## Training arguments", "", *lines, ""])


def software_section(model: nn.Module) -> str:
    """Return the versions of the packages by which the model is loaded; the ledger's are among its terms."""
    names = {"Transformers": transformers.__version__, "PyTorch": torch.__version__}
    if hasattr(model, "peft_config"):
        # PEFT adds this line under the heading where it is missing, so it is written in PEFT's own form.
        names = {"PEFT": version("peft"), **names}
    return "\n".join(["### Framework versions", "", *(f"- {name} {value}" for name, value in names.items()), ""])


def metadata_of(run: PrivateRun, trainer: Any) -> dict[str, object]:
    """Return what the run knows for the card's front matter, which the hub reads."""
    model = trainer.model
    name, data = base_name(model), dataset_on_hub(run.train_dataset)
    of_weights = published_results(trainer).of_weights
    known = {"accuracy", "f1", "precision", "recall", "matthews_correlation", "pearson", "spearmanr", "perplexity", "rouge"}
    metrics = [name for name in (of_weights.results if of_weights else ()) if name in known]
    return {
        "library_name": "peft" if hasattr(model, "peft_config") else "transformers",
        "base_model": name if is_hub_id(name) else None,
        "pipeline_tag": hub_task_of(model),
        "datasets": [data] if data else None,
        "metrics": metrics,
        "tags": TAGS,
    }
