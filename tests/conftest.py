"""What all tests share: one thread each, no network, and a tiny model with its data."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

from tests.support.tiny import text_data, tiny_bert

torch.set_num_threads(1)  # The suite runs in several processes.


def pytest_collection_finish():
    """Take modules and tests out of the garbage collection that the host makes before every training.

    They are 700,000 objects, none of them garbage, and looking through them takes longer than such a training.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def bert():
    return tiny_bert()


@pytest.fixture
def texts():
    return text_data()
