"""Keep terms, weights and outcomes the same on every process; each updates its weights from one private gradient."""

import contextlib
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeVar

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from doppler_hf.errors import Failure, Refusal
from doppler_hf.privacy import PrivacyStatement
from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.run.digests import replicas_digest
from doppler_hf.training_args import DopplerTrainingArguments
from doppler_hf.training_args.checks import planned_from

# Weights are compared every so many steps: the digest waits for all processes, and takes a thousandth of a step or less.
COMPARED_EVERY: Final = 100
# Arguments that may differ between processes: how each computes its share of a batch, which depends on its device, and what
# process 0 does alone. The product of batch size and accumulation is in the statement.
_OF_ONE_PROCESS: Final = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_tokens_per_micro_batch", "grad_sample_engine", "bf16",
    "plot_training_curve",
})  # fmt: skip
# Arguments on which the actions of all processes after a step depend.
_ACTIONS: Final = (
    "logging_strategy", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "eval_delay",
    "eval_on_start", "per_device_eval_batch_size", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
)  # fmt: skip
OF_EXAMPLES: Final = "train_dataset"
# The relative tolerance for noise multipliers, which different processors may compute with different last bits.
_ROUNDING: Final = 1e-6
_Outcome = TypeVar("_Outcome")
# Messages of gloo, which has no error class of its own, about a process that has ended.
_OF_A_SOCKET: Final = re.compile("gloo|Connection closed by peer|Connection reset by peer")


class SharedError(Failure):
    """An error that all processes raise, or that cannot be sent to the other processes."""


def another_has_ended() -> SharedError:
    """Return the error of a process that cannot continue because another process has ended."""
    return SharedError(
        "another-process-ended",
        "Another process of this run has ended, so this process ends too. The output of the other process says why. Start "
        "all processes again with resume_from_checkpoint=True.",
    )


@contextlib.contextmanager
def process_end_explained() -> Iterator[None]:
    """Replace torch's message about a socket by a line that says that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SharedError) or not (isinstance(error, dist.DistError) or _OF_A_SOCKET.search(str(error))):
            raise
        raise another_has_ended() from error


def on_process_0(action: Callable[[], _Outcome]) -> _Outcome:
    """Call `action` on process 0, and return its outcome, or raise its refusal, on every process."""
    found: list[Any] = [None]
    if PartialState().is_main_process:
        try:
            found = [action()]
        except ValueError as error:
            found = [error]
        except Exception:
            # The other processes wait for an outcome, and would otherwise wait until they time out.
            broadcast_object_list([another_has_ended()])
            raise
    with process_end_explained():
        (outcome,) = broadcast_object_list(found)
    if isinstance(outcome, ValueError | SharedError):
        raise outcome
    result: _Outcome = outcome
    return result


def on_all_processes(is_so: bool) -> bool:
    """Return, on every process, whether `is_so` is true on all of them."""
    return all(gather_object([is_so]))


def refuse_processes_that_draw_alone(world_size: int) -> None:
    """Refuse to add up sums if torch has a different number of processes than the arguments."""
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if processes != world_size:
        # Sensitivity: each process would draw from all examples. An example that several processes have drawn would count
        # several times in their sum.
        raise Refusal(
            "processes-sample-alone",
            f"The process group of torch has {processes} process{'es' * (processes > 1)}, but the training arguments have "
            f"{world_size}, so each process would sample its own batches. Start with `accelerate launch` or `torchrun`, or "
            "call torch.distributed.destroy_process_group() before train().",
        )


def compare_terms(
    statement: PrivacyStatement, args: DopplerTrainingArguments, model: nn.Module, *, data: DataDigest
) -> None:
    """Refuse, on every process, processes whose sampling, clipping, noise, steps or data differ."""
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    digest = hashlib.sha256(repr(sorted(trained.items())).encode()).hexdigest()[:8]
    given = [name for name in planned_from(DopplerTrainingArguments) if name not in _OF_ONE_PROCESS]
    own = {
        # These come first, since the statement follows from them. What the arguments leave open is known only there.
        **{name: getattr(args, name) for name in (*given, *_ACTIONS)},
        **asdict(statement),
        "what is trained of the model": f"{len(trained)} parameters ({digest})",
        OF_EXAMPLES: data,
    }
    refuse_different_terms(gather_object([own]))


def refuse_different_terms(terms: list[Mapping[str, Any]]) -> None:
    """Refuse terms that differ from those of process 0, given the terms of all processes in the order of their ranks."""
    for rank, name in itertools.product(range(1, len(terms)), terms[0]):
        first, other = terms[0][name], terms[rank][name]
        if name == OF_EXAMPLES:
            is_same = first.is_of_same_rows(other)
        elif name.endswith("noise_multiplier") and None not in (first, other):
            is_same = math.isclose(first, other, rel_tol=_ROUNDING)
        else:
            is_same = first == other
        if not is_same:
            # Sensitivity: the ledger has the terms of process 0. If another process used another norm, rate or noise, its
            # contribution would still be in the same sum. The message leaves out what is computed from the examples, because
            # messages end up in logs.
            values = "" if name == OF_EXAMPLES else f": {first!r} and {other!r}"
            raise Refusal(
                "processes-differ",
                f"{name} differs between process 0 and process {rank}{values}. Start all processes with the same arguments, "
                "model and checkpoint, and with the same data in the same order.",
            )


def broadcast_weights(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Give every process the weights and buffers of process 0, as DDP would, except for shards (in place)."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor.data, src=0, group=group)


def refuse_different_replicas(model: nn.Module, *, step: int) -> None:
    """Refuse to continue, on every process, if weights differ between processes in any bit."""
    digests = gather_object([replicas_digest(model)])
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        # Privacy: what each process released has noise, but some gradients were computed at weights that are saved nowhere.
        raise Failure(
            "replicas-differ",
            f"The weights on process {', '.join(others)} differ from those on process 0 after step {step}, for example "
            "because a callback changed them on one process only. Change weights on all processes alike, or not at all. "
            "Then resume from an earlier checkpoint. The steps after it are repeated and count twice: with target_epsilon "
            "the run ends that many steps early, and with noise_multiplier ε grows.",
        )
