"""Which models train privately with which adapters and in which precision, and why not where they do not.

    python -m scripts.experiments.compatibility > recipes/results/compatibility.md

Every flow trains a tiny model of random weights on random examples for two private steps on the CPU, with all checks. It
trains, is refused in one line, or is a defect: then the script ends with its traceback.
"""

import contextlib
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import peft
import torch
import transformers
from opacus.validators import ModuleValidator
from torch import Tensor, nn

import doppler_hf
from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.errors import Refusal
from scripts.experiments.tiny_models import examples_of, padded, tiny_model
from scripts.training.arguments import one_line_errors, parse_args

MODELS: Final = (
    "BertForSequenceClassification", "RobertaForSequenceClassification", "DistilBertForSequenceClassification",
    "AlbertForSequenceClassification", "ElectraForSequenceClassification", "DebertaV2ForSequenceClassification",
    "DebertaV2ForSequenceClassification, as released",
    "ModernBertForSequenceClassification", "XLMRobertaForSequenceClassification", "MPNetForSequenceClassification",
    "BartForSequenceClassification", "LlamaForSequenceClassification", "GPT2ForSequenceClassification",
    "BertForTokenClassification", "DebertaV2ForTokenClassification", "BertForQuestionAnswering",
    "RobertaForQuestionAnswering", "BertForMultipleChoice", "RobertaForMultipleChoice",
    "BertForMaskedLM", "ModernBertForMaskedLM",
    "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "LlamaForCausalLM", "MistralForCausalLM",
    "Qwen3ForCausalLM", "Gemma3ForCausalLM", "SmolLM3ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM",
    "MambaForCausalLM",
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "WhisperForConditionalGeneration",
    "ViTForImageClassification", "DeiTForImageClassification", "BeitForImageClassification", "Dinov2ForImageClassification",
    "SwinForImageClassification", "ConvNextForImageClassification", "ResNetForImageClassification",
    "SegformerForSemanticSegmentation", "VideoMAEForVideoClassification",
    "Wav2Vec2ForSequenceClassification", "Wav2Vec2ForCTC", "HubertForCTC", "ASTForAudioClassification",
    "ResNetForImageClassification, fixed", "SegformerForSemanticSegmentation, fixed",
    "Wav2Vec2ForSequenceClassification, fixed", "Wav2Vec2ForCTC, fixed", "HubertForCTC, fixed",
)  # fmt: skip
FIXED: Final = ", fixed"
# Where they differ from the config's defaults in what decides; versions 2 and 3 of Microsoft's.
RELEASED: Final = ", as released"
RELATIVE: Final = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}  # fmt: skip
TRAINS: Final = "✓"
NOT_OURS: Final = ("PEFT: ", "Transformers: ")
# In the place of ways in which models do not train: none of them, and each.
NOTHING, ALL = "nothing: each way trains", "each way"
# They are trained as they are, beside adapters too.
HEADS: Final = r"(.*\.)?(pre_classifier|classifier|score|qa_outputs)(\..*)?"
# PEFT's name of a task, by the end of a class's name.
TASKS: Final[Mapping[str, str]] = {
    "SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS", "QuestionAnswering": "QUESTION_ANS",
    "CausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ConditionalGeneration": "SEQ_2_SEQ_LM",
}  # fmt: skip


@dataclass
class CompatibilityArguments:
    """The settings of the table."""

    models: list[str] = field(
        default_factory=list, metadata={"help": "Names of model classes; by default all of the table."}
    )
    ways: list[str] = field(default_factory=list, metadata={"help": "Columns of the table; by default all."})


class NotOfPeft(Exception):
    """PEFT has no such adapter for a model."""


# --- the columns ----------------------------------------------------------------------------------------------------------


def peft_task_of(model: Any) -> str | None:
    """Return PEFT's name of the task, or None."""
    # With a task PEFT passes `input_ids`, which are features here.
    if model.main_input_name != "input_ids":
        return None
    return next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None)


def adapted(model: Any, config: type, **options: Any) -> nn.Module:
    """Return a model with adapters.

    Raises:
        NotOfPeft: If PEFT has none for it.
    """
    task = peft_task_of(model)
    if issubclass(config, peft.PromptLearningConfig) and task not in TASKS.values():
        raise NotOfPeft("it has prompts for texts and their usual tasks alone")
    try:
        return peft.get_peft_model(model, config(task_type=task, **options))
    except Exception as error:
        raise NotOfPeft(" ".join(str(error).split())) from error


def only(model: nn.Module, is_trained: Callable[[str], bool]) -> nn.Module:
    """Return a model of which some parameters are trained, by their names."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    return model


def biases(model: nn.Module) -> nn.Module:
    """Return a model of which biases and head are trained."""
    return only(
        model, lambda name: name.endswith("bias") or bool(re.match(r"(classifier|score|qa_outputs|pre_classifier)", name))
    )


def lora(model: nn.Module) -> nn.Module:
    """Return a model with LoRA on all linear layers."""
    return adapted(model, peft.LoraConfig, r=4, target_modules="all-linear", exclude_modules=HEADS)


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
        change: What is done to the model.
        options: Training arguments.
    """

    change: Callable[[Any], nn.Module] = lambda model: model
    options: Mapping[str, Any] = field(default_factory=dict)


WAYS: Final[Mapping[str, Way]] = {
    "all weights": Way(),
    "bf16": Way(options={"bf16": True}),
    "checkpointing": Way(options={"gradient_checkpointing": True}),
    "LoRA": Way(lora),
    "LoRA in bf16": Way(lora, {"bf16": True}),
    "DoRA": Way(
        lambda model: adapted(model, peft.LoraConfig, r=4, use_dora=True, target_modules="all-linear", exclude_modules=HEADS)
    ),
    "IA3": Way(lambda model: adapted(model, peft.IA3Config)),
    "prompts": Way(lambda model: adapted(model, peft.PromptTuningConfig, num_virtual_tokens=4)),
    "biases": Way(biases),
}


# --- a flow ---------------------------------------------------------------------------------------------------------------


def data_of(model: Any) -> list[dict[str, Tensor]]:
    """Return random examples for a model."""
    examples = examples_of(model)
    name = type(model).__name__
    if name.endswith("QuestionAnswering"):
        # The answer is the first two tokens.
        answers = {"start_positions": torch.tensor(0), "end_positions": torch.tensor(1)}
        return [{key: value for key, value in row.items() if key != "labels"} | answers for row in examples]
    if name.endswith("MultipleChoice"):
        rows = [{key: value[:6] for key, value in row.items() if key != "labels"} for row in examples]
        pairs = zip(rows, rows[1:] + rows[:1], strict=True)
        return [{key: torch.stack([one[key], two[key]]) for key in one} | {"labels": torch.tensor(0)} for one, two in pairs]
    return examples


def fixed(model: Any, examples: Sequence[dict[str, Tensor]]) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Do what the refusals say: replace BatchNorm; freeze positions by a convolution, mask nothing, pad to one length."""
    if any("BatchNorm" in type(module).__name__ for module in model.modules()):
        model = ModuleValidator.fix(model)  # it copies, which weight norm does not allow
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("pos_conv_embed" not in name and "masked_spec_embed" not in name)
    for owner in (model.config, *model.modules()):
        for option in ("mask_time_prob", "layerdrop"):
            if hasattr(owner, option):
                setattr(owner, option, 0.0)
    if "attention_mask" not in examples[0]:
        return model, list(examples)
    batch = padded(examples)
    padded_too = [{name: rows[index] for name, rows in batch.items() if name != "labels"} for index in range(len(examples))]
    return model, [row | {"labels": example["labels"]} for row, example in zip(padded_too, examples, strict=True)]


def train(model: nn.Module, examples: Sequence[dict[str, Tensor]], **options: Any) -> None:
    """Train for two private steps, with some more training arguments."""
    with tempfile.TemporaryDirectory() as folder:
        args = DopplerTrainingArguments(
            output_dir=folder, noise_multiplier=1.0, per_device_train_batch_size=4, max_steps=2, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, seed=0, **options,
        )  # fmt: skip
        DopplerTrainer(model=model, args=args, train_dataset=examples, data_collator=padded).train()


def is_ours(error: Exception) -> bool:
    """Return whether an error is a refusal of this package."""
    # Not by a name in the path: a clone's folder, with the environment in it, has the package's.
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, ValueError) and raised_in.is_relative_to(Path(doppler_hf.__file__).parent)


def outcome(name: str, way: Way) -> str:
    """Train a model in one way for two steps, and return `TRAINS` or why it is refused.

    Raises:
        Exception: If it is neither, which is a defect.
    """
    torch.manual_seed(0)
    kind = name.removesuffix(FIXED).removesuffix(RELEASED)
    model: Any = tiny_model(kind, **(RELATIVE if name.endswith(RELEASED) else {}))
    examples = data_of(model)
    if name.endswith(FIXED):
        model, examples = fixed(model, examples)
    try:
        changed = way.change(model)
    except NotOfPeft as error:
        return f"PEFT: {error}"
    try:
        train(changed, examples, **way.options)
    except (ValueError, NotImplementedError) as error:
        message = " ".join(str(error).split())
        if is_ours(error):
            return message
        # It would say so without privacy, too.
        if "support" in message:
            return f"Transformers: {message}"
        raise
    return TRAINS


# --- the table ------------------------------------------------------------------------------------------------------------

PAGE: Final = """# Which models train with which adapters and precisions?

- **Command:** `python -m scripts.experiments.compatibility`, with transformers {transformers}
  and PEFT {peft_version}: two private steps of a tiny model of random weights, with all checks before them

**{trains} of {count} combinations train, {refused} are refused with a message, and {peft} are not supported by
Transformers or PEFT.** A combination is a model and one of nine ways to train it:

- *all weights*, in float32, and the same in *bf16* and with gradient *checkpointing*
- *LoRA*, *LoRA in bf16*, and *DoRA*: adapters on all linear layers except the head
- *IA3*: adapters on the layers that PEFT chooses
- *prompts*: prompt tuning
- *biases*: only biases and the head are trained

The table lists the ways in which a model does **not** train. A number in brackets is the refusal below, and – means that
Transformers or PEFT does not support the combination. [Architectures](architectures.md) has all classes of Transformers,
trained with all weights.

*Fixed* models were changed as the refusals say. In the ResNet and Segformer models, BatchNorm was replaced. In the
speech models, `pos_conv_embed` and `masked_spec_embed` were frozen, masks and `layerdrop` were set to 0, and all records
were padded to one length. *As released* means with `pos_dropout` above 0 and relative attention, as in Microsoft's
published models. LoRA trains there with `target_modules=["value_proj", "dense"]`.

{table}

The first sentence of each refusal:

{notes}
"""


def page(found: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page of a table, model → way → outcome; models with the same outcomes share a row."""
    notes: dict[str, int] = {}
    models_of: dict[str, list[str]] = {}
    for name, row in found.items():
        ways_of: dict[str, list[str]] = {}
        for way, outcome in row.items():
            if outcome.startswith(NOT_OURS):
                ways_of.setdefault("–", []).append(way)
            elif outcome != TRAINS:
                ways_of.setdefault(f"[{notes.setdefault(general(outcome), len(notes) + 1)}]", []).append(way)
        left = "; ".join(f"{', '.join(ways) if len(ways) < len(row) else ALL} {mark}" for mark, ways in ways_of.items())
        models_of.setdefault(left or NOTHING, []).append(f"`{name}`")
    rows = [
        "| models | do not train with |",
        "|---|---|",
        *(f"| {', '.join(of)} | {left} |" for left, of in models_of.items()),
    ]
    outcomes = [outcome for row in found.values() for outcome in row.values()]
    trains, of_peft = outcomes.count(TRAINS), sum(outcome.startswith(NOT_OURS) for outcome in outcomes)
    return PAGE.format(
        count=len(outcomes), trains=trains, refused=len(outcomes) - trains - of_peft, peft=of_peft,
        transformers=transformers.__version__, peft_version=peft.__version__, table="\n".join(rows),
        notes="\n".join(f"{number}. {message}" for message, number in notes.items()),
    )  # fmt: skip


def general(message: str) -> str:
    """Return the first sentence of a message, without the names of its layers and model, so that models share a note."""
    named = r"'[\w.*]+'( \(\d+ of them\))?(, '[\w.*]+'( \(\d+ of them\))?)*( \(\w+For\w+\))?|\b\w+For[A-Z]\w+"
    # An error of torch's own has shapes in it.
    return re.sub(r", \w+Error \(.*", "", re.sub(named, "…", message).partition(". ")[0].removesuffix(".")) + "."


def main(argv: Sequence[str] | None = None) -> None:
    """Try all flows, and print the page."""
    with one_line_errors():
        (args,) = parse_args(CompatibilityArguments, argv=argv)
        for flag, names, known in (("--models", args.models, MODELS), ("--ways", args.ways, WAYS)):
            for name in names:
                if name not in known:
                    raise Refusal("unknown-value", f"{flag} must be of {', '.join(known)}, got {name!r}.")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    for name in args.models or MODELS:
        found[name] = {}
        for way in args.ways or WAYS:
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                found[name][way] = outcome(name, WAYS[way])
            print(f"{name}, {way}: {found[name][way]}", file=sys.stderr, flush=True)
    print(page(found), end="")


if __name__ == "__main__":
    main()
