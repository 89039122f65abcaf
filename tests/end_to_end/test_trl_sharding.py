"""TRL's trainers on two processes that share the weights of a model train what one process does that has all of them."""

import functools
import os
import time
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from peft import LoraConfig

from tests.end_to_end.test_sharding import FSDP, shards, trained
from tests.end_to_end.test_sharding import pytestmark as needs_sharding
from tests.support import chat, processes
from tests.support.trainers import Recorder

pytest.importorskip("trl", reason="the extra trl is not installed")

from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer, DopplerSFTConfig, DopplerSFTTrainer

pytestmark = needs_sharding
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
TRAINERS = {
    "sft": (DopplerSFTTrainer, DopplerSFTConfig, chat.prompts),
    "dpo": (DopplerDPOTrainer, DopplerDPOConfig, chat.preferences),
}
CASES = ["sft-lora", "sft-full", "dpo-lora", "dpo-full"]


def run(folder, world, *, name):
    trainer_class, config_class, make = TRAINERS[name[:3]]
    data = on_disk(make, Path(folder) / f"data-{name}-{world}")
    args = config_class(
        output_dir=f"{folder}/{name}-{world}", use_cpu=True, bf16=False, gradient_checkpointing=False, noise_multiplier=0.5,
        noise_seed=3, per_device_train_batch_size=24 // world, base_optimizer="sgd", low_pass_filter="first-order-v1",
        learning_rate=0.1, max_steps=3, save_strategy="no", report_to="none", disable_tqdm=True,
        **(FSDP if world > 1 else {}),
    )  # fmt: skip
    trainer = trainer_class(
        model=chat.tiny_llama().double(), args=args, train_dataset=data, eval_dataset=data.select(range(4)),
        processing_class=chat.chat_tokenizer(), peft_config=LORA if name.endswith("lora") else None,
    )  # fmt: skip
    trainer.model.double()  # the adapters too
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    return {
        "gradients": torch.stack(recorder.gradients), "trained": trained(trainer.model),
        "shards": len(shards(trainer.model)),
        "loss": trainer.evaluate()["eval_loss"], "speaks": trainer.privacy.speaks_for(trainer.model),
    }  # fmt: skip


def on_disk(make, path):
    """The data in files that all processes read, where TRL leaves the reference's log-probabilities."""
    if os.environ["RANK"] == "0":
        make().save_to_disk(f"{path}.partial")
        Path(f"{path}.partial").rename(path)
    while not path.exists():
        time.sleep(0.05)
    return load_from_disk(str(path))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    return {world: processes.launch(__file__, folder, world, *CASES) for world in (1, 2)}


@pytest.mark.parametrize("name", CASES)
def test_what_two_processes_train_in_shards_is_what_one_trains(found, name):
    (one,), (first, second) = found[1][name], found[2][name]
    assert first["shards"] == second["shards"] > one["shards"] == 0
    for each in (first, second):
        torch.testing.assert_close(each["gradients"], one["gradients"], rtol=0, atol=1e-12)
        assert each["trained"].keys() == one["trained"].keys()
        for parameter, value in one["trained"].items():
            torch.testing.assert_close(each["trained"][parameter], value, rtol=0, atol=1e-12)
        assert each["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert each["speaks"]
    assert one["gradients"].abs().max() > 0


if __name__ == "__main__":
    processes.main({name: functools.partial(run, name=name) for name in CASES})
