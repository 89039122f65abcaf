"""Checks of a model's settings, before the engine is attached."""

import inspect
import itertools
import re
import sys
from importlib.metadata import version
from typing import Any, Final

import torch
from torch import nn

from doppler_hf.errors import Refusal
from doppler_hf.preflight.autograd_check.without_randomness import owners_of_options
from doppler_hf.privacy.batching.probe import Probe
from doppler_hf.privacy.clipping.layers import listed
from doppler_hf.privacy.known_numbers import refuse_generators_of_layers
from doppler_hf.privacy.losses import without_adapters
from doppler_hf.run.private_run import PrivateRun

ENOUGH_TOKENS: Final = 2**20  # This is more than a micro-batch has.
# LayerDrop leaves out a layer for all rows, and SpecAugment rounds the number of its masks in the same way for all rows.
_OF_TABLES: Final = re.compile(r"(?:^|\.)(?:pos|sin|cos)_dropout$")
_OF_MASKS: Final = re.compile(r"(?:^|\.)masked_spec_embed$")
_FOR_ALL_ROWS: Final = re.compile(r"^(?:\w+_)?layer_?drop$|^mask_\w*prob$")

# Values of PEFT's `init_lora_weights` that compute initial weights from batches of a data set.
_OF_DATA: Final = ("eva", "corda", "lora_ga")
# These also subtract the initial adapter from the base model's weights. PEFT cannot do that again when it loads an adapter.
_CHANGE_THE_BASE: Final = ("corda", "lora_ga")


def refuse_model(run: PrivateRun, trainer: Any) -> None:
    """Refuse a model whose settings show that it cannot be trained privately."""
    model, probe = trainer.model, run.probe
    _refuse_trainable(model)
    refuse_hooks_of_gradients(model)
    _refuse_mixed_adapters(model)
    _refuse_adapters(model)
    _refuse_prefixes_without_a_place(model)
    _refuse_merged_adapters(model)
    refuse_generators_of_layers(model)
    _refuse_changing_positions(model, probe)
    _refuse_mask_without_effect(model, probe)
    _refuse_sparse_embeddings(model)
    scaled = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq and module.weight.requires_grad
    ]
    if scaled:
        run.notes.append(
            f"{listed(scaled)} has scale_grad_by_freq=True: a private run divides the gradient of a token by its count in "
            "the record, not by its count in the batch, through which one record would change what the others contribute"
        )
    _refuse_quantized(model)
    # Sensitivity: each expert of NLLB's mixture takes so many tokens of the whole micro-batch, and leaves out the rest.
    small: list[Any] = [module for module in model.modules() if "moe_eval_capacity_token_fraction" in vars(module)]
    if any(module.expert_capacity is None or module.expert_capacity < ENOUGH_TOKENS for module in small):
        raise Refusal(
            "expert-capacity",
            f"The expert_capacity must be at least {ENOUGH_TOKENS} in a private run; got {small[0].expert_capacity}. "
            "Otherwise, experts drop tokens of one record depending on the other records. Load the model with "
            f"from_pretrained(..., expert_capacity={ENOUGH_TOKENS}).",
        )
    # Sensitivity: the inverse in Nyströmformer's attention begins with the largest sum of columns in the whole micro-batch.
    if any(vars(module).get("init_option") == "original" for module in model.modules()):
        raise Refusal(
            "maximum-over-batch",
            "Nyströmformer's attention has init_option='original', which divides by a maximum over all records of a batch, "
            "so one record would change the gradients of the others. Change it: for module in model.modules(): "
            "module.init_option = 'exact'.",
        )
    _refuse_shared_random_numbers(model)


def refuse_torchao(model: nn.Module) -> None:
    """Refuse a model whose weights torchao has quantized, or whose layers compute in its 8-bit floats."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    quantized = [name for name, tensor in tensors if _is_of_torchao(tensor)]
    # Sensitivity: the scale of Float8Linear is by default the largest number of the whole micro-batch.
    layers = [name for name, module in model.named_modules() if type(module).__module__.startswith("torchao.float8")]
    if quantized or layers:
        what = "has weights that torchao has quantized" if quantized else "computes in torchao's 8-bit floats"
        why = (
            "Per-sample gradients cannot be computed with these tensors, and some layers have no gradient at all"
            if quantized
            else "The scale of these floats is computed from all records of a batch, so one record would change others"
        )
        raise Refusal(
            "torchao-weights",
            f"The model {what}, such as {(quantized or layers)[0]!r}. {why}. Load the model with "
            "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0) or in 4 bits, or without quantization and with "
            "dtype=torch.bfloat16, and train LoRA.",
        )


def _is_of_torchao(tensor: torch.Tensor) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torchao"


def refuse_hooks_of_gradients(model: nn.Module) -> None:
    """Refuse a hook on the gradient of a trained parameter, whether the user or a callback has set it."""
    # Privacy: what a hook makes of a gradient is not clipped, and the noise would move what a hook leaves out.
    hooked = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
    ]
    if hooked:
        raise Refusal(
            "gradient-hook",
            f"The gradient of {listed(hooked)} has a hook (register_hook or register_post_accumulate_grad_hook). A private "
            "run computes per-sample gradients and adds noise, so the hook has no effect, and the noise would also change "
            "the weights that the hook masks. Remove the hook. If Weights & Biases has set it, set the environment variable "
            "WANDB_WATCH to 'false' or 'parameters'. To train only the rows of new tokens, use PEFT: "
            "TrainableTokensConfig(target_modules=[EMBEDDINGS], token_indices=[...]), or LoraConfig's "
            "trainable_token_indices.",
        )


def _refuse_mixed_adapters(model: nn.Module) -> None:
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftMixedModel):
        raise Refusal(
            "mixed-adapters",
            "The model is a PeftMixedModel. Mixing several kinds of adapters is not supported in a private run. Use "
            "adapters of one kind: get_peft_model(model, config) without mixed=True.",
        )


# Variants of LoRA whose layers compute more than LoRA's product: field of the config → name, and why it cannot be trained.
_VARIANTS: Final = {
    "alora_invocation_tokens": ("aLoRA", "which starts the adapter at a different token in each record"),
    "velora_config": ("VeLoRA", "which compresses the activations from which gradients are computed"),
    "monteclora_config": ("MonteCLoRA", "which samples the adapter's weights once for all records of a batch"),
}


def _refuse_variants_of_lora(model: nn.Module, config: Any) -> None:
    for field, (name, reason) in _VARIANTS.items():
        if getattr(config, field, None):
            raise Refusal(
                "variant-of-lora",
                f"The adapters use {name}, {reason}, so per-sample gradients cannot be computed. Leave {field} out of the "
                "LoraConfig.",
            )
    if getattr(config, "target_parameters", None):
        wrapped = [
            name
            for name, module in model.named_modules()
            if "parameter_name" in vars(module) and isinstance(vars(module)["_modules"].get("base_layer"), nn.Linear)
        ]
        if wrapped:
            raise Refusal(
                "weight-of-a-linear-layer",
                f"target_parameters names the weight of a linear layer ({listed(wrapped)}). PEFT then adds the adapter to "
                "the weight itself, so per-sample gradients cannot be computed. Name the layer in target_modules instead.",
            )


def _refuse_adapters(model: nn.Module) -> None:
    for name, config in getattr(model, "peft_config", {}).items():
        _refuse_variants_of_lora(model, config)
        if "orth_reg_weight" in vars(config):  # PEFT always adds AdaLoRA's penalty
            raise Refusal(
                "penalty-on-weights",
                f"Adapters of {type(config).__name__} add a penalty on the weights to the loss, which belongs to no single "
                "record, so it has no per-sample gradient. Use LoraConfig.",
            )
        # Privacy: such weights move with each record, before a step is counted.
        if (kind := vars(config).get("init_lora_weights")) in _OF_DATA:
            as_loaded = f"model.peft_config[{name!r}].init_lora_weights = True"
            mend = f"say so before train(): {as_loaded}"
            if kind in _CHANGE_THE_BASE:
                folder = "'start'" if name == "default" else f"'start/{name}', adapter_name={name!r}"
                mend = (
                    "save the adapter and the base model, which PEFT has changed too, and train what you load: "
                    f"{as_loaded}; model.save_pretrained('start'); model.unload().save_pretrained('base'); model = "
                    f"PeftModel.from_pretrained({type(without_adapters(model)).__name__}.from_pretrained('base'), {folder}, "
                    "is_trainable=True)"
                )
            raise Refusal(
                "adapters-of-data",
                f"The setting init_lora_weights={kind!r} computes the adapters' initial weights from data, which ε does "
                f"not cover. Leave init_lora_weights out. If these data were public, {mend}.",
            )


# For these tasks PEFT looks into the signature of the model's forward before it passes a prefix on to it.
_READ_FOR_PREFIXES: Final = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
_PREFIXES: Final = ("PREFIX_TUNING", "CARTRIDGE")


def _refuse_prefixes_without_a_place(model: Any) -> None:
    """Refuse a prefix for a model that takes none, which PEFT would notice in the first step."""
    for config in getattr(model, "peft_config", {}).values():
        if config.peft_type not in _PREFIXES or config.task_type not in _READ_FOR_PREFIXES:
            continue
        encoder = getattr(model, "transformer_backbone_name", None)
        parts = [model.base_model, *([model.base_model.get_submodule(encoder)] if encoder else [])]
        if not any("past_key_values" in inspect.signature(part.forward).parameters for part in parts):
            raise Refusal(
                "no-place-for-a-prefix",
                f"The installed PEFT cannot give a prefix to {type(model.base_model).__name__} of Transformers "
                f"{version('transformers')}, because its forward has no argument past_key_values. Use "
                "PromptTuningConfig or LoraConfig instead.",
            )


def _refuse_merged_adapters(model: nn.Module) -> None:
    merged = [name for name, module in model.named_modules() if getattr(module, "merged_adapters", None)]
    if merged and getattr(model, "peft_config", None):
        raise Refusal(
            "adapters-merged",
            f"The adapters of {listed(merged)} are merged into the weights, and merged adapters are not trained. Call "
            "model.unmerge_adapter() before train().",
        )


def _refuse_sparse_embeddings(model: nn.Module) -> None:
    # Privacy: noise goes to every row of the table, so its gradient is never sparse.
    sparse = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.sparse and module.weight.requires_grad
    ]
    if sparse:
        raise Refusal(
            "sparse-embedding",
            f"{listed(sparse)} has sparse=True, but the private gradient of a table has noise in every row. Change it: "
            "for module in model.modules(): module.sparse = False.",
        )


def _refuse_shared_random_numbers(model: nn.Module) -> None:
    # Sensitivity: a draw is cut into micro-batches by what is in it, so that one more example moves the borders, and
    # examples there would follow numbers that all rows of another micro-batch share.
    shared: set[str] = set()
    for owner in owners_of_options(model):  # a model copies options from its config, and the copy counts
        is_masking = getattr(owner, "apply_spec_augment", True)
        for name, value in vars(owner).items():
            is_on = isinstance(value, float) and value > 0.0 and (is_masking or not name.startswith("mask"))
            if is_on and _FOR_ALL_ROWS.search(name):
                shared.add(name)
    if shared:
        names = ", ".join(map(repr, sorted(shared)))
        # Without masks nothing uses the vector that SpecAugment puts in their place.
        fillers = [name for name, each in model.named_parameters() if each.requires_grad and _OF_MASKS.search(name)]
        frozen = "; ".join(f"model.get_parameter({name!r}).requires_grad_(False)" for name in fillers)
        is_masked = frozen and any(name.startswith("mask") for name in shared)
        then = f". Then freeze the vector that fills the masks, which is no longer used: {frozen}" if is_masked else ""
        raise Refusal(
            "shared-random-numbers",
            f"{names} must be 0 in a private run, because all records of a micro-batch share these random numbers. Set it "
            "to 0 in the model and its configs: for m in model.modules(): [setattr(o, n, 0.0) for o in (m, getattr(m, "
            f"'config', m)) for n in ({names},) if hasattr(o, n)]{then}.",
        )
    # DeBERTa and Funnel have dropout on tables of positions, which have no batch dimension.
    of_tables = [name for name, module in model.named_modules() if _OF_TABLES.search(name) and vars(module).get("p", 0) > 0]
    if of_tables:
        raise Refusal(
            "shared-random-numbers",
            f"{listed(of_tables)} must have p = 0 in a private run, because all records of a micro-batch share this "
            "dropout. Set it to 0: [setattr(m, 'p', 0.0) for n, m in model.named_modules() "
            "if n.endswith(('pos_dropout', 'sin_dropout', 'cos_dropout'))].",
        )


def _refuse_quantized(model: nn.Module) -> None:
    quantized = sys.modules.get("bitsandbytes")
    if quantized is None:
        return
    modules = dict(model.named_modules())
    # Sensitivity: a number above the threshold takes its column out of the 8 bits for the rows of all examples.
    mixing = [
        module for module in modules.values() if isinstance(module, quantized.nn.Linear8bitLt) and module.state.threshold
    ]
    if mixing:
        raise Refusal(
            "int8-outliers",
            f"The llm_int8_threshold must be 0 in a private run; got {mixing[0].state.threshold}. Otherwise, a large "
            "activation of one record changes how the activations of the others are rounded. Load the model with "
            "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0).",
        )
    # On some CPUs an evaluation stores such weights again, with different scales. Then no gradient can pass through them.
    for name, module in modules.items():
        if isinstance(module, quantized.nn.Linear4bit) and module.weight.device.type == "cpu":
            is_packed = bool(vars(module.weight.quant_state).get("packing_format_for_cpu"))
            if is_packed or module.support_avx512bf16_for_cpu:
                raise Refusal(
                    "weights-rewritten",
                    f"The layer {name!r} rewrites its 4-bit weights during evaluation on this CPU, after which no gradient "
                    "passes through it. Load the model again, and before you use it run: for module in model.modules(): "
                    "module.support_avx512bf16_for_cpu = False.",
                )


def _refuse_mask_without_effect(model: nn.Module, probe: Probe) -> None:
    """Refuse a mask of pairs of tokens of ones and zeros where the model's attention adds it to the scores."""
    base = without_adapters(model)
    mask = probe.collated([*probe.short, probe.longest]).get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or type(base).__module__.partition(".")[0] != "transformers":
        return
    is_eager = getattr(base.config, "_attn_implementation", None) == "eager"
    if (mask.dtype == torch.bool and not is_eager) or not ((mask == 0) | (mask == 1)).all() or mask.all() or not mask.any():
        return
    kind = "True and False" if mask.dtype == torch.bool else "0 and 1"
    other = ", or load the model with attn_implementation='sdpa'" if mask.dtype == torch.bool else ""
    raise Refusal(
        "mask-without-effect",
        f"The collator's attention_mask has {kind} for each pair of tokens, but this model's attention expects a mask that "
        "it can add to its scores: 0 for visible tokens, a very negative number for hidden ones. With the collator's mask "
        "it would attend to padding and all hidden tokens. Return torch.where(mask.bool(), 0.0, "
        f"torch.finfo(torch.float32).min) as attention_mask{other}.",
    )


def _refuse_changing_positions(model: nn.Module, probe: Probe) -> None:
    # Sensitivity: such rotary embeddings change for every row of a batch that has an example beyond the length of
    # pretraining.
    limits = [limit for module in model.modules() for limit in _limits_of(module)]
    if not limits or probe.are_of_one_length:
        return
    known = probe.longest_length
    if known is None or known > min(limits):
        raise Refusal(
            "positions-of-the-batch",
            f"Expected at most {min(limits)} tokens per record; got "
            f"{'unknown lengths' if known is None else 'longer texts'}. Beyond that length, this model's rotary embeddings "
            f"(dynamic or longrope) depend on the longest text of a batch. Tokenize with max_length={min(limits)} "
            "beforehand, pad all texts to one length, or use another rope_type.",
        )


def _limits_of(module: nn.Module) -> list[int]:
    """Return the lengths beyond which the positions of a module's rotary embeddings change."""
    config = vars(module).get("config")
    if "rope_type" not in vars(module) or config is None:
        return []
    rope = config.rope_parameters  # one set for the model, or one for each kind of layer
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if kind]
    changing = [kind for kind in kinds if kind["rope_type"] in ("dynamic", "longrope")]
    return [kind.get("original_max_position_embeddings") or config.max_position_embeddings for kind in changing]


def _refuse_trainable(model: nn.Module) -> None:
    trainable = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable and getattr(model, "peft_config", None):
        raise Refusal(
            "nothing-trained",
            "All parameters of the model are frozen, so nothing would be trained. PEFT loads adapters for inference unless "
            "it is told otherwise: pass is_trainable=True to PeftModel.from_pretrained, and leave inference_mode out of the "
            "adapter's configuration. If the adapters were switched off, call model.enable_adapter_layers().",
        )
    if not trainable:
        raise Refusal(
            "nothing-trained",
            "All parameters of the model are frozen, so nothing would be trained. PEFT freezes the base model, and "
            "merge_and_unload() leaves it frozen. Call model.requires_grad_(True) before you make the trainer, or train "
            "adapters: get_peft_model(model, LoraConfig(...)).",
        )
    for name, dtype in trainable.items():
        if dtype == torch.float16:
            raise Refusal(
                "float16-parameters",
                f"The trained parameter {name!r} is in float16, whose range is too small for per-sample gradients. Load the "
                "model with dtype=torch.float32 or torch.bfloat16.",
            )
        # Sensitivity: noise of real numbers would leave the imaginary parts as they are.
        if dtype.is_complex:
            raise Refusal(
                "not-real",
                f"The trained parameter {name!r} is complex ({dtype}), but the noise is real and would protect only its "
                "real part. Store its real and imaginary parts in the last dimension of a real parameter, and use "
                "torch.view_as_complex in the forward.",
            )
