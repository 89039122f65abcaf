"""One step can be followed: by its files, from the trainer's pieces to the optimizer's update."""

import sys
from pathlib import Path

from transformers import TrainerCallback

import doppler_hf
from doppler_hf.privacy.ledger import ledger
from tests.support.tiny import text_data
from tests.support.trainers import trained, trainer_of

ROOT = Path(doppler_hf.__file__).parent


class Followed(TrainerCallback):
    """Notes which files and functions of ours the second step runs."""

    def __init__(self):
        self.functions = set()

    def _note(self, frame, event, _):
        path, function = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        # Comprehensions are functions in some versions of Python.
        if event == "call" and path.is_relative_to(ROOT) and not function.endswith(">"):
            self.functions.add((str(path.relative_to(ROOT)), function))

    def on_step_end(self, args, state, control, **kwargs):
        sys.setprofile(self._note if state.global_step == 1 else None)


def test_a_step_reads_in_few_files(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "_PORTIONS", 1)  # of steps that are reserved: all at once, before the first
    followed = Followed()
    plain = dict(noise_shape="white", low_pass_filter="none", max_steps=3, logging_strategy="no", data=text_data(96))
    trained(trainer_of(tmp_path, callbacks=[followed], **plain))
    files = {file for file, _ in followed.functions}
    assert {"trainer.py", "run/private_run.py", "privacy/noise/mechanism.py", "optim/update.py"} <= files
    assert len(files) <= 17, sorted(files)  # with the release of the private loss
