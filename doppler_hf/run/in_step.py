"""Passes of several processes in step, where the frozen weights lie in shards on all of them.

Before a layer computes, its weights are gathered, which every process must take part in. So a process that has no more
micro-batches, or whose memory does not suffice, would leave the others waiting. Before each gathering, and before each pass,
the processes therefore meet: each says in one word what it is about to do.

- All gather the same weights: they go on.
- All add up the clipped sums of the same layer, of weights that are trained in shards: they go on.
- One has failed for want of memory: all leave the pass, and begin another, in which that one takes half of its examples.
- One has no micro-batch left: it takes part with an example of which nothing is kept, until none has any left.
- One has ended with an error: all end, and say which one it was.

In the checks before the first step process 0 alone computes, and the others gather with it what it asks for.

Sensitivity. A pass that was left is part of no sum, nor is one without a micro-batch: its gradients are dropped before they
are clipped. Which parts are computed once more, and from which random numbers, follows from the memory of all processes. The
contribution of an example stays one clipped gradient under numbers that are as likely; see `halving`.
"""

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from doppler_hf.privacy.clipping.out_of_memory import is_out_of_memory
from doppler_hf.run.ended import OthersKnow, one_line_if_a_process_ends, returned

_Outcome = TypeVar("_Outcome")


class Word(enum.IntEnum):
    """What a process is about to do."""

    BEGIN = 0  # a pass; 1 if it has a micro-batch, or 0
    GATHER = 1  # the weights of a unit, by its number
    SERVE = 2  # whatever process 0 asks for
    FLOAT32 = 3  # gather in float32; 1 from here on, 0 no longer
    DONE = 4  # nothing more as process 0
    FAILED = 5  # nothing more in this pass, whose memory does not suffice
    ERROR = 6  # nothing more at all
    REDUCE = 7  # the clipped sums of a layer, by its number, or keep them


class Said(NamedTuple):
    """What a process says when all meet."""

    word: Word
    number: int


class PassLeft(Exception):
    """Another process had not enough memory for this pass, which is made once more."""


def out_of_step() -> OthersKnow:
    """Return the error of processes that gather other weights, or another number of them."""
    return OthersKnow(
        "All processes must gather the same weights in the same order under FSDP, got different ones: the model leaves out "
        "layers at random, or by what is in its examples, or is called on one process alone. Set the probability of that to "
        "0 (layerdrop), let a callback call the model on all, or take recipes/accelerate/ddp.yaml, with which each process "
        "has all weights."
    )


@final
class InStep:
    """The meetings of the processes that share the weights of a model.

    Args:
        root: The whole model.
        units: The modules whose weights are gathered, the same on every process.
        group: All processes, which send numbers of the processor.
        set_float32: Lets weights be gathered in float32, or in their own type again.
    """

    def __init__(
        self, root: FSDPModule, units: Sequence[FSDPModule], *, group: dist.ProcessGroup, set_float32: Callable[[bool], None]
    ) -> None:
        self._root, self._units, self._group, self._set_float32 = root, units, group, set_float32
        self._rank = dist.get_rank()
        self._role: Literal["alike", "leader", "server"] = "alike"
        for number, unit in enumerate(units):
            unit.set_custom_all_gather(_Gathering(self, number))  # type: ignore[arg-type]  # whose class has no public name

    # --- meetings -----------------------------------------------------------------------------------------------------

    def _meet(self, word: Word, number: int = 0) -> list[Said]:
        """Say a word, wait for all others, and return what each has said.

        Raises:
            RuntimeError: If a process has ended.
        """
        mine = torch.tensor([word, number], device="cpu")
        said = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with one_line_if_a_process_ends():
            dist.all_gather(said, mine, group=self._group)
        found = [Said(Word(int(each[0])), int(each[1])) for each in said]
        ended = [rank for rank, each in enumerate(found) if each.word is Word.ERROR and rank != self._rank]
        if ended:
            raise OthersKnow(
                f"All processes of a training must run to its end, got process {ended[0]} that has ended with an error, so "
                "that this one ends too. What it has printed says why."
            )
        return found

    def before_gathering(self, number: int) -> None:
        """Meet before the weights of a unit are gathered.

        Raises:
            PassLeft: If the memory of another process does not suffice for this pass.
            RuntimeError: If another process does something else, or has ended.
        """
        if self._role == "server":  # which has met already
            return
        if self._role == "leader":
            self._meet(Word.GATHER, number)
        else:
            self._agree(Said(Word.GATHER, number))

    def before_reducing(self, number: int) -> None:
        """Meet before the clipped sums of a layer are added up over the processes, or all of a pass are kept.

        Raises:
            PassLeft: If the memory of another process does not suffice for this pass.
            RuntimeError: If another process does something else, or has ended.
        """
        self._agree(Said(Word.REDUCE, number))

    def _agree(self, mine: Said) -> None:
        found = self._meet(*mine)
        if any(said.word is Word.FAILED for said in found):
            raise PassLeft
        if any(said != mine for said in found):
            raise out_of_step()

    @property
    def is_alone(self) -> bool:
        """Whether process 0 computes for all, and this is it."""
        return self._role == "leader"

    # --- the passes of a draw -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Begin a pass with all others, and tell them if it fails.

        Raises:
            PassLeft: If the memory of another process does not suffice for this pass, of which nothing was kept.
        """
        self._begin(has_micro_batch=True)
        with self._told():
            yield

    def complete(self, empty_pass: Callable[[], None]) -> None:
        """Take part in the passes of the others until none has a micro-batch left.

        Args:
            empty_pass: Makes a pass of which nothing is kept.
        """
        while self._begin(has_micro_batch=False):
            with contextlib.suppress(PassLeft), self._told():
                empty_pass()

    def _begin(self, *, has_micro_batch: bool) -> bool:
        """Return whether a process has a micro-batch, once all of them are about to begin a pass."""
        while True:
            found = self._meet(Word.BEGIN, int(has_micro_batch))
            words = {said.word for said in found}
            if words == {Word.BEGIN}:
                return any(said.number for said in found)
            # One that fails behind its last gathering is not waited for by those that are through.
            if words != {Word.BEGIN, Word.FAILED}:
                raise out_of_step()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (PassLeft, OthersKnow):
            self._root.reset_iter_state()
            raise
        except Exception as error:
            self._root.reset_iter_state()
            self._meet(Word.FAILED if is_out_of_memory(error) else Word.ERROR)
            raise

    # --- the checks before the first step -----------------------------------------------------------------------------

    def on_process_0(self, action: Callable[[], _Outcome]) -> _Outcome:
        """Let process 0 compute with the model alone, and return the outcome on every process.

        Args:
            action: What is computed; its outcome and its ValueErrors can be pickled.

        Raises:
            ValueError: If `action` did, on every process.
            RuntimeError: If process 0 has ended with another error.
        """
        if self._rank == 0:
            self._role = "leader"
            outcome: list[Any] = [None]
            try:
                outcome = [action()]
            except ValueError as error:
                outcome = [error]
            except OthersKnow:
                raise
            except Exception:
                self._meet(Word.ERROR)
                raise
            finally:
                self._role = "alike"
                self._root.reset_iter_state()
            self._meet(Word.DONE)
        else:
            self._role, outcome = "server", [None]
            try:
                self._serve()
            finally:
                self._role = "alike"
                self._root.reset_iter_state()
        with one_line_if_a_process_ends():
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        return returned(outcome[0])

    def _serve(self) -> None:
        while True:
            word, number = self._meet(Word.SERVE)[0]
            if word is Word.DONE:
                return
            if word is Word.FLOAT32:
                self._switch(is_wide=bool(number))
            elif word is Word.GATHER:
                self._units[number].unshard()
                self._units[number].reshard()
            else:
                raise out_of_step()

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        """Let process 0 compute with weights in float32, whatever type they are kept in."""
        assert self._role == "leader"
        self._meet(Word.FLOAT32, 1)
        self._switch(is_wide=True)
        try:
            yield
        finally:
            self._meet(Word.FLOAT32, 0)
            self._switch(is_wide=False)

    def _switch(self, *, is_wide: bool) -> None:
        self._root.reset_iter_state()
        self._set_float32(is_wide)


@final
class _Gathering:
    """How the weights of a unit are gathered: as torch does, after a meeting."""

    def __init__(self, in_step: InStep, number: int) -> None:
        self._in_step, self._number = in_step, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._in_step.before_gathering(self._number)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
