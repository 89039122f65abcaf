"""Where one process refuses or ends, the others are told, in one line, and none waits."""

import pickle

import pytest

from doppler_hf.privacy.batching.data_digest import DataDigest
from doppler_hf.run import processes
from doppler_hf.run.processes import SharedError, one_line_if_a_process_ends
from tests.support.refusals import refused


def refuse():
    raise ValueError("no")


def end():
    raise PermissionError("the folder cannot be written to")


@pytest.mark.parametrize(
    ("action", "raised", "told", "message"),
    [
        (lambda: 7, None, 7, None),
        (refuse, ValueError, ValueError, "no"),
        (end, PermissionError, SharedError, "has ended, so this one ends too"),
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
    with refused("another-process-ended"), one_line_if_a_process_ends():
        raise RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes differ"), one_line_if_a_process_ends():
        raise RuntimeError("shapes differ")
    with refused("another-process-ended", match="in the same order"), one_line_if_a_process_ends():
        raise SharedError("another-process-ended", "gloo: in the same order")


def test_processes_compare_as_much_of_the_data_as_both_have_read():
    """A process on a busy machine reads less, and none shows what it has read."""
    whole, part = (DataDigest("60 rows", {"": noted}) for noted in ({1: "a", 2: "b", 3: "c"}, {1: "a", 2: "b"}))
    processes.refuse_different_terms([{processes.OF_EXAMPLES: each} for each in (whole, part, whole)])
    for other in (DataDigest("60 rows", {"": {1: "a", 2: "x"}}), DataDigest("61 rows", whole.fields)):
        with refused("processes-differ", match="train_dataset"):
            processes.refuse_different_terms([{processes.OF_EXAMPLES: each} for each in (whole, other)])
