"""One loss per example, computed from that example alone, for every supported model of Transformers.

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
import transformers
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from transformers.models.auto import modeling_auto

from doppler_hf.errors import Refusal, page
from doppler_hf.linalg import NUMBER_OF_CLASSES, cross_entropies
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
    "Override compute_per_sample_loss to return one loss per record, such as F.cross_entropy(model(**inputs)['logits'], "
    "inputs['labels'], reduction='none')"
)
ANSWER = ("start_positions", "end_positions")  # The labels of question answering.
TOKENS_OF_AN_ANSWER: Final = (
    "Get the number of a token from that of a character of the context: encoding = tokenizer(question, context, "
    "truncation=True), then encoding.char_to_token(character, sequence_index=1) or 0. Token 0 stands for no answer"
)
# A task → where its labels come from. The labels of other tasks are a column of numbers.
_LABELS_OF: Final[dict[Task | None, str]] = {
    "causal_lm": "Pass data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), which makes the labels. "
    "If only some tokens are to be learnt, add a column 'labels', and pass DataCollatorForSeq2Seq(tokenizer)",
    "masked_lm": "Pass data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=True), which makes the labels",
    "seq2seq_lm": "Add a column 'labels' with the tokens of the target, tokenizer(text_target=target)['input_ids'], and "
    "pass data_collator=DataCollatorForSeq2Seq(tokenizer, model=model)",
    "token_classification": "Add a column 'labels' with one class for each token, made from the tokenizer's word_ids(), and "
    "pass data_collator=DataCollatorForTokenClassification(tokenizer)",
}
_RENAME: Final = (
    "Rename a column of numbers, for example with train_dataset.rename_column(NAME, 'labels'), or use a collator that makes "
    "labels"
)
NUMBER_OF_THE_CHOICE: Final = "The label is the number of the right choice, which begins at 0"
MASK: Final = "bool_masked_pos"  # This input marks the patches of an image that the model must reconstruct.
WITHOUT_TOKENS: Final = (
    "multiple_choice",
    "semantic_segmentation",
    "ctc",
    "masked_image",
)  # These tasks have no label for each token.

# Name of a class → its task. Masked comes before causal: XLM's head is in both tables, and its labels are not shifted.
_TASK_OF_TABLE: Final[tuple[tuple[Mapping[str, str], Task], ...]] = (
    (modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES, "multiple_choice"),
    (modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES, "semantic_segmentation"),
    (modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES, "ctc"),
    (modeling_auto.MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES, "masked_image"),
    (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, "token_classification"),
    (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "masked_lm"),
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal_lm"),
    (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "causal_lm"),
    # These tables of Transformers, for images and speech, also have models that shift their labels, such as TrOCR and Donut.
    ({"vision": "VisionEncoderDecoderModel", "speech": "SpeechEncoderDecoderModel"}, "causal_lm"),
)
_TASK_OF_LOSS: Final[dict[Any, Task]] = {
    ForTokenClassification: "token_classification",
    ForMaskedLMLoss: "masked_lm",
    ForCausalLMLoss: "causal_lm",
}


def without_adapters(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, or `model` itself if it has no wrapper or PEFT is not imported."""
    peft = sys.modules.get("peft")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def has_prompt(model: Any) -> bool:
    """Return whether PEFT computes one prompt for this model and repeats it for each example."""
    return without_adapters(model) is not model and model.active_peft_config.peft_type in ("PROMPT_TUNING", "P_TUNING")


def places_of_prompt(model: Any) -> int:
    """Return how many tokens of a trained prompt PEFT puts before an example's tokens; 0 for a decoder with an encoder."""
    if not has_prompt(model) or model.get_base_model().config.is_encoder_decoder:
        return 0
    return int(model.active_peft_config.num_virtual_tokens)


def task_of(model: nn.Module) -> Task | None:
    """Return the task of a model (without PEFT's wrapper), or None if its labels are one row of numbers."""
    if not isinstance(model, PreTrainedModel):
        return None
    # A subclass with a new name has the task of its parent class.
    names = {cls.__name__ for cls in type(model).__mro__}
    task = next((task for table, task in _TASK_OF_TABLE if not names.isdisjoint(table.values())), None)
    if (
        task not in WITHOUT_TOKENS and model.loss_type is not None
    ):  # Older classes such as GPT2LMHeadModel have no loss_type.
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
        # The message has no shapes, because they reveal the size of a random batch, and messages end up in logs.
        raise Refusal(
            "weights-of-losses",
            "compute_per_sample_loss returned a tuple that is not (losses, weights) with one number per record each. "
            "Return two tensors of shape (batch,), or the losses only.",
        )
    if weights.device != values.device:
        raise Refusal(
            "weights-of-losses",
            f"compute_per_sample_loss returned weights on {weights.device} and losses on {values.device}. Moving the "
            "weights would slow down every step. Return weights.to(losses.device), or create the class weights on that "
            "device.",
        )
    # Sensitivity: weights in [0, 1] make a clipped gradient shorter, never longer, and the engine clamps them to that range.
    # Like a loss, each weight must depend on its own example only, which the checks before the first step test.
    return Losses(values, weights=weights.detach())


@contextlib.contextmanager
def outputs_by_name(base_model: nn.Module) -> Iterator[None]:
    """Make a model return its outputs by name inside the block, even if its config has `return_dict=False`."""
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
            f"A private run needs one loss per record, and {type(base_model).__name__} is not a model of Transformers, so "
            f"its per-sample loss is not known. {OWN_LOSS}.",
        )
    if "return_loss" in inputs:  # CLIP would test whether it is True, but a collator makes a tensor of it.
        raise _without_labels(base_model, {"logits_per_image": None})
    inputs = {name: value for name, value in inputs.items() if name not in ("labels", *ANSWER)}
    if task == "seq2seq_lm" and labels is None:  # such a model fails without them, in words of its own
        raise _without_labels(base_model, {})
    if task == "seq2seq_lm" and "decoder_input_ids" not in inputs:
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
            f"The per-sample loss is computed from the outputs of {type(base_model).__name__} without labels, and its "
            f"forward needs labels and failed without them ({type(error).__name__}). {OWN_LOSS}.",
        ) from error
    names = ("start_logits", "end_logits") if answer else ("logits",)
    outputs = named_outputs(returned, has_loss="labels" in inputs, names=names)
    if len(answer) == 2 and "start_logits" in outputs and "end_logits" in outputs:
        mask = inputs.get("attention_mask")
        if mask is not None and mask.ndim > 2:
            mask = _tokens_of_pairs(mask)
        if mask is not None:
            mask = F.pad(mask, (places_of_prompt(model), 0), value=1)
        return answer_losses((outputs["start_logits"], outputs["end_logits"]), (answer[0], answer[1]), mask=mask)
    if task == "masked_image" and MASK in inputs and "reconstruction" in outputs:
        return hidden_patch_losses(outputs["reconstruction"], inputs["pixel_values"], inputs[MASK])
    logits = outputs.get("logits")
    if labels is None or "start_logits" in outputs:
        raise _without_labels(base_model, outputs)
    if logits is None:
        raise _no_rule(base_model, None)
    if any(name.endswith("router_logits") for name in outputs):
        raise Refusal(
            "loss-of-the-batch",
            f"{type(base_model).__name__} has output_router_logits=True, which adds a balancing loss over the whole batch, "
            "so no record has its own loss. Set output_router_logits=False in its config.",
        )
    if has_tokens:
        return token_losses(logits, labels, found=found)
    if task == "multiple_choice":
        return classification_losses(logits, labels, problem_type="single_label_classification", fix=NUMBER_OF_THE_CHOICE)
    if task == "semantic_segmentation":
        if getattr(base_model, "auxiliary_head", None) is not None:
            raise Refusal(
                "logits-not-returned",
                f"{type(base_model).__name__} has use_auxiliary_head=True, but its outputs do not include the logits of "
                "that head. Set use_auxiliary_head=False in its config.",
            )
        return pixel_losses(logits, labels, ignored=ignored_pixel(base_model))
    if logits.ndim != 2 or logits.shape[-1] != getattr(base_model.config, "num_labels", None):
        raise _no_rule(base_model, logits)
    return classification_losses(logits, labels, problem_type=base_model.config.problem_type)


def _tokens_of_pairs(mask: Tensor) -> Shaped[Tensor, "batch tokens"]:
    """Return which tokens an example has, by its mask of pairs of tokens: those that its first token reads, or is.

    The mask has True where a token is read, or 0 there and a large negative number elsewhere.
    """
    is_read = mask if mask.dtype == torch.bool else mask >= 0
    return is_read[..., 0, :].flatten(1, -2).any(dim=1) if is_read.ndim > 3 else is_read[:, 0]


def _without_labels(model: PreTrainedModel, outputs: Mapping[str, Any]) -> Refusal:
    name = type(model).__name__
    if any(output.startswith("logits_per_") for output in outputs):
        classifier = name.removesuffix("Model") + "ForImageClassification"
        if not hasattr(transformers, classifier):
            classifier = "CLIPForImageClassification"
        return Refusal(
            "loss-of-the-batch",
            f"The loss of {name} compares the records of a batch with each other, so no record has its own loss, and "
            f"clipping bounds nothing. Train its encoder as a classifier, such as {classifier}, and freeze the layer that "
            "it does not use: the error before the first step names it. Or override compute_per_sample_loss with a loss "
            "of each record's own image and text.",
        )
    if outputs.get("loss") is not None:
        return Refusal(
            "loss-of-the-batch",
            f"The loss of {name} is one number for the whole batch, and a private run needs one loss per record. Override "
            f"compute_per_sample_loss to return one for each, as in {page('guides/own-loss')}.",
        )
    is_answering = "start_logits" in outputs
    lacking = " and ".join(f"`{each}`" for each in (ANSWER if is_answering else ("labels",)))
    mend = f"Add both columns. {TOKENS_OF_AN_ANSWER}" if is_answering else _LABELS_OF.get(task_of(model), _RENAME)
    return Refusal(
        "no-labels",
        f"The batches have no {lacking}, so there is no per-sample loss for {name}. {mend}. For another loss override "
        f"compute_per_sample_loss: {page('start/troubleshooting', 'data')}.",
    )


def _no_rule(model: PreTrainedModel, logits: Tensor | None) -> Refusal:
    # The message has no sizes, because they are private (of a batch or a record), and messages end up in logs.
    found = "no logits" if logits is None else f"logits of {logits.ndim} dimensions"
    if logits is not None and logits.ndim == 2:
        found += ", the second of which is not num_labels"
    return Refusal(
        "no-loss-rule",
        f"The per-sample loss of {type(model).__name__} is not known: its outputs have {found}. Expected logits of shape "
        "(batch, num_labels) for classes, (batch, length, classes) for tokens, or (batch, classes, height, width) for "
        "pixels. For another task override compute_per_sample_loss.",
    )


def classification_losses(
    logits: Float[Tensor, "batch labels"],
    labels: Shaped[Tensor, "batch ..."],
    *,
    problem_type: ProblemType | None = None,
    fix: str = NUMBER_OF_CLASSES,
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of a sequence or image classification task.

    transformers' heads average the same losses over the batch: cross-entropy for one label, the mean of the binary
    cross-entropy for several, and of the squared error for regression. `problem_type` is as in the model's config; None
    infers it as transformers does. `fix` says in an error what to do about a label that is out of range.

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
            "unknown-value", f"problem_type must be one of {', '.join(get_args(ProblemType))}; got {problem_type!r}."
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    expected = (len(logits),) if problem_type == "single_label_classification" else tuple(logits.shape)
    if problem_type == "regression" and labels.ndim == 1:
        labels = labels.unsqueeze(-1)
    if tuple(labels.shape) != expected:
        raise Refusal(
            "wrong-shape",
            # The message has no sizes, because they are private (of a batch or a record), and messages end up in logs.
            f"{problem_type} with logits of shape (batch, num_labels) must have labels of shape "
            f"{'(batch,)' if len(expected) == 1 else '(batch, num_labels)'}; got {logits.ndim} and {labels.ndim} "
            f"dimensions, or sizes that do not fit. {_fix_of_labels(logits, labels)}, in every data set. If the column is "
            "called 'label', write 'label' in place of 'labels'.",
        )
    if problem_type == "regression":
        return F.mse_loss(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)
    if problem_type == "single_label_classification":
        return cross_entropies(logits, labels, ignored=IGNORED_LABEL, fix=fix)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)


def _fix_of_labels(logits: Float[Tensor, "batch labels"], labels: Shaped[Tensor, "batch ..."]) -> str:
    """Return the instruction that turns labels of this shape into labels for a classifier."""
    if labels.ndim == 1:
        cast = "dataset.cast_column('labels', datasets.Value('int64'))"
        return f"For one number per record set num_labels=1; for classes make the labels whole numbers: {cast}"
    if labels.shape == logits.shape:
        return "Convert the labels to floats: dataset.cast_column('labels', datasets.Sequence(datasets.Value('float32')))"
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
            "For question answering, start_positions and end_positions must have one index per record, and logits the shape "
            f"(batch, length); got {positions[0].ndim} and {len(shape)} dimensions, or sizes that do not fit. Override "
            "compute_per_sample_loss.",
        )
    is_own = torch.ones(shape, dtype=torch.bool, device=total.device)
    if mask is not None:
        is_own = F.pad(mask, (0, shape[1] - mask.shape[1]), value=1) != 0
    for of_one, position in zip(logits, positions, strict=True):
        # Sensitivity: neither the loss nor the gradient depends on logits in the padding, whatever the lengths of other
        # examples.
        of_one = of_one.to(torch.promote_types(of_one.dtype, torch.float32))
        of_one = of_one.masked_fill(~is_own, torch.finfo(of_one.dtype).min)
        index = position.reshape(-1, 1).clamp(min=0)  # A negative position means the first token, as in Transformers.
        label = index.where(is_inside(index, is_own), IGNORED_LABEL).squeeze(1)
        total = total + F.cross_entropy(of_one, label, ignore_index=IGNORED_LABEL, reduction="none") / 2
    return total


def is_inside(index: Int[Tensor, "batch one"], is_own: Bool[Tensor, "batch length"]) -> Bool[Tensor, "batch one"]:
    """Return whether the position of an answer is that of one of the example's own tokens, so that the loss counts it."""
    index = index.clamp(min=0)
    return (index < is_own.shape[1]) & is_own.gather(1, index.clamp(max=is_own.shape[1] - 1))


def hidden_patch_losses(
    made_up: Float[Tensor, "batch channels height width"],
    images: Float[Tensor, "batch channels height width"],
    is_hidden: Shaped[Tensor, "batch patches"],
) -> Float[Tensor, " batch"]:
    """Return the loss of each example of masked image modeling: the error of the reconstruction in the hidden patches.

        loss_i = Σ_p [p is hidden] · |made_up_ip − image_ip| / (number of hidden pixels of i · channels)

    The mean is over the example's own hidden patches; Transformers' is over those of the batch. An example without a hidden
    patch has loss 0. The patches form a square, row by row.

    Example:
        >>> hidden_patch_losses(torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 4, 4), torch.tensor([[True, False, False, False]]))
        tensor([1.])
    """
    side = math.isqrt(is_hidden[0].numel())
    wrong = ""
    if made_up.shape != images.shape:
        wrong = "the reconstruction that the model returns has another shape than pixel_values"
    elif is_hidden[0].numel() != side**2:
        wrong = f"the number of values in {MASK} is not a square"
    elif any(size % side for size in images.shape[2:]):
        wrong = f"the images cannot be cut into as many equal patches as {MASK} has values"
    if wrong:
        # The message has no sizes, because they are private (of a batch or a record), and messages end up in logs.
        raise Refusal(
            "wrong-shape",
            f"The loss of masked image modeling cannot be computed: {wrong}. Make {MASK} with one value for each patch of a "
            "square image, (image_size // patch_size) ** 2 values in all, or override compute_per_sample_loss.",
        )
    # Sensitivity: the mask, the number of hidden pixels and the mean are an example's own.
    made_up = made_up.to(torch.promote_types(made_up.dtype, torch.float32))
    hidden = is_hidden.reshape(-1, 1, side, side).to(made_up)
    hidden = hidden.repeat_interleave(images.shape[2] // side, 2).repeat_interleave(images.shape[3] // side, 3)
    errors = F.l1_loss(made_up, images.to(made_up), reduction="none") * hidden
    # The count is at least 1, because 0/0 would be NaN, and an example without a hidden patch would count as a failed one.
    return errors.flatten(1).sum(dim=1) / (hidden.flatten(1).sum(dim=1).clamp(min=1) * images.shape[1])
