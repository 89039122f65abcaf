"""One loss per example, over that example alone, for every model of transformers that has a rule.

A model's own loss is a mean over the batch, and for language models over the batch's tokens. A long example then takes
weight from a short one, so that an example's contribution depends on the others and clipping bounds nothing. Here each
example's loss depends on its own logits and labels. A mean over an example's own tokens is allowed; a division by
`num_items_in_batch`, or by any other count of the batch, is not.

The model determines the loss. As Transformers does, this file finds it by `loss_type`, the end of the class's name
(`PreTrainedModel.__init__`, `loss/loss_utils.py`), and for older names by the tables of auto classes.
"""

import contextlib
import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from transformers.models.auto import modeling_auto

from doppler_hf.errors import Refusal, page
from doppler_hf.linalg import cross_entropies
from doppler_hf.privacy.dense_losses import ctc_losses, ignored_pixel, pixel_losses
from doppler_hf.privacy.token_losses import IGNORED_LABEL, head_in_chunks, next_labels, token_losses

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
Task = Literal[
    "causal_lm",
    "seq2seq_lm",
    "masked_lm",
    "token_classification",
    "multiple_choice",
    "semantic_segmentation",
    "ctc",
    "masked_image",
]

OWN_LOSS: Final = (
    "Override compute_per_sample_loss to return one loss per example, such as F.cross_entropy(model(**inputs)['logits'], "
    "inputs['labels'], reduction='none')"
)
ANSWER = ("start_positions", "end_positions")  # the labels of question answering
MASK: Final = "bool_masked_pos"  # which patches of an image are hidden from the model, and to be made up
WITHOUT_TOKENS: Final = ("multiple_choice", "semantic_segmentation", "ctc", "masked_image")  # no label for each token

# By the names of classes. Masked comes before causal: XLM's head is in both tables, with labels aligned with its inputs.
_TASK_OF_TABLE: Final[tuple[tuple[Mapping[str, str], Task], ...]] = (
    (modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES, "multiple_choice"),
    (modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES, "semantic_segmentation"),
    (modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES, "ctc"),
    (modeling_auto.MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES, "masked_image"),
    (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, "token_classification"),
    (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "masked_lm"),
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal_lm"),
    (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "causal_lm"),
    # As TrOCR and Donut. Transformers' tables for images and speech also have models that shift their labels.
    ({"vision": "VisionEncoderDecoderModel", "speech": "SpeechEncoderDecoderModel"}, "causal_lm"),
)
_TASK_OF_LOSS: Final[dict[Any, Task]] = {
    ForTokenClassification: "token_classification",
    ForMaskedLMLoss: "masked_lm",
    ForCausalLMLoss: "causal_lm",
}


def without_adapters(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, or `model` itself if it has none, as when PEFT is not imported."""
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def has_prompt(model: Any) -> bool:
    """Return whether a model is one of PEFT that computes one prompt and repeats it for each example."""
    return without_adapters(model) is not model and model.active_peft_config.peft_type in ("PROMPT_TUNING", "P_TUNING")


def places_of_prompt(model: Any) -> int:
    """Return how many tokens of a trained prompt PEFT puts before an example's own; a decoder with an encoder has none."""
    if not has_prompt(model) or model.get_base_model().config.is_encoder_decoder:
        return 0
    return int(model.active_peft_config.num_virtual_tokens)


def task_of(model: nn.Module) -> Task | None:
    """Return the task of a model, without PEFT's wrapper, whose labels are not one row of numbers, or None for any other."""
    if not isinstance(model, PreTrainedModel):
        return None
    # A subclass under a name of its own has the task of the class above it.
    names = {cls.__name__ for cls in type(model).__mro__}
    task = next((task for table, task in _TASK_OF_TABLE if not names.isdisjoint(table.values())), None)
    if task not in WITHOUT_TOKENS and model.loss_type is not None:  # it has none for GPT2LMHeadModel and others of its time
        task = _TASK_OF_LOSS.get(LOSS_MAPPING.get(model.loss_type))
    # T5 has the loss of a causal model in the table, T5Gemma that of a masked one; neither shifts its labels.
    return "seq2seq_lm" if task in ("causal_lm", "masked_lm") and model.config.is_encoder_decoder else task


def has_one_label(model: nn.Module, labels: Any) -> bool:
    """Return whether the loss of a model, without PEFT's wrapper, is the cross-entropy of an example's one label.

    That is as `per_sample_losses` has it for these labels of a batch.
    """
    is_one_class = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
    if not is_one_class or not isinstance(model, PreTrainedModel):
        return False
    is_of_classes = model.config.num_labels > 1 and model.config.problem_type in (None, "single_label_classification")
    return (task := task_of(model)) == "multiple_choice" or (task is None and is_of_classes)


class Losses(NamedTuple):
    """One loss for each example, shape (batch,), attached to the graph.

    Attributes:
        values: The losses.
        is_cross_entropy: Whether each is −log p of the one right class of its example.
        weights: Factors of the clipped gradients, shape (batch,), which are cut to [0, 1]; None for 1.
    """

    values: Float[Tensor, " batch"]
    is_cross_entropy: bool = False
    weights: Float[Tensor, " batch"] | None = None


def as_losses(returned: Any) -> Losses:
    """Return what a `compute_per_sample_loss` has returned, losses alone or with weights, as `Losses`.

    Raises:
        Refusal: If the weights are not as many as the losses.
    """
    if not isinstance(returned, tuple):
        return Losses(returned)
    values, weights = returned if len(returned) == 2 else (None, None)
    if not isinstance(values, Tensor) or not isinstance(weights, Tensor) or weights.shape != values.shape:
        # Not their shapes, which are of a draw: messages end in logs.
        raise Refusal(
            "weights-of-losses",
            "compute_per_sample_loss returned a tuple that is not (losses, weights) with one number each per example. "
            "Return two tensors of shape (batch,), or the losses alone.",
        )
    if weights.device != values.device:
        raise Refusal(
            "weights-of-losses",
            f"The weights are on {weights.device} and the losses on {values.device}, so every step would wait for a copy. "
            "Return weights.to(losses.device), or keep the table of weights there.",
        )
    # Sensitivity: weights in [0, 1] make a clipped gradient shorter, never longer, and the engine cuts them to that range.
    # Like a loss, each must follow from its own example, which the check before the first step looks at.
    return Losses(values, weights=weights.detach())


@contextlib.contextmanager
def outputs_by_name(base_model: nn.Module) -> Iterator[None]:
    """Let a model return its outputs by their names in the block, even if its config has `return_dict=False`."""
    config = getattr(base_model, "config", None)
    if getattr(config, "return_dict", True):
        yield
        return
    config.return_dict = True  # type: ignore[union-attr]  # only a config has the attribute
    try:
        yield
    finally:
        config.return_dict = False  # type: ignore[union-attr]


def named_outputs(outputs: Any, *, has_loss: bool, names: Sequence[str] = ("logits",)) -> Mapping[str, Any]:
    """Return a model's outputs by their names.

    A model of the user's own may return a tuple, as Transformers reads it: a loss if it got labels, and then the logits.
    """
    if isinstance(outputs, tuple):
        return dict(zip(("loss", *names) if has_loss else names, outputs, strict=False))
    return outputs if isinstance(outputs, dict) else {}


def losses_of_class(model: nn.Module, inputs: dict[str, Any], *, base_model: PreTrainedModel) -> Losses:
    """Call the model once and return the losses of the rule for its class; see `per_sample_losses`."""
    is_cross_entropy = has_one_label(base_model, inputs.get("labels"))
    return Losses(per_sample_losses(model, inputs, base_model=base_model), is_cross_entropy)


def per_sample_losses(model: nn.Module, inputs: dict[str, Any], *, base_model: PreTrainedModel) -> Float[Tensor, " batch"]:
    """Call the model once and return the loss of each example.

    Args:
        model: The model, with its wrappers.
        inputs: One micro-batch with `labels`: shape (batch, length) for tokens or CTC, (batch, height, width) for
            segmentation, otherwise as in `classification_losses`; or with the positions of `answer_losses`, or the hidden
            patches of `hidden_patch_losses`.
        base_model: The model without wrappers, whose class determines the task.

    Returns:
        Losses, shape (batch,), attached to the graph.

    Raises:
        ValueError: If there is no rule for the model's class, or its loss has a part that is of the whole batch.
    """
    task = task_of(base_model)
    labels, answer = inputs.get("labels"), [inputs[name] for name in ANSWER if name in inputs]
    if not isinstance(base_model, PreTrainedModel) and not answer:
        raise Refusal(
            "not-of-transformers",
            f"A model must be of Transformers to have a known loss, got {type(base_model).__name__}, whose own loss covers "
            f"the whole batch. {OWN_LOSS}.",
        )
    if "return_loss" in inputs:  # which CLIP asks whether it is True, and a collator makes a tensor of it
        raise _without_labels(base_model, {"logits_per_image": None})
    inputs = {name: value for name, value in inputs.items() if name not in ("labels", *ANSWER)}
    if task == "seq2seq_lm" and labels is not None and "decoder_input_ids" not in inputs:
        if hasattr(base_model, "prepare_decoder_input_ids_from_labels"):
            inputs["decoder_input_ids"] = base_model.prepare_decoder_input_ids_from_labels(labels)
        else:  # M2M100 and Whisper shift the labels inside their forward pass, whose loss is not used.
            inputs["labels"] = labels
    if task == "ctc" and labels is not None:
        with outputs_by_name(base_model):
            return ctc_losses(model, inputs, labels, base_model=base_model)
    chunked: contextlib.AbstractContextManager[list[Tensor]] = contextlib.nullcontext([])
    has_tokens = task is not None and task not in WITHOUT_TOKENS
    if has_tokens and labels is not None:
        labels = F.pad(labels, (places_of_prompt(model), 0), value=IGNORED_LABEL)
        if task == "causal_lm":
            labels = next_labels(labels)
            chunked = head_in_chunks(base_model, labels)
    try:
        with chunked as found, outputs_by_name(base_model):
            returned = model(**inputs)
    except (TypeError, AttributeError) as error:
        if labels is None or "labels" not in inspect.signature(base_model.forward).parameters:
            raise
        raise Refusal(
            "forward-without-labels",
            f"The forward of {type(base_model).__name__} must run without labels, got a {type(error).__name__} from it: its "
            f"own loss covers the whole batch. {OWN_LOSS}.",
        ) from error
    names = ("start_logits", "end_logits") if answer else ("logits",)
    outputs = named_outputs(returned, has_loss="labels" in inputs, names=names)
    if len(answer) == 2 and "start_logits" in outputs and "end_logits" in outputs:
        mask = inputs.get("attention_mask")
        if mask is not None:
            mask = F.pad(mask, (places_of_prompt(model), 0), value=1)
        return answer_losses((outputs["start_logits"], outputs["end_logits"]), (answer[0], answer[1]), mask=mask)
    if task == "masked_image" and MASK in inputs and "reconstruction" in outputs:
        return hidden_patch_losses(outputs["reconstruction"], inputs["pixel_values"], inputs[MASK])
    logits = outputs.get("logits")
    if labels is None:
        raise _without_labels(base_model, outputs)
    if logits is None:
        raise _no_rule(base_model)
    if any(name.endswith("router_logits") for name in outputs):
        raise Refusal(
            "loss-of-the-batch",
            f"{type(base_model).__name__} has output_router_logits=True: its router's balancing loss covers the whole "
            "batch. Set output_router_logits=False in its config.",
        )
    if has_tokens:
        return token_losses(logits, labels, found=found)
    if task == "multiple_choice":
        return classification_losses(logits, labels, problem_type="single_label_classification")
    if task == "semantic_segmentation":
        if getattr(base_model, "auxiliary_head", None) is not None:
            raise Refusal(
                "logits-not-returned",
                f"{type(base_model).__name__} has use_auxiliary_head=True, whose logits are not in the outputs. Set "
                "use_auxiliary_head=False in its config.",
            )
        return pixel_losses(logits, labels, ignored=ignored_pixel(base_model))
    if logits.ndim != 2 or logits.shape[-1] != getattr(base_model.config, "num_labels", None):
        raise _no_rule(base_model)
    return classification_losses(logits, labels, problem_type=base_model.config.problem_type)


def _without_labels(model: PreTrainedModel, outputs: Mapping[str, Any]) -> Refusal:
    name = type(model).__name__
    if any(output.startswith("logits_per_") for output in outputs):
        return Refusal(
            "loss-of-the-batch",
            f"The loss of {name} compares the examples of a batch, so none has its own loss, and clipping bounds nothing. "
            "Train its encoder as a classifier, such as CLIPForImageClassification with its unused "
            "vision_model.post_layernorm frozen.",
        )
    if outputs.get("loss") is not None:
        return Refusal(
            "loss-of-the-batch",
            f"The loss of {name} is one number for the whole batch. Override compute_per_sample_loss to return it for each "
            f"example, as in {page('guides/own-loss')}.",
        )
    return Refusal(
        "no-labels",
        f"There is no per-example loss for {name} without `labels`. Name a column of numbers so, as by "
        "train_dataset.rename_column(NAME, 'labels'), take a collator that makes them, or override compute_per_sample_loss: "
        f"{page('start/troubleshooting', 'data')}.",
    )


def _no_rule(model: PreTrainedModel) -> Refusal:
    return Refusal(
        "no-loss-rule",
        f"There is no per-example loss for {type(model).__name__}: logits must be of shape (batch, num_labels) for classes, "
        "(batch, length, classes) for tokens, or (batch, classes, height, width) for pixels. Override "
        "compute_per_sample_loss for another task.",
    )


def classification_losses(
    logits: Float[Tensor, "batch labels"], labels: Shaped[Tensor, "batch ..."], *, problem_type: ProblemType | None = None
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of a sequence or image classification task.

    transformers' heads average the same losses over the batch: cross-entropy for one label, the mean of the binary
    cross-entropy for several, and of the squared error for regression. `problem_type` is as in the model's config; None
    infers it as transformers does.

    Example:
        >>> classification_losses(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        tensor([0.6931, 0.6931, 0.6931])
    """
    if problem_type is None:
        if logits.shape[-1] == 1:
            problem_type = "regression"
        elif labels.is_floating_point():
            problem_type = "multi_label_classification"
        else:
            problem_type = "single_label_classification"
    if problem_type not in get_args(ProblemType):
        raise Refusal(
            "unknown-value", f"problem_type must be one of {', '.join(get_args(ProblemType))}, got {problem_type!r}."
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    expected = (len(logits),) if problem_type == "single_label_classification" else tuple(logits.shape)
    if problem_type == "regression" and labels.ndim == 1:
        labels = labels.unsqueeze(-1)
    if tuple(labels.shape) != expected:
        raise Refusal(
            "wrong-shape",
            # Not their sizes, which are of a draw or of an example: messages end in logs.
            f"{problem_type} with logits of shape (batch, num_labels) must have labels of shape "
            f"{'(batch,)' if len(expected) == 1 else '(batch, num_labels)'}, got {logits.ndim} and {labels.ndim} dimensions "
            f"or other sizes. {_fix_of_labels(logits, labels)}, of each data set.",
        )
    if problem_type == "regression":
        return F.mse_loss(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)
    if problem_type == "single_label_classification":
        return cross_entropies(logits, labels, ignored=IGNORED_LABEL)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)


def _fix_of_labels(logits: Float[Tensor, "batch labels"], labels: Shaped[Tensor, "batch ..."]) -> str:
    """Return what makes labels of a known shape those of a classifier."""
    if labels.ndim == 1:
        cast = "dataset.cast_column('labels', datasets.Value('int64'))"
        return f"For one number an example set num_labels=1, for a class make the labels whole numbers: {cast}"
    if labels.shape == logits.shape:
        return "Make floats of them: dataset.cast_column('labels', datasets.Sequence(datasets.Value('float32')))"
    if labels[0].numel() == 1:
        return "Take the class out of its list: dataset.map(lambda row: {'labels': int(row['labels'][0])})"
    return "Set num_labels to how many labels an example has"


def answer_losses(
    logits: tuple[Float[Tensor, "batch length"], Float[Tensor, "batch length"]],
    positions: tuple[Int[Tensor, "batch *one"], Int[Tensor, "batch *one"]],
    *,
    mask: Shaped[Tensor, "batch tokens"] | None = None,
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of extractive question answering: which token begins the answer, and which ends it.

        loss_i = ½ CE(start_i, s_i) + ½ CE(end_i, e_i)

    The classes are the example's own tokens; Transformers' loss counts the padding among them. A position outside of these
    tokens, of an answer that was cut off, adds 0. The mask is 1 for its own tokens; what comes behind is not padded.

    Example:
        >>> answer_losses((torch.zeros(1, 4), torch.zeros(1, 4)), (torch.tensor([1]), torch.tensor([2])))
        tensor([1.3863])
    """
    shape, total = logits[0].shape, torch.zeros((), device=logits[0].device)
    if len(shape) != 2 or any(position.numel() != shape[0] for position in positions):
        raise Refusal(
            "wrong-shape",
            "The start_positions and end_positions must be one index for each example, with logits of shape (batch, "
            f"length), got {positions[0].ndim} and {len(shape)} dimensions or other sizes. Override "
            "compute_per_sample_loss.",
        )
    is_own = torch.ones(shape, dtype=torch.bool, device=total.device)
    if mask is not None:
        is_own = F.pad(mask, (0, shape[1] - mask.shape[1]), value=1) != 0
    for of_one, position in zip(logits, positions, strict=True):
        # Sensitivity: of logits in the padding neither the loss nor the gradient depends, whatever the others' lengths.
        of_one = of_one.to(torch.promote_types(of_one.dtype, torch.float32))
        of_one = of_one.masked_fill(~is_own, torch.finfo(of_one.dtype).min)
        index = position.reshape(-1, 1).clamp(min=0)  # a negative one is the first token, as in transformers
        is_inside = (index < shape[1]) & is_own.gather(1, index.clamp(max=shape[1] - 1))
        label = index.where(is_inside, IGNORED_LABEL).squeeze(1)
        total = total + F.cross_entropy(of_one, label, ignore_index=IGNORED_LABEL, reduction="none") / 2
    return total


def hidden_patch_losses(
    made_up: Float[Tensor, "batch channels height width"],
    images: Float[Tensor, "batch channels height width"],
    is_hidden: Shaped[Tensor, "batch patches"],
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of masked image modeling: how far the hidden patches are from what the model made up.

        loss_i = Σ_p [p is hidden] · |made_up_ip − image_ip| / (number of hidden pixels of i · channels)

    The mean is over the example's own hidden patches; Transformers' is over those of the batch. An example without a hidden
    patch has loss 0. The patches form a square, row by row.

    Example:
        >>> hidden_patch_losses(torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 4, 4), torch.tensor([[True, False, False, False]]))
        tensor([1.])
    """
    side = math.isqrt(is_hidden[0].numel())
    if made_up.shape != images.shape or is_hidden[0].numel() != side**2 or any(size % side for size in images.shape[2:]):
        raise Refusal(
            "wrong-shape",
            f"{MASK} must have one value for each patch of a square image that is made up in its own size, got "
            f"{is_hidden.ndim} dimensions of it, {images.ndim} of the images and {made_up.ndim} of what is made up, or "
            "other sizes. Override compute_per_sample_loss.",
        )
    # Sensitivity: the mask, the number of hidden pixels and the mean are an example's own.
    made_up = made_up.to(torch.promote_types(made_up.dtype, torch.float32))
    hidden = is_hidden.reshape(-1, 1, side, side).to(made_up)
    hidden = hidden.repeat_interleave(images.shape[2] // side, 2).repeat_interleave(images.shape[3] // side, 3)
    errors = F.l1_loss(made_up, images.to(made_up), reduction="none") * hidden
    # At least one: 0/0 would be NaN, and an example without a hidden patch would count as one that failed.
    return errors.flatten(1).sum(dim=1) / (hidden.flatten(1).sum(dim=1).clamp(min=1) * images.shape[1])
