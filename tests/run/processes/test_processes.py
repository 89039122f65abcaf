"""Where one process refuses or ends, the others are told, in one line, and none waits."""

import pickle

import pytest
from torch import nn

from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.run.processes import processes
from doppler_hf.run.processes.processes import SharedError, process_end_explained
from tests.support.ledgers import statement
from tests.support.refusals import refused
from tests.support.trainers import arguments


def refuse():
    raise ValueError("no")


def end():
    raise PermissionError("the folder cannot be written to")


@pytest.mark.parametrize(
    ("action", "raised", "told", "message"),
    [
        (lambda: 7, None, 7, None),
        (refuse, ValueError, ValueError, "no"),
        (end, PermissionError, SharedError, "has ended, so this process ends too"),
    ],
)
def test_what_process_0_does_is_sent_to_the_others_whatever_comes_of_it(monkeypatch, action, raised, told, message):
    sent = []
    monkeypatch.setattr(processes, "broadcast_object_list", lambda objects: sent.append(objects[0]) or objects)
    if raised is None:
        assert processes.on_process_0(action) == told
    else:
        with pytest.raises(raised):
            processes.on_process_0(action)
    (outcome,) = (pickle.loads(pickle.dumps(each)) for each in sent)
    if message is None:
        assert outcome == told
    else:
        assert type(outcome) is told
        assert message in str(outcome)


def test_a_socket_that_is_closed_is_told_in_one_line_and_other_errors_as_they_are():
    with refused("another-process-ended"), process_end_explained():
        raise RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes differ"), process_end_explained():
        raise RuntimeError("shapes differ")
    with refused("another-process-ended", match="in the same order"), process_end_explained():
        raise SharedError("another-process-ended", "gloo: in the same order")


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("learning_rate", 0.01, 0.02),
        ("lr_scheduler_type", "linear", "constant"),
        ("warmup_steps", 0, 2),
        ("max_steps", 4, 5),
        ("base_optimizer", "adam_bc", "sgd"),
        ("weight_decay", 0.0, 0.1),
        ("low_pass_filter", "momentum", "none"),
        ("save_strategy", "no", "steps"),
        ("logging_steps", 1, 2),
        ("per_device_eval_batch_size", 8, 16),
        ("eval_delay", 0, 2),
        ("metrics_per_user", False, True),
        ("report_train_loss", "private", "none"),
    ],
)
def test_processes_with_other_arguments_refuse_all_of_them_alike(tmp_path, monkeypatch, name, value, other):
    """Each would move its weights otherwise, or wait for the others at another step."""
    users = {"privacy_unit_column": "user"} if name == "metrics_per_user" else {}
    first, same, second = (arguments(tmp_path, **users, **{name: each}) for each in (value, value, other))
    compared_one_after_another(monkeypatch, first, same)
    with refused("processes-differ", match=f"^{name} "):
        compared_one_after_another(monkeypatch, first, second)


def test_processes_on_different_devices_may_cut_their_shares_in_different_ways(tmp_path, monkeypatch):
    small = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_tokens_per_micro_batch=64)
    large = arguments(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1, bf16=True)
    compared_one_after_another(monkeypatch, small, large)


def compared_one_after_another(monkeypatch, *of_processes):
    sent = []
    monkeypatch.setattr(processes, "gather_object", lambda own: sent.extend(own) or sent)
    for args in of_processes:
        processes.compare_terms(statement(), args, nn.Linear(2, 1), data=DataDigest("60 rows", {}))


def test_processes_compare_as_much_of_the_data_as_both_have_read():
    """A process on a busy machine reads less, and none shows what it has read."""
    whole, part = (DataDigest("60 rows", {"": noted}) for noted in ({1: "a", 2: "b", 3: "c"}, {1: "a", 2: "b"}))
    processes.refuse_different_terms([{processes.OF_EXAMPLES: each} for each in (whole, part, whole)])
    for other in (DataDigest("60 rows", {"": {1: "a", 2: "x"}}), DataDigest("61 rows", whole.fields)):
        with refused("processes-differ", match="train_dataset"):
            processes.refuse_different_terms([{processes.OF_EXAMPLES: each} for each in (whole, other)])
