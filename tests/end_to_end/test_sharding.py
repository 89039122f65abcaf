"""Processes that share the frozen weights train what those do that each have all of them, and what one process does."""

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertForSequenceClassification

from doppler_hf.audit import neighbour_distances
from doppler_hf.privacy import PrivacyLedger
from doppler_hf.run.interruptions import Terminated
from doppler_hf.run.resuming.checkpoints import is_whole
from tests.support import processes
from tests.support.folders import write_bert, write_glue
from tests.support.tiny import pad, text_data, tiny_bert
from tests.support.trainers import NoSignal, On, Recorder, at, checked_trainer_of

pytestmark = [
    pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch before 2.13 is refused"),
    # tests/run/processes/test_sharding.py has what one process does, and test_distributed.py what two do.
    pytest.mark.thorough,
]

FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
# Draws of some examples or none, in micro-batches whose number differs from process to process.
SMALL = dict(
    per_device_train_batch_size=4, gradient_accumulation_steps=1, max_tokens_per_micro_batch=12, max_steps=8, noise_seed=5
)


def lora_model():
    return get_peft_model(full_model(), LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))


def full_model():
    """A model of which all is trained."""
    return tiny_bert(num_hidden_layers=2)


def trainer_of(folder, world, *, name, model=lora_model, dtype=torch.float64, **options):
    own = dict(
        output_dir=f"{folder}/{name}-{world}", use_cpu=True, noise_multiplier=0.5, noise_seed=3, logging_steps=500,
        per_device_train_batch_size=24 // world, gradient_accumulation_steps=1, base_optimizer="sgd", learning_rate=0.1,
        low_pass_filter="first-order-v1", evaluated=text_data(7, seed=1),
    )  # fmt: skip
    return checked_trainer_of(Path(folder), model=model().to(dtype), **own | options)


def trained(model):
    return {name: whole(value).clone() for name, value in model.named_parameters() if value.requires_grad}


def whole(value):
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def shards(model):
    return {name: value for name, value in model.named_parameters() if isinstance(value, DTensor)}


def outcome(trainer):
    """Train, and return all that must be the same."""
    recorder = Recorder()
    trainer.add_callback(recorder)
    if trainer.args.process_index > 0:  # replicas must not rely on being built alike
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(1.0)
    trainer.train()
    ledger = trainer.privacy.ledger
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "gradients": torch.stack(recorder.gradients), "trained": trained(trainer.model), "steps": ledger.steps_run,
        "norms": torch.tensor(norms, dtype=torch.float64), "statement": ledger.statement, "models": ledger.models,
        "epsilon": trainer.privacy.epsilon(), "speaks": trainer.privacy.covers_weights_of(trainer.model),
        "shards": sorted(shards(trainer.model)),
    }  # fmt: skip


def run(folder, world, **options):
    return outcome(trainer_of(folder, world, **options))


def small_draws(folder, world, **options):
    """Count the passes in steps too, and the idle ones of them."""
    trainer, counts = trainer_of(folder, world, **(SMALL | options)), Counter()

    def watch(**_):
        run = trainer.privacy
        start_batch = run.start_batch

        def counted(*args, **more):
            start_batch(*args, **more)
            counts["idle"] += run.num_empty_passes

        run.start_batch = counted
        trainer.model.register_forward_pre_hook(lambda *_: counts.update(["passes"]))

    trainer.add_callback(On(train_begin=watch))
    return outcome(trainer) | {"passes": counts["passes"], "idle": counts["idle"]}


# Of weights in shards what is kept of them too: two states of the optimizer.
KINDS = {"lora": dict(model=lora_model), "full": dict(model=full_model, base_optimizer="adam_bc")}


def saved(folder, world, **options):
    """Train with checkpoints, evaluate, load the first of them and save it."""
    saving = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    # The loss falls with LoRA, and rises with all weights: the first checkpoint is the best, not the last.
    is_lora = options["model"] is lora_model
    first = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=is_lora)
    trainer = trainer_of(folder, world, **(saving | first | options))
    found = outcome(trainer)
    logits = trainer.predict(text_data(7, seed=1)).predictions
    trainer.save_model(f"{trainer.args.output_dir}/final")
    return found | {"logits": torch.tensor(logits), "best": trainer.state.best_model_checkpoint}


def resumed(folder, world, *, source, **options):
    """Go on from a checkpoint that another number of processes has written."""
    recorder = Recorder()
    trainer = trainer_of(folder, world, callbacks=[recorder], **options)
    out = Path(trainer.args.output_dir)
    if os.environ.get("RANK", "0") == "0":
        shutil.copytree(Path(folder) / source, out, dirs_exist_ok=True)
        shutil.rmtree(out / "checkpoint-4")
    if world > 1:
        torch.distributed.barrier()
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return {"gradients": torch.stack(recorder.gradients), "shards": [*shards(trainer.model)]}


def neighbours(folder, world, **options):
    """Return how far one example moves the sum of all processes."""
    trainer = trainer_of(
        folder, world, clipping="vanilla", noise_seed=None, per_device_train_batch_size=4 // world,
        gradient_accumulation_steps=3, per_sample_max_grad_norm=0.01, **options,
    )  # fmt: skip
    result = neighbour_distances(trainer, pairs=4, tolerance=1e-6)
    return {"distances": result.distances, "couplings": result.couplings}


def law(folder, world, **options):
    """Return the secret noise of this process's rows, step by step, in units of what it must be, and how many they are."""
    noise = []

    def note(model, **_):
        own = [p.grad.to_local().flatten() for p in model.parameters()]
        noise.append(torch.cat(own).double() / trainer.privacy.mechanism.noise_std(0))

    trainer = trainer_of(
        folder, world, dtype=torch.float32, cls=NoSignal, noise_seed=None, callbacks=[On(pre_optimizer_step=note)],
        grad_sample_self_check=False, max_steps=8, per_device_train_batch_size=8 // world, **options,
    )  # fmt: skip
    trainer.train()
    statement = trainer.privacy.ledger.statement
    expected = statement.noise_multiplier * statement.per_sample_max_grad_norm / 8
    return {
        "noise": torch.stack(noise),
        "std": trainer.privacy.mechanism.noise_std(0) / expected,
        "whole": sum(p.numel() for p in trainer.model.parameters()),
    }


class Collectives(TorchDispatchMode):
    """Counts what processes do together, by name and by whether it is about floating-point numbers."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2]
        if "c10d" in func.namespace and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            (first, *_) = pytree.tree_leaves(args)
            self.counts[name, first.is_floating_point()] += 1
        return func(*args, **(kwargs or {}))


OF_LOSS = 1  # the sum of the private training loss


def meetings(folder, world, **options):
    """Return what processes did together in the second step."""
    trainer = trainer_of(folder, world, dtype=torch.float32, **(SMALL | options))
    mode = Collectives()
    trainer.add_callback(On(step_end=at(1, lambda **_: mode.__enter__())))
    trainer.add_callback(On(step_end=at(2, lambda **_: mode.__exit__(None, None, None))))
    trainer.train()
    cut = [isinstance(p, DTensor) for p in trainer.model.parameters() if p.requires_grad]
    return {"counts": dict(mode.counts), "whole": cut.count(False), "cut": cut.count(True)}


# --- errors ---------------------------------------------------------------------------------------------------------------


def message_of(folder, world, *, act, step=1, **options):
    """Return how a training ends in which process 1 does something at a step."""
    trainer = trainer_of(folder, world, **options)
    if trainer.args.process_index == 1:
        trainer.add_callback(On(step_begin=at(step, lambda **_: act(trainer))))
    begin = time.monotonic()
    try:
        trainer.train()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "trained", time.monotonic() - begin


def terminated(folder, world, *, name, **options):
    """Return at which step a training ends whose process 1 gets SIGTERM, and what a resumed one then has."""
    own = dict(max_steps=6, noise_multiplier=None, target_epsilon=8.0, noise_seed=None) | options

    def end(**_):
        os.kill(os.getpid(), signal.SIGTERM)

    trainer = trainer_of(folder, world, name=name, **own)
    if trainer.args.process_index == 1:
        trainer.add_callback(On(step_end=at(3, end)))
    try:
        trainer.train()
    except Terminated:
        ended = trainer.state.global_step
    else:
        ended = "trained"
    before = trainer.privacy.ledger.epsilon()
    again = trainer_of(folder, world, name=name, **own)
    again.train(resume_from_checkpoint=True)
    return {
        "ended": ended, "steps": again.state.global_step, "epsilons": (before, again.privacy.ledger.epsilon()),
        "plans": len(again.privacy.ledger.plans), "handler": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    }  # fmt: skip


def fail_in_loss(trainer):
    def fail(model, inputs):
        raise ZeroDivisionError("in a loss of one's own")

    trainer.compute_per_sample_loss = fail


def move_a_weight(trainer):
    with torch.no_grad():
        next(value for value in trainer.model.parameters() if value.requires_grad).add_(1.0)


def move_a_shard(trainer):
    with torch.no_grad():
        next(value for value in shards(trainer.model).values() if value.to_local().numel()).to_local().add_(1.0)


LONG = dict(step=99, max_steps=101, grad_sample_self_check=False)
ADAM = dict(base_optimizer="adam_bc", logging_steps=1)
RARE = dict(per_device_train_batch_size=2, max_steps=6)
# Trainings of all weights, which in shards are to be those of processes that have all of them.
ALL_TRAINED = {
    "full": (run, ADAM),
    "small-full": (small_draws, {}),
    "shaped": (run, dict(noise_shape="banded:bands=3", **RARE)),
}
WHOLE = {"ddp": (run, {}), "small": (small_draws, {}), "meetings-ddp": (meetings, {})}
WHOLE |= {name: (function, dict(model=full_model, **options)) for name, (function, options) in ALL_TRAINED.items()}
CUT = {
    "law": (law, dict(model=full_model)),
    "meetings-lora": (meetings, {}),
    "meetings-full": (meetings, dict(model=full_model)),
    "neighbours-full": (neighbours, dict(model=full_model)),
    "small-fsdp": (small_draws, {}),
    "fsdp": (run, {}),
    "error": (message_of, dict(act=fail_in_loss)),
    "weight": (message_of, dict(act=move_a_weight, **LONG)),
    "shard": (message_of, dict(act=move_a_shard, **LONG)),
}
CUT |= {f"terminated-{kind}": (terminated, options) for kind, options in KINDS.items()}
CUT |= {f"{name}-cut": WHOLE[name] for name in ALL_TRAINED}
CUT |= {f"saved-{kind}": (saved, options) for kind, options in KINDS.items()}
CUT |= {f"resumed-{kind}": (resumed, dict(source=f"saved-{kind}-2", **options)) for kind, options in KINDS.items()}
CASES = {
    name: functools.partial(function, name=name, **options, **more)
    for cases, more in ((WHOLE, {}), (CUT, FSDP))
    for name, (function, options) in cases.items()
}


# --- the same training ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def two_processes(folder):
    whole = "ddp", "fsdp", "small", "small-fsdp"
    meetings = "meetings-ddp", "meetings-lora", "meetings-full"
    return processes.launch(__file__, folder, 2, *whole, *meetings, "full-cut", "law", timeout=600)


def assert_equal(runs, others):
    for found, expected in zip(runs, others, strict=True):
        assert torch.equal(found["gradients"], expected["gradients"])
        assert all(torch.equal(found["trained"][name], value) for name, value in expected["trained"].items())
        for name in ("statement", "epsilon", "steps", "models"):
            assert found[name] == expected[name]


def assert_close(found, expected, atol=1e-9):
    torch.testing.assert_close(found["gradients"], expected["gradients"], atol=atol, rtol=0)
    torch.testing.assert_close(found["trained"], expected["trained"], atol=atol, rtol=0)


def test_processes_with_shards_equal_those_with_all_weights(two_processes):
    with_all, with_shards = two_processes["ddp"], two_processes["fsdp"]
    assert_equal(with_shards, with_all)
    assert all(len(found["shards"]) > 30 and found["shards"][0] not in found["trained"] for found in with_shards)
    assert all(found["speaks"] and not expected["shards"] for found, expected in zip(with_shards, with_all, strict=True))


def test_two_processes_equal_one(two_processes, tmp_path):
    one = run(tmp_path, 1, name="one")
    for found in (*two_processes["ddp"], *two_processes["fsdp"]):
        assert_close(found, one)
        assert found["steps"] == one["steps"] == 4
        assert found["epsilon"] == one["epsilon"]


def test_a_process_without_examples_waits_for_nobody(two_processes):
    """Who has fewer micro-batches than another makes idle passes."""
    with_all, with_shards = two_processes["small"], two_processes["small-fsdp"]
    assert_equal(with_shards, with_all)
    own = [found["passes"] for found in with_all]
    assert own[0] != own[1]
    assert sum(found["idle"] for found in with_all) == 0
    assert all(found["idle"] > 0 for found in with_shards)
    assert len({found["passes"] for found in with_shards}) == 1
    assert [found["passes"] - found["idle"] for found in with_shards] == own


MEETING, SUM, SUM_OF_ROWS, GATHERING = ("allreduce_", False), ("allreduce_", True), ("reduce_scatter_tensor", True), (
    "_allgather_base_", True,
)  # fmt: skip


def test_processes_meet_once_a_step_beside_their_gatherings_and_one_reduction(two_processes):
    for found in two_processes["meetings-ddp"]:
        assert found["counts"] == {SUM: found["whole"] + OF_LOSS}
    for case, reduction, kind in (("lora", SUM, "whole"), ("full", SUM_OF_ROWS, "cut")):
        first, second = two_processes[f"meetings-{case}"]
        assert first == second
        assert first["counts"].pop(GATHERING) > 0
        assert first["counts"] == Counter({MEETING: 1, reduction: first[kind]}) + Counter({SUM: OF_LOSS})
        assert first[kind] == first["whole"] + first["cut"]


# --- trained weights in shards --------------------------------------------------------------------------------------------


def assert_as_one(found, one):
    """Assert that processes with shards of what is trained have the gradients, weights and norms of another training."""
    for each in found:
        assert_close(each, one)
        torch.testing.assert_close(each["norms"], one["norms"], atol=1e-9, rtol=0)
        assert each["trained"].keys() <= {*each["shards"]}
        assert each["speaks"]
        assert (each["epsilon"], each["steps"]) == (one["epsilon"], one["steps"])


def test_trained_weights_in_shards_equal_those_of_one_process(two_processes, tmp_path):
    cut = two_processes["full-cut"]
    assert_as_one(cut, run(tmp_path, 1, name="one", model=full_model, **ADAM))
    assert len(cut[0]["norms"]) == 4
    assert cut[0]["models"] == cut[1]["models"]


@pytest.fixture(scope="module")
def all_trained(folder):
    both = [*ALL_TRAINED, *(f"{name}-cut" for name in ALL_TRAINED)]
    return processes.launch(__file__, folder, 2, *both, "neighbours-full", timeout=900)


def assert_small_draws(with_all, cut):
    for found, expected in zip(cut, with_all, strict=True):
        assert_close(found, expected)
        assert found["passes"] - found["idle"] == expected["passes"]
        assert found["idle"] > 0
    assert len({found["passes"] for found in with_all}) > 1
    assert len({found["passes"] for found in cut}) == 1


@pytest.mark.slow
def test_a_process_without_examples_adds_zeros_and_keeps_its_rows(all_trained):
    assert_small_draws(all_trained["small-full"], all_trained["small-full-cut"])


def assert_law(runs):
    """Each coordinate has noise of the size that is accounted for, once, from a stream that no other process has."""
    assert sum(found["noise"].shape[1] for found in runs) == runs[0]["whole"]
    for found in runs:
        noise = found["noise"]
        assert found["std"] == pytest.approx(1.0, rel=1e-12)
        assert noise.count_nonzero() == noise.numel()
        error = 1 / math.sqrt(2 * noise.numel())
        assert abs(float(noise.std()) - 1) < 5 * error
        # Of every coordinate: none has the noise of another number of shards, or of two.
        squares = noise.square().mean(dim=0) * len(noise)
        assert float(squares.min()) > 0.1
        assert float(squares.max()) < 60  # chi-square of 8 degrees, once in 10⁹
    width = min(found["noise"].shape[1] for found in runs)
    flat = torch.stack([found["noise"][:, :width].flatten() for found in runs])
    between = torch.corrcoef(flat) - torch.eye(len(runs))
    assert float(between.abs().max()) < 5 / math.sqrt(flat.shape[1])
    # Nor does one draw what another has drawn somewhere else.
    numbers = torch.cat([found["noise"].flatten() for found in runs])
    assert len(numbers.unique()) > 0.999 * len(numbers)


def test_each_coordinate_has_its_noise_once(two_processes):
    assert_law(two_processes["law"])


def assert_neighbours(runs):
    for found in runs:
        assert 0.1 < found["distances"].min() <= found["distances"].max() <= 1 + 1e-6
        assert found["couplings"].max() < 1e-12


@pytest.mark.slow
def test_one_example_moves_the_sum_over_shards_by_at_most_c(all_trained):
    assert_neighbours(all_trained["neighbours-full"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_TRAINED)
def test_however_all_weights_are_trained(case, all_trained):
    for found, expected in zip(all_trained[f"{case}-cut"], all_trained[case], strict=True):
        assert_close(found, expected)
        assert found["trained"].keys() <= {*found["shards"]}


@pytest.mark.slow
def test_four_processes(tmp_path):
    """Of two labels, and of five rows, some processes have none."""
    cases = ["ddp", "fsdp", "full", "full-cut", "small-full", "small-full-cut", "law", "neighbours-full"]
    four = processes.launch(__file__, tmp_path, 4, *cases, timeout=900)
    assert_equal(four["fsdp"], four["ddp"])
    one = run(tmp_path, 1, name="one")
    for found in four["ddp"]:
        assert_close(found, one)
    assert_as_one(four["full-cut"], one := run(tmp_path, 1, name="one-full", model=full_model, **ADAM))
    for found in four["full"]:
        assert_close(found, one)
    assert_small_draws(four["small-full"], four["small-full-cut"])
    assert_law(four["law"])
    assert_neighbours(four["neighbours-full"])


# --- what is saved --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saving(folder):
    return processes.launch(__file__, folder, 2, *(f"saved-{kind}" for kind in KINDS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_gives_the_same_outputs_in_a_plain_process(kind, saving, folder):
    final = folder / f"saved-{kind}-2" / "final"
    if kind == "lora":
        model = PeftModel.from_pretrained(tiny_bert(num_hidden_layers=2).double(), final)
    else:
        model = BertForSequenceClassification.from_pretrained(final)
    batch = pad(list(text_data(7, seed=1)))
    batch.pop("labels")
    logits = model.double().eval()(**batch).logits
    for found in saving[f"saved-{kind}"]:
        assert found["best"].endswith("checkpoint-2")
        torch.testing.assert_close(found["logits"], logits, atol=1e-12, rtol=0)
    assert not PrivacyLedger.load(final).unknown_weights(final)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_on_another_number_of_processes(kind, saving, folder):
    """And one that is resumed by a process with all weights goes on alike."""
    uninterrupted = saving[f"saved-{kind}"][0]["gradients"][2:]
    for found in processes.launch(__file__, folder, 4, f"resumed-{kind}")[f"resumed-{kind}"]:
        assert found["shards"]
        torch.testing.assert_close(found["gradients"], uninterrupted, atol=1e-9, rtol=0)
    plain = resumed(folder, 1, name=f"resumed-{kind}", source=f"saved-{kind}-2", **KINDS[kind])
    torch.testing.assert_close(plain["gradients"], uninterrupted, atol=1e-9, rtol=0)


def test_processes_save_together_when_one_of_them_is_terminated(folder):
    found = processes.launch(__file__, folder, 2, *(f"terminated-{kind}" for kind in KINDS))
    for kind in KINDS:
        checkpoint = folder / f"terminated-{kind}-2" / "checkpoint-3"
        assert is_whole(checkpoint)
        assert not PrivacyLedger.load(checkpoint).unknown_weights(checkpoint)
        for each in found[f"terminated-{kind}"]:
            before, after = each.pop("epsilons")
            assert before == after <= 8.0
            assert each == {"ended": 3, "steps": 6, "plans": 1, "handler": True}


# --- the end of all -------------------------------------------------------------------------------------------------------


ENDED = "SharedError: Another process of this run has ended"


@pytest.mark.slow
def test_an_error_of_one_process_ends_the_others_by_the_closed_connection(tmp_path):
    (first, seconds), (second, _) = processes.launch(__file__, tmp_path, 2, "error")["error"]
    assert first.startswith(ENDED)
    assert second.startswith("ZeroDivisionError: in a")
    assert seconds < 60


@pytest.mark.slow
def test_what_all_processes_find_out_ends_all(tmp_path):
    words = "Failure: The weights on process 1 differ from those on process 0"
    for case, found in processes.launch(__file__, tmp_path, 2, "weight", "shard").items():
        assert [message.startswith(words) for message, _ in found] == [True, True], case


@pytest.mark.slow
def test_the_launcher_and_its_configuration(tmp_path):
    bert, data, out = write_bert(tmp_path / "bert"), write_glue(tmp_path / "sst2", "sst2"), tmp_path / "out"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0"),
            *(f"--config_file={root}/recipes/accelerate/fsdp2.yaml", "scripts/glue.py", "--task_name=sst2", "--use_cpu"),
            *(f"--dataset_dir={data}", f"--model_name_or_path={bert}", f"--output_dir={out}", "--report_to=none"),
            *("--max_steps=2", "--per_device_train_batch_size=4", "--noise_multiplier=1.0", "--lora_r=2"),
        ],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ledger = PrivacyLedger.load(out)
    assert ledger.statement.expected_batch_size == 8  # of two processes
    assert ledger.steps_run == 2
    assert not ledger.unknown_weights(out)
    assert json.loads((out / "all_results.json").read_text())["epsilon"] == pytest.approx(ledger.epsilon())


if __name__ == "__main__":
    processes.main(CASES)
