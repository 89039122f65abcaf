"""A recipe for the commands that start a run from one."""

import pytest

from tests.support.folders import write_mnist

RECIPE = """
image_size: 8
patch_size: 4
hidden_size: 8
num_layers: 1
num_heads: 1
noise_multiplier: 2.0
target_delta: 1e-3
per_device_train_batch_size: 60
max_steps: 2
learning_rate: 1e-3
eval_strategy: steps
eval_steps: 1
save_strategy: steps
save_steps: 1
load_best_model_at_end: true
disable_tqdm: true
use_cpu: true
"""


@pytest.fixture
def recipe(tmp_path, own_caches):
    """A recipe that would evaluate and save, on forty images."""
    folder = write_mnist(tmp_path / "images", train=40, test=40, shape=(8, 8))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + f"dataset_dir: {folder}\noutput_dir: {tmp_path / 'out'}\n")
    return path
