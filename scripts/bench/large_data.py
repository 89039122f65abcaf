"""Time and memory of what a private run does with data sets of many rows.

    python -m scripts.bench.large_data --rows 100000,1000000,10000000,100000000 [--results out/large-data.jsonl]

Each piece of work is done in a child of the process: `draw`, `draw groups` (four of them) and `draw units` make a sampler
and draw from it; `lengths` and `units` read them off a memory-mapped table; `digest` is what processes compare before they
train; `run computed` and `run table` train a tiny model for a few steps, on rows that are computed when they are asked for
and on the table, of texts of 1 to 8 tokens with a user and a label. The expected batch size is the same for all.

Seconds are the processor's, so that other work on the machine does not count. Memory is what the process itself holds at
most (its anonymous memory; a mapped file is the system's) above what it held before.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.privacy import AllocationSampler
from doppler_hf.privacy.batching.columns import lengths_of, units_of
from doppler_hf.privacy.batching.same_data import digest_of_data
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench.measure import MIB, append_json_line, chosen, in_child, resident_bytes

ROWS_A_USER = 10
PART = 1_000_000


@dataclass
class BenchArguments:
    """The settings of the measurement."""

    rows: str = field(default="100000,1000000", metadata={"help": "Rows of the data sets; comma separated."})
    works: str = field(default="", metadata={"help": "Which of the pieces of work; comma separated. By default all."})
    batch_size: int = field(default=1000, metadata={"help": "Expected batch size."})
    steps: int = field(default=5, metadata={"help": "Steps, or draws."})
    folder: str | None = field(default=None, metadata={"help": "Where the tables are made. By default they are temporary."})
    results: str | None = field(default=None, metadata={"help": "File to which every result is added as a line of JSON."})


class Computed(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows that are computed when they are asked for."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        return row_of(index)


def row_of(index: int) -> dict[str, Any]:
    """Return a text of 1 to 8 tokens, a hash of the index, and its label."""
    length = 1 + index * 2654435761 % 2**32 * 8 // 2**32
    return {"input_ids": [5 + index % 90] * length, "labels": index % 2}


def write_table(path: Path, rows: int) -> None:
    """Write a table with those rows, part by part, and a user for each ten of them."""
    kind = pyarrow.list_(pyarrow.int32())
    schema = pyarrow.schema({"input_ids": kind, "labels": pyarrow.int64(), "user": pyarrow.int64()})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        for start in range(0, rows, PART):
            index = np.arange(start, min(rows, start + PART), dtype=np.uint64)
            lengths = (1 + index * np.uint64(2654435761) % np.uint64(2**32) * np.uint64(8) // np.uint64(2**32)).astype(int)
            tokens = np.repeat((5 + index % 90).astype(np.int32), lengths)
            texts = pyarrow.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), tokens)
            labels, users = (pyarrow.array(each.astype(np.int64)) for each in (index % 2, index // ROWS_A_USER))
            writer.write_batch(pyarrow.record_batch([texts, labels, users], schema=schema))


class Meter:
    """Notes the highest anonymous memory of this process, from a thread."""

    def __init__(self) -> None:
        self._before = self.peak = resident_bytes("RssAnon")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.peak = max(self.peak, resident_bytes("RssAnon"))

    def __enter__(self) -> "Meter":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, resident_bytes("RssAnon"))

    @property
    def bytes(self) -> int:
        """Return how much more it was than before."""
        return self.peak - self._before


class Clock(TrainerCallback):
    """Notes when the steps begin."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note it."""
        self.times.append(time.process_time())


def drawn(rows: int, args: BenchArguments, **options: Any) -> tuple[float, float]:
    """Make a sampler, draw from it, and return the seconds of the start and of a draw."""
    start = time.process_time()
    sampler = AllocationSampler(num_examples=rows, expected_batch_size=args.batch_size, **options)
    ready = time.process_time()
    for step in range(args.steps):
        sampler.draw(step)
    return ready - start, (time.process_time() - ready) / args.steps


def trained(data: Any, args: BenchArguments, folder: str) -> tuple[float, float]:
    """Train, and return the seconds up to the first step and those of a step."""
    config = BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    clock = Clock()
    start = time.process_time()
    trainer = DopplerTrainer(
        model=BertForSequenceClassification(config),
        args=DopplerTrainingArguments(
            output_dir=folder, noise_multiplier=1.0, max_steps=args.steps, per_device_train_batch_size=args.batch_size,
            report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
        ),
        train_dataset=data,
        data_collator=padded,
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    return clock.times[0] - start, (clock.times[-1] - clock.times[0]) / max(1, len(clock.times) - 1)


def padded(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch of the rows."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": tokens.gt(0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of some work, which has no steps."""
    start = time.process_time()
    work()
    return time.process_time() - start, float("nan")


def drawn_with_units(rows: int, path: Path, args: BenchArguments) -> tuple[float, float]:
    """Read the units and draw, with a tenth of the batch: so many examples come with a unit."""
    start = time.process_time()
    units = units_of(Dataset.from_file(str(path)), column="user")
    read = time.process_time() - start
    fewer = BenchArguments(batch_size=max(1, args.batch_size // ROWS_A_USER), steps=args.steps)
    ready, draw = drawn(rows, fewer, units=units)
    return read + ready, draw


def digested(rows: int, path: Path, args: BenchArguments) -> tuple[float, float]:
    """Return the seconds of a digest."""
    data = Dataset.from_file(str(path))
    sampler = AllocationSampler(num_examples=rows, expected_batch_size=args.batch_size, lengths=lengths_of(data))
    return timed(lambda: digest_of_data(data, sampler))


# The rows, the table and the settings → the seconds of the start and of a step.
WORKS: dict[str, Callable[[int, Path, BenchArguments], tuple[float, float]]] = {
    "draw": lambda rows, path, args: drawn(rows, args),
    "draw groups": lambda rows, path, args: drawn(rows, args, groups=4),
    "draw units": drawn_with_units,
    "lengths": lambda rows, path, args: timed(lambda: lengths_of(Dataset.from_file(str(path)))),
    "units": lambda rows, path, args: timed(lambda: units_of(Dataset.from_file(str(path)), column="user")),
    "digest": digested,
    "run computed": lambda rows, path, args: trained(Computed(rows), args, str(path.parent)),
    "run table": lambda rows, path, args: trained(
        Dataset.from_file(str(path)).remove_columns("user"), args, str(path.parent)
    ),
}


def measured(work: str, rows: int, path: Path, args: BenchArguments) -> tuple[float, float, int]:
    """Return the seconds of the start and of a step, and the most memory in bytes; called in a process of its own."""
    torch.set_num_threads(1)
    with Meter() as meter:
        start, step = WORKS[work](rows, path, args)
    return start, step, meter.bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one line for each number of rows and each piece of work."""
    with one_line_errors():
        (args,) = parse_args(BenchArguments, argv=argv)
        works = chosen("--works", args.works, WORKS) if args.works else [*WORKS]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for rows in map(int, args.rows.split(",")):
            path = Path(folder) / f"{rows}.arrow"
            write_table(path, rows)
            for work in works:
                start, step, most = in_child(measured, work, rows, path, args)
                print(
                    f"{rows:>11,} rows  {work:13} start {start:9.4f} s  step {step:9.4f} s  {most / MIB:9.1f} MiB",
                    flush=True,
                )
                result = {"rows": rows, "work": work, "start_s": start, "step_s": step, "bytes": most}
                append_json_line(result | {"settings": asdict(args)}, args.results)
            path.unlink()


if __name__ == "__main__":
    main()
