"""Which of transformers' architectures train privately, which are refused, and why.

    python -m scripts.experiments.architectures --output out/architectures.jsonl

Every class of the installed transformers whose name ends as that of a task with a loss per example is built tiny, gets
random examples (`tiny_models`), and is trained for two private steps on the CPU. Beside the outcome stands the truth: by how
much plain autograd, in float64 and in training mode without dropout, changes the gradient of one example when another is
beside it. A refusal for neighbours is true if it does; a model that trains although it does was missed.

Every model is one line of JSON, written as it ends, from a process of its own with a time limit; what the file holds already
is not run again. The last lines printed are the tables of the results page.
"""

import collections
import concurrent.futures
import contextlib
import copy
import json
import math
import multiprocessing
import os
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import doppler_hf
from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.privacy.autograd_check.plain_autograd import gradients_of, norm_of
from doppler_hf.privacy.autograd_check.without_randomness import moved, without_coins
from doppler_hf.privacy.losses import per_sample_losses, token_task
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench.measure import append_json_line
from scripts.experiments.tiny_models import examples_of, model_names, padded, tiny_model

LAYER = "a layer without a rule"  # the cause of refusals that say nothing about neighbours
# What rounding leaves of a change: some models compute a part in float32 whatever their dtype.
ROUNDING = {"torch.float64": 1e-6, "torch.float32": 1e-3}


@dataclass
class ArchitectureArguments:
    """The settings of the survey."""

    output: str = field(metadata={"help": "File of results, a line of JSON a model; what it holds is not run again."})
    models: list[str] = field(default_factory=list, metadata={"help": "Names of model classes; by default all."})
    jobs: int = field(default=1, metadata={"help": "Processes at a time."})
    timeout: float = field(default=120.0, metadata={"help": "Seconds for one model."})


# --- one model ------------------------------------------------------------------------------------------------------------


def changes_of(model: PreTrainedModel, examples: Sequence[dict[str, Tensor]], *, dtype: torch.dtype) -> dict[str, float]:
    """Return by how much of its norm the gradient of the first example changes, in training mode without dropout.

    Returns:
        The change with another random state (`repeated`), beside an example of the same length (`beside`), and beside a
        longer one (`padded`).
    """
    first, longest = examples[0], examples[-1]
    other = {name: value.flip(0) if value.ndim else value for name, value in first.items()}
    model = copy.deepcopy(model).to(dtype)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others have no float64
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def gradient(batch: list[dict[str, Tensor]], *, seed: int = 0) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in padded(batch).items()}
        return gradients_of(per_sample_losses(model, inputs, base_model=model)[:1], trained)

    with moved(model), without_coins(model):
        alone = gradient([first])

        def change(found: dict[str, Tensor]) -> float:
            zero = torch.zeros((), dtype=dtype)
            rest = {name: found.get(name, zero) - alone.get(name, zero) for name in {*found, *alone}}
            return norm_of(rest.values()) / max(norm_of(alone.values()), 1e-30)

        changes = {
            "repeated": change(gradient([first], seed=1)),
            "beside": change(gradient([first, other])),
            "padded": change(gradient([first, longest])),
        }
    if any(map(math.isnan, changes.values())):
        raise ValueError("A gradient must be a number, got NaN. Compute it in float32.")
    return changes


def truth_of(model: PreTrainedModel, examples: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Return the changes of a gradient in float64, in float32 if the model knows no other, or why there are none."""
    for dtype in (torch.float64, torch.float32):
        try:
            return {"by": changes_of(model, examples, dtype=dtype), "dtype": str(dtype)}
        except Exception as error:
            reason = short(error)
    return {"reason": reason}


def train(model: nn.Module, examples: Sequence[dict[str, Tensor]], **options: Any) -> None:
    """Train for two private steps, with some more training arguments."""
    with tempfile.TemporaryDirectory() as folder:
        args = DopplerTrainingArguments(
            output_dir=folder, noise_multiplier=1.0, per_device_train_batch_size=4, max_steps=2, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, seed=0, **options,
        )  # fmt: skip
        DopplerTrainer(model=model, args=args, train_dataset=examples, data_collator=padded).train()


def is_ours(error: Exception) -> bool:
    """Return whether an error is a refusal of this package."""
    # Not by a name in the path: a clone's folder, with the environment in it, has the package's.
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, ValueError) and raised_in.is_relative_to(Path(doppler_hf.__file__).parent)


def frozen_as_told(model: nn.Module, message: str) -> list[str]:
    """Freeze what a refusal of what no loss reaches tells to freeze, and return its names."""
    told = re.findall(r"model\.get_(submodule|parameter)\('([^']+)'\)", message)
    for kind, name in told:
        getattr(model, f"get_{kind}")(name).requires_grad_(False)
    return [name for _, name in told]


def fixed(model: PreTrainedModel, examples: Sequence[dict[str, Tensor]], message: str) -> dict[str, Any]:
    """Freeze what each message names, in all layers alike, until the model trains.

    Returns:
        The frozen names, their share of all parameters, and what the last message was if the model does not train.
    """
    frozen: list[str] = []
    while cause_of(message) == LAYER:
        # Of several layers a message has a star in the place of the number.
        named = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in re.findall(r"'([\w.*]+)'", message)}
        alike = {name: re.compile(re.escape(name).replace(r"\*", r"\d+") + r"(\..*)?") for name in named}
        chosen = {
            parameter: name
            for of_model, parameter in model.named_parameters()
            for name, pattern in alike.items()
            if pattern.fullmatch(of_model)
        }
        if not any(parameter.requires_grad for parameter in chosen):
            break
        for parameter in chosen:
            parameter.requires_grad_(False)
        frozen += sorted(set(chosen.values()))
        try:
            train(model, examples)
        except Exception as error:
            message = short(error)
            if not is_ours(error):
                break
        else:
            message = ""
            break
    still = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    return {"frozen": frozen, "share": round(still / model.num_parameters(), 3), "reason": message}


def survey(name: str) -> dict[str, Any]:
    """Build, train and compare one model, and return its line of the results."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    start, line = time.perf_counter(), {"model": name, "transformers": transformers.__version__}
    stage = "not built"
    try:
        model = tiny_model(name)
        line |= {"family": model.config.model_type, "parameters": model.num_parameters()}
        stage = "not run"
        examples = examples_of(model)
        line |= {"task": token_task(model) or "classification", "inputs": sorted(examples[0])}
        per_sample_losses(model, padded(examples[:3]), base_model=model).sum().backward()
        model.zero_grad()
        line["truth"] = truth_of(model, examples)
        stage = "failed"
        try:
            train(model, examples)
        except ValueError as error:
            line["unreached"] = frozen_as_told(model, str(error))
            if not line["unreached"]:
                raise
            train(model, examples)
        line["result"] = "trained"
    except Exception as error:
        no_rule = is_ours(error) and "no per-example loss" in str(error)
        line |= {"result": "no rule" if no_rule else "refused" if is_ours(error) else stage, "reason": short(error)}
        if line["result"] == "refused" and cause_of(str(error)) == LAYER:
            line["fixed"] = fixed(model, examples, str(error))
    return line | {"seconds": round(time.perf_counter() - start, 2)}


def short(error: Exception) -> str:
    """Return an error's kind, where it was raised, and the beginning of its message."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {' '.join(str(error).split())[:600]}"


def send(name: str, results: Connection) -> None:
    """Survey a model, without what a run prints."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        line = survey(name)
    results.send(line)


def in_own_process(name: str, *, timeout: float) -> dict[str, Any]:
    """Survey a model where its crash, or its time, costs nothing but its own line."""
    # A process forked from a fresh one that has imported all: torch's threads do not survive a fork of this one.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", DopplerTrainer.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(name, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return dict(receiver.recv())
        reason = f"no answer within {timeout:g} s"
    except EOFError:
        reason = "the process died"
    finally:
        process.kill()
        process.join()
    return {"model": name, "result": "failed", "reason": reason}


# --- the tables -----------------------------------------------------------------------------------------------------------


def verdict(line: dict[str, Any]) -> str:
    """Return a line's row in the table."""
    truth, result = line.get("truth", {}), str(line["result"])
    changed = max(truth["by"].values()) > ROUNDING[truth["dtype"]] if "by" in truth else None
    if result == "trained" and changed:
        return "trained, although its gradients change"
    if result == "trained" and line.get("unreached"):
        return "trained, once what no loss reaches was frozen"
    if result != "refused":
        return result
    if cause_of(line["reason"]) == "neighbours":
        return {True: "refused truly", False: "refused falsely", None: "refused, truth unknown"}[changed]
    return f"refused for {cause_of(line['reason'])}"


def cause_of(message: str) -> str:
    """Return what a refusal is for: neighbours, random numbers, statistics, a loss, or a layer that the engine lacks."""
    if re.search("changes with the examples beside it|in the places of others", message):
        return "neighbours"
    if "share these random numbers" in message:
        return "random numbers that rows share"
    if re.search("The (loss in the )?forward of", message):
        return "a loss of its own"
    return "statistics of the data" if re.search("mix(es)? the examples|writes ", message) else LAYER


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Return the number of models of each verdict, by task."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in lines:
        counts[verdict(line)][line.get("task", "?")] += 1
    tasks = sorted({task for row in counts.values() for task in row})
    rows = [f"| | {' | '.join(tasks)} | all |", "|---" * (len(tasks) + 2) + "|"]
    for name, row in sorted(counts.items(), key=lambda item: -item[1].total()):
        rows.append(f"| {name} | {' | '.join(str(row[task]) for task in tasks)} | {row.total()} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Survey the models that the file lacks, and print the table."""
    with one_line_errors():
        (args,) = parse_args(ArchitectureArguments, argv=argv)
        known = model_names()
        for name in args.models:
            if name not in known:
                raise ValueError(f"--models must be of transformers' model classes with a loss per example, got {name!r}.")
    path = Path(args.output)
    done = {line["model"]: line for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    names = [name for name in args.models or known if name not in done]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        running = [pool.submit(in_own_process, name, timeout=args.timeout) for name in names]
        for future in concurrent.futures.as_completed(running):
            line = future.result()
            append_json_line(line, args.output)
            done[line["model"]] = line
            print(f"{line['model']}: {verdict(line)}", flush=True)
    print("", table(done.values()), sep="\n")


if __name__ == "__main__":
    main()
