"""How much is learnt of few examples, and by what it can be told beforehand.

    python -m scripts.experiments.few_examples --data_dir data --output out/few_examples.jsonl

Nothing is tuned: the defaults train classifiers from scratch on the first examples of public data. The table is sorted by
the noise of the average of all gradients of the run, in units of the clip norm. Every run is a line of JSON.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from doppler_hf.filters import NoiseShape
from doppler_hf.run.plan import averaged_noise
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench.measure import append_json_line
from scripts.studies.data import Data, Sources
from scripts.studies.runs import Run, train
from scripts.studies.studies import Method
from scripts.studies.tasks import small_task

BATCH_SIZE = 32


@dataclass
class FewArguments:
    """The settings of the trainings."""

    data_dir: str = field(metadata={"help": "Folder with mnist/ and glue/sst2/."})
    output: str | None = field(default=None, metadata={"help": "File to which every run is added as a line of JSON."})
    tasks: list[str] = field(default_factory=lambda: ["digits", "mnist", "sst2-words"], metadata={"help": "Tasks."})
    examples: list[int] = field(default_factory=lambda: [100, 200, 400, 1000], metadata={"help": "N."})
    epsilons: list[float] = field(default_factory=lambda: [1.0, 3.0, 8.0], metadata={"help": "ε."})
    epochs: list[int] = field(default_factory=lambda: [3, 20], metadata={"help": "Epochs."})
    seeds: list[int] = field(default_factory=lambda: [0, 1], metadata={"help": "Seeds."})


def one(name: str, data: Data, *, epsilon: float, epochs: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Return what the seeds have learnt of all the data to train on."""
    num_examples = len(data.train)
    batch_size = min(BATCH_SIZE, num_examples // 2)
    steps = epochs * math.ceil(num_examples / batch_size)
    method = Method({"per_device_train_batch_size": batch_size, "max_steps": steps})
    results = [train(Run.of(name, small_task(name), data, method, epsilon, None, seed), data=data) for seed in seeds]
    first = results[0]
    noise = averaged_noise(
        first["noise_multiplier"], NoiseShape.parse(first["noise_shape"]), batch_size=batch_size, steps=steps
    )
    return {
        "task": name, "examples": num_examples, "epsilon": epsilon, "epochs": epochs, "averaged": noise,
        "noise_multiplier": first["noise_multiplier"], "noise_shape": first["noise_shape"],
        "accuracies": [result["report"] for result in results],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Train every combination, and print a line for each, the noisiest first."""
    with one_line_errors():
        (args,) = parse_args(FewArguments, argv=argv)
        tasks = {name: small_task(name) for name in args.tasks}
    for name, task in tasks.items():
        data = task.load(Sources(args.data_dir, "", Path("out/reproduce")))
        rows = []
        for some, epsilon, epochs in itertools.product(args.examples, args.epsilons, args.epochs):
            few = data._replace(train=data.train.select(range(some)))
            rows.append(one(name, few, epsilon=epsilon, epochs=epochs, seeds=args.seeds))
            append_json_line(rows[-1], args.output)
        print(name)
        for row in sorted(rows, key=lambda row: -row["averaged"]):
            accuracy = 100 * float(np.mean(row["accuracies"]))
            print(
                f"  {row['averaged']:.4f} C: {accuracy:.1f} %, N = {row['examples']}, ε = {row['epsilon']:g}, "
                f"{row['epochs']} epochs",
                flush=True,
            )


if __name__ == "__main__":
    main()
