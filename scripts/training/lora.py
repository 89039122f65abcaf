"""Low-rank adapters through PEFT: train A and B of W + (α/r)·B·A (Hu et al., *LoRA*, ICLR 2022), and the head in full.

Fewer trainable parameters get less noise in total, since noise is added to every coordinate of the gradient.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from doppler_hf.cli import lora
from scripts.training.arguments import refuse_unused_fields

if TYPE_CHECKING:
    from peft import LoraConfig

TaskType = Literal["SEQ_CLS", "CAUSAL_LM"] | None


@dataclass(frozen=True)
class LoraArguments:
    """The arguments of low-rank adaptation."""

    lora_r: int = HfArg(default=0, help="Rank of the adapters; 0 trains the whole model.")
    lora_alpha: int = HfArg(default=16, help="Scale α of the adapters, which are multiplied by α/r.")
    use_rslora: bool = HfArg(default=False, help="Multiply the adapters by α/√r, as rank-stabilized LoRA does.")
    lora_target_modules: str | None = HfArg(
        default=None, help="Modules to adapt, comma separated, e.g. query,value; by default PEFT's choice for the model."
    )

    def __post_init__(self) -> None:
        """Refuse what has no effect without adapters."""
        if self.lora_r == 0:
            refuse_unused_fields(self, "lora_alpha", "use_rslora", "lora_target_modules", beside="lora_r")


def add_lora(model: PreTrainedModel, args: LoraArguments, *, task_type: TaskType) -> Any:
    """Freeze the model (modified in place), and add adapters and a new head, unless `args.lora_r` is 0.

    PEFT knows the head from the task's name. For images it has none, and the head is `classifier`; a language model's is
    pretrained and stays frozen.
    """
    config = lora_config(args, task_type=task_type)
    if config is None:
        return model
    from peft import get_peft_model

    return get_peft_model(model, config)


def lora_config(args: LoraArguments, *, task_type: TaskType) -> "LoraConfig | None":
    """Return PEFT's description of the adapters, or None if `args.lora_r` is 0; for `task_type` see `add_lora`."""
    if args.lora_r == 0:
        return None
    return lora.lora_config(
        args.lora_r,
        target_modules=args.lora_target_modules,
        task_type=task_type,
        lora_alpha=args.lora_alpha,
        use_rslora=args.use_rslora,
    )
