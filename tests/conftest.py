"""What all tests share: one thread each, no network, and a tiny model with its data."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jaxtyping
import pytest
import torch

from tests.support import array_types
from tests.support.tiny import text_data, tiny_bert

torch.set_num_threads(1)  # The suite runs in several processes.

# Nothing of ours has been imported so far, or it would not be checked.
jaxtyping.install_import_hook(array_types.CHECKED, "tests.support.array_types.checked")


def pytest_collection_finish():
    """Take modules and tests out of the garbage collection that the host makes before every training.

    They are 700,000 objects, none of them garbage, and looking through them takes longer than such a training.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def arrays_are_checked_where_modules_are_tested(request):
    """Leave whole trainings alone: they pass the same arrays again and again, and a third of their time would be checks."""
    folder = request.path.relative_to(request.config.rootpath / "tests").parts[0]
    jaxtyping.config.update("jaxtyping_disable", folder in {"end_to_end", "audit", "cli", "scripts"})


@pytest.fixture
def unchecked_arrays(arrays_are_checked_where_modules_are_tested):
    """Leave wrong arrays to what functions themselves refuse, as outside of the tests, where nobody checks types first."""
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def bert():
    return tiny_bert()


@pytest.fixture
def texts():
    return text_data()
