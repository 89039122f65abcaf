"""What a head that was fitted before the training could win, if fitting it cost no privacy.

    python -m scripts.experiments.head_first --data_dir data --encoder model --output out/head_first.jsonl

A private warm start would spend a part of ε on a first head, say from the noisy means of the classes. Here the head is the
logistic regression on what it is given at the start, by all training examples and paid by nobody, which bounds what such
a start could win. Adapters and head then train as they do without it. Every run is a line of JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench.measure import append_json_line
from scripts.studies.data import Data, Sources
from scripts.studies.runs import Run, train
from scripts.studies.studies import shaped
from scripts.studies.tasks import small_task

TOGETHER = 256


@dataclass
class HeadFirstArguments:
    """The settings of the trainings."""

    data_dir: str = field(metadata={"help": "Folder with glue/TASK/."})
    encoder: str = field(metadata={"help": "Folder of a BERT-like encoder."})
    output: str | None = field(default=None, metadata={"help": "File to which every run is added as a line of JSON."})
    cache_dir: str = field(default="out/reproduce", metadata={"help": "Where the outputs of frozen layers are kept."})
    tasks: list[str] = field(default_factory=lambda: ["sst2"], metadata={"help": "Tasks."})
    rates: list[float] = field(default_factory=lambda: [0.008, 0.016], metadata={"help": "First learning rates."})
    seeds: list[int] = field(default_factory=lambda: [100, 101], metadata={"help": "Seeds."})
    epsilon: float = field(default=3.0, metadata={"help": "ε."})


@torch.no_grad()
def fitted_head(data: Data) -> nn.Linear:
    """Return the head of the logistic regression on what an untrained network gives its head, for two classes."""
    from sklearn.linear_model import LogisticRegression

    network, seen, labels = data.network().eval(), [], []
    network.classifier.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for start in range(0, len(data.train), TOGETHER):
        rows = data.train.__getitems__([*range(start, min(start + TOGETHER, len(data.train)))])
        batch = data.collator(rows)
        labels.append(batch.pop("labels"))
        network(**batch)
    fit = LogisticRegression(max_iter=1000).fit(torch.cat(seen).numpy(), torch.cat(labels).numpy())
    head = nn.Linear(fit.coef_.shape[1], 2)
    weight, bias = torch.from_numpy(fit.coef_[0]).float() / 2, float(fit.intercept_[0]) / 2
    head.weight.copy_(torch.stack([-weight, weight]))
    head.bias.copy_(torch.tensor([-bias, bias]))
    return head


def beginning_with(data: Data, head: nn.Linear) -> Data:
    """Return the data, whose networks begin with a head."""

    def network() -> nn.Module:
        made = data.network()
        made.classifier.load_state_dict(head.state_dict())
        return made

    return data._replace(network=network)


def main(argv: Sequence[str] | None = None) -> None:
    """Train every combination, and print a line for each."""
    with one_line_errors():
        (args,) = parse_args(HeadFirstArguments, argv=argv)
        tasks = {name: small_task(name) for name in args.tasks}
    for name, task in tasks.items():
        data = task.load(Sources(args.data_dir, args.encoder, Path(args.cache_dir)))
        starts = {"new": data, "fitted": beginning_with(data, fitted_head(data))}
        for rate in args.rates:
            for start, begun in starts.items():
                for seed in args.seeds:
                    run = Run.of(name, task, data, shaped("auto", "auto"), args.epsilon, rate, seed)
                    result = train(run, data=begun)
                    append_json_line({"task": name, "head": start, "rate": rate, "seed": seed} | result, args.output)
                    chosen, reported = (100 * result[part] for part in ("tuning", "report"))
                    print(f"{name}, {start} head, {rate:g}, seed {seed}: {chosen:.2f}, {reported:.2f} %", flush=True)


if __name__ == "__main__":
    main()
