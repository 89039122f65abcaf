"""Find the earlier private runs that trained a model's weights, so that a new ledger starts with the ε that they cost.

Trained tensors are recognised one by one, whatever was added to the model, merged into it or put around it since:

- by object, within the process;
- by value: *marks* of each trained tensor are kept in its ledger, and in a small register in the user's state folder. A mark
  is a hash of the values. Matrices also have marks of their values in half precision, so that they are recognised after a
  conversion;
- by the weights that result when a trained adapter is merged into its base. The register keeps the marks of some merged
  weights, and sketches of them, by which they are recognised after rounding or after another adapter was added: see
  `merges`.

Weights that were averaged, quantized or scaled, or that came from another machine without their ledger, are not recognised;
docs/trust/ledger.md says so. The register holds only digests of weights that a private run has released, and their cost.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from doppler_hf.privacy import LEDGER_NAME, PrivacyLedger
from doppler_hf.privacy.accounting.accounting import Spent, Trainings, is_continued_by, merged_runs
from doppler_hf.privacy.ledger.file import make_folder, write_whole
from doppler_hf.privacy.ledger.ledger import ledger_files, marks_in
from doppler_hf.privacy.ledger.record import MARK_LENGTH, split_marks
from doppler_hf.run.processes.processes import on_process_0
from doppler_hf.run.states_folder import make_states_folder, states_folder
from doppler_hf.run.weights.merges import (
    MOST_MERGES,
    AdaptersAtStart,
    Merge,
    MergedWeight,
    has_trained_adapter,
    merged_in,
    sketched,
)

# A mark of fewer values could belong to another tensor by chance.
_FEWEST_VALUES: Final = 32
# A mark uses about this many values of a tensor, evenly spread, since noise reaches every coordinate of trained tensors.
_MOST_VALUES: Final = 2**16
# In half precision, a run with a small learning rate leaves most values of a vector as they are, perhaps all. So vectors,
# and matrices with fewer values than this, have no mark of their values in half precision.
_FEWEST_HALVES: Final = 2**8
# So many weights have marks at an evaluation, where recognising the whole model is enough.
_FEW: Final = 8
# The settings of PEFT's configurations that say whether a new adapter leaves the model's output as it is.
_STARTS: Final = ("init_lora_weights", "init_ia3_weights", "init_weights")
# The most runs in the register. A further run removes the oldest.
_MOST_TRAININGS: Final = 300


class Record(NamedTuple):
    """The costs, marks and merges of one run's weights."""

    trainings: Trainings  # the cost of the weights, in this run and in the runs before it
    marks: frozenset[str]
    merges: tuple[Merge, ...]


class Past(NamedTuple):
    """The runs that trained a tensor of this process."""

    trainings: Trainings  # the cost of its last value
    begun: dict[str, Trainings]  # mark of a value with which a run began → the cost of that value


# The past of each trained tensor.
_BY_OBJECT: Final = WeakIdKeyDictionary()
# Records by run, for machines whose state folder cannot be written.
_OF_PROCESS: Final[dict[str, Record]] = {}


@final
class Lineage:
    """The private runs that have trained a model before this run, and the record of this run.

    Every process must create its object at the same moment, because parts of a weight are joined to be recognised.

    Attributes:
        earlier: What other runs have spent on the weights, by their ledgers.
    """

    def __init__(self, model: nn.Module, *, output_dir: str | Path, continued: PrivacyLedger | None = None) -> None:
        named = dict(model.named_parameters())
        self._begun = {name: _marks(parameter, both_halves=True) for name, parameter in named.items()}
        marks = frozenset().union(*(found.all for name, found in self._begun.items() if _is_distinctive(named[name])))
        found = on_process_0(lambda: _by_value(model, marks, Path(output_dir)))
        found += [
            trainings for name, parameter in named.items() for trainings in _by_object(parameter, self._begun[name].exact)
        ]
        self._at_start = merged_runs(found)
        self._adapters = AdaptersAtStart(model)
        own = [] if continued is None else continued.names_of_plans
        self.earlier: Trainings = {
            name: spent for name, spent in self._at_start.items() if not any(is_continued_by(name, plan) for plan in own)
        }

    def marks_of_trained(self, model: nn.Module, *, together: bool = True, most: int | None = None) -> frozenset[str]:
        """Return the marks of the weights that this run has trained so far.

        Weights that still have the value with which the run began are left out, since another model may have the same value.

        Args:
            model: The trained model.
            together: Whether every process calls this at the same moment. If not, sharded weights are left out, since no
                process can read a whole weight alone.
            most: The most weights whose marks are returned, evenly spread over the model; None for all.
        """
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and _is_distinctive(parameter) and (together or not isinstance(parameter, DTensor))
        }
        names = [*trained][:: 1 if most is None else max(1, math.ceil(len(trained) / most))]
        return frozenset().union(
            *(_marks(trained[name], both_halves=True).all - self._begun.get(name, _NO_MARKS).all for name in names)
        )

    def remember(self, model: nn.Module, ledger: PrivacyLedger, *, marks: frozenset[str], writes: bool) -> None:
        """Record the cost of the model's weights for later runs.

        Args:
            model: The model as the run leaves it.
            ledger: The ledger of the run.
            marks: The marks of the trained weights, as they are and as they were saved.
            writes: Whether this process writes the register; only one process does.
        """
        if ledger.steps_run == 0:
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                past = _BY_OBJECT.get(parameter, Past({}, {}))
                begun = {} if name not in self._begun else {self._begun[name].exact: self._at_start}
                _BY_OBJECT[parameter] = Past(ledger.trainings, past.begun | begun)
        merges, of_merged = self._merge(model)
        _add_to_record(ledger, marks | of_merged, merges, writes=writes)

    def remember_between_saves(self, model: nn.Module, ledger: PrivacyLedger, *, writes: bool) -> None:
        """Record marks of a few weights, by which the whole model is recognised if a callback of the user keeps it now.

        Every process must call this at the same moment.
        """
        if ledger.steps_run:
            _add_to_record(ledger, self.marks_of_trained(model, most=_FEW), [], writes=writes)

    def _merge(self, model: nn.Module) -> tuple[list[Merge], set[str]]:
        """Merge some adapted layers, and return sketches of these merges, and marks of the resulting weights."""
        merges: list[Merge] = []
        marks: set[str] = set()
        for layers, is_sketched in self._adapters.merges(model):
            for each in layers:
                marks |= _marks(each.after, both_halves=True).all - _marks(each.before, both_halves=True).all
            merges += [sketched(layers)] if is_sketched else []
        return [merge for merge in merges if merge], marks


def _add_to_record(ledger: PrivacyLedger, marks: frozenset[str], merges: list[Merge], *, writes: bool) -> None:
    # Earlier weights of this run may be loaded again, so their marks are kept, also the marks of another process.
    before = [_OF_PROCESS.get(ledger.run_id), _read_one(_register() / f"{ledger.run_id}.json")]
    known = [record for record in before if record is not None]
    record = Record(
        ledger.trainings,
        marks.union(*(each.marks for each in known)),
        tuple(dict.fromkeys([*(each for record in known for each in record.merges), *merges]))[-MOST_MERGES:],
    )
    _OF_PROCESS[ledger.run_id] = record
    if writes:
        _write(ledger.run_id, record)


def adapters_trained_by_others(model: nn.Module) -> list[str]:
    """Return the adapters that change the output of a layer, although a new adapter of their kind would not.

    Adapters whose initial weights change the output, such as PiSSA's, are left out. So are prompts, which start with random
    numbers.
    """
    found = []
    for name, config in getattr(model, "peft_config", {}).items():
        start = next((vars(config)[key] for key in _STARTS if key in vars(config)), False)
        if start in (True, "gaussian", "eva", "orthogonal") and has_trained_adapter(model, name):
            found.append(name)
    return found


# --- recognising ------------------------------------------------------------------------------------------------------


class Marks(NamedTuple):
    """The marks of a tensor."""

    exact: str
    halves: frozenset[str]  # the marks of its values in half precision, if it has many values

    @property
    def all(self) -> frozenset[str]:
        """All marks of the tensor."""
        return self.halves | {self.exact} if self.exact else frozenset()


_NO_MARKS: Final = Marks("", frozenset())


def _marks(value: Tensor, *, both_halves: bool = False) -> Marks:
    """Return the marks of a tensor; with `both_halves`, also the mark that it would have after a conversion to float16."""
    if not value.is_floating_point() or value.is_meta:
        return _NO_MARKS
    whole = value.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    values = whole.reshape(-1)[:: max(1, whole.numel() // _MOST_VALUES)]
    halves = [values] if value.ndim > 1 and value.numel() >= _FEWEST_HALVES else []
    halves += [values.half()] if halves and both_halves else []
    return Marks(_hash(values.float(), value.shape), frozenset(_hash(half.bfloat16(), value.shape) for half in halves))


def marks_of(value: Tensor) -> frozenset[str]:
    """Return the marks by which a tensor is recognised, also after a conversion to half precision; none if it has none."""
    return _marks(value, both_halves=True).all


def _hash(values: Tensor, shape: torch.Size) -> str:
    content = values.contiguous().cpu().view(torch.uint8).numpy()
    said = f"{list(shape)} {values.dtype} ".encode()
    return hashlib.sha256(said + content.tobytes()).hexdigest()[:MARK_LENGTH]


def _is_distinctive(value: Tensor) -> bool:
    """Return whether a tensor has so many values that no other tensor has the same values by chance."""
    return value.numel() >= _FEWEST_VALUES


def _by_object(parameter: Tensor, mark: str) -> list[Trainings]:
    past = _BY_OBJECT.get(parameter)
    if past is None:
        return []
    # The tensor may have been reset to its value before a run, as a notebook does for another trial.
    return [past.begun.get(mark, past.trainings)]


# --- what is known ----------------------------------------------------------------------------------------------------


def _by_value(model: nn.Module, marks: frozenset[str], output_dir: Path) -> list[Trainings]:
    """Return the cost of the runs whose weights the model holds, found by its marks and by adapters merged into it."""
    records = [*_OF_PROCESS.values(), *_read()]
    merged = merged_in(model, [(place, merge) for place, record in enumerate(records) for merge in record.merges])
    found = [
        record.trainings for place, record in enumerate(records) if place in merged or not marks.isdisjoint(record.marks)
    ]
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    source = Path(name) if name else None  # a model that was made from a configuration has the name ""
    folders = {output_dir, Path(), *([] if source is None else [source])}
    with contextlib.suppress(OSError):
        folders |= {path.parent for near in (output_dir.parent, Path()) for path in near.glob(f"*/{LEDGER_NAME}")}
    for folder in folders:
        # Checking a whole ledger takes as long as reading hundreds, so only ledgers with a known mark are checked.
        paths = [path for path in ledger_files(folder) if not marks.isdisjoint(marks_in(path))]
        ledgers = [ledger.when(marks) for ledger in map(_ledger, paths) if ledger is not None]
        found += [ledger.trainings for ledger in ledgers if ledger is not None]
    # The model may have been merged before it was saved, or its ledger may be an old one without marks.
    if source is not None and (ledger := _ledger(source)) is not None and _holds_any(source, marks):
        found.append(ledger.trainings)
    return found


def _ledger(path: Path) -> PrivacyLedger | None:
    with contextlib.suppress(FileNotFoundError, ValueError):  # there may be no file, or the file may not be a ledger
        return PrivacyLedger.load(path)
    return None


def _holds_any(folder: Path, marks: Iterable[str]) -> bool:
    """Return whether a weight file in a folder has a tensor with one of these marks, or True if no file can be read."""
    paths, sought = [*folder.glob("*.safetensors")], set(marks)
    try:
        for path in paths:
            with safe_open(path, framework="pt") as file:
                values = (file.get_tensor(name) for name in file.keys())  # noqa: SIM118 - a safetensors file is no dict
                if any(_is_distinctive(value) and not sought.isdisjoint(_marks(value).all) for value in values):
                    return True
    except (OSError, SafetensorError):
        return True
    return not paths


def _register() -> Path:
    return states_folder() / "trainings"


def _write(run: str, record: Record) -> None:
    """Write a record into the register, if its folder can be written, and remove the oldest of too many records."""
    trainings = {name: spent._asdict() for name, spent in record.trainings.items()}
    said = {"trainings": trainings, "marks": "".join(sorted(record.marks)), "merges": record.merges}
    with contextlib.suppress(OSError):
        register = _register()
        make_states_folder()
        make_folder(register)
        write_whole(register / f"{run}.json", json.dumps(said))
        by_age = sorted(register.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in by_age[:-_MOST_TRAININGS]:
            path.unlink(missing_ok=True)


def _read() -> list[Record]:
    return [record for path in _register().glob("*.json") if (record := _read_one(path)) is not None]


def _read_one(path: Path) -> Record | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the file may be missing, old or cut off
        said = json.loads(path.read_text("utf-8"))
        trainings = {name: Spent(**each) for name, each in said["trainings"].items()}
        merges = tuple(
            tuple(MergedWeight(*map(tuple, weight)) for weight in merge if len(weight) == len(MergedWeight._fields))
            for merge in said.get("merges", [])
        )
        return Record(trainings, split_marks(said["marks"]), merges)
    return None


def forget(run: str) -> None:
    """Remove a run from the register, as its weights are gone."""
    _OF_PROCESS.pop(run, None)
    with contextlib.suppress(OSError):
        (_register() / f"{run}.json").unlink(missing_ok=True)
