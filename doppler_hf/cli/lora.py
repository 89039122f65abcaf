"""PEFT's description of low-rank adapters, from what a command line or a recipe says of them."""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from peft import LoraConfig

_HEADS: Final = r"(.*\.)?(classifier|score|qa_outputs)"


def lora_config(rank: int, *, target_modules: str | None, task_type: str | None, **options: Any) -> "LoraConfig":
    """Return the description of adapters.

    Args:
        rank: Rank of the adapters.
        target_modules: Layers with adapters, comma separated; by default PEFT's choice for the model.
        task_type: PEFT's name of the task, from which PEFT knows the head; None if it has none, as for images, whose head
            is `classifier`.
        **options: Further fields of `LoraConfig`.
    """
    from peft import LoraConfig

    names = None if target_modules is None else target_modules.split(",")
    return LoraConfig(
        r=rank,
        # PEFT understands all-linear only as a plain string.
        target_modules="all-linear" if names == ["all-linear"] else names,
        task_type=task_type,
        # PEFT trains the new head of these tasks as a whole, and would fail if it also had an adapter.
        exclude_modules=_HEADS if names == ["all-linear"] and task_type in ("TOKEN_CLS", "QUESTION_ANS") else None,
        # Without a task type, PEFT would freeze the head, which is new.
        modules_to_save=["classifier"] if task_type is None else None,
        **options,
    )
