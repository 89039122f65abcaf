"""Errors keep their code and their message, in old code and on the way from one process to another."""

import pickle

import pytest

from doppler_hf.errors import Failure, Refusal, TypeRefusal
from doppler_hf.extras import MissingExtraError
from doppler_hf.run.processes import SharedError
from doppler_hf.training_args.checks import NoEffectError
from doppler_hf.trl_checks import RowError

ERRORS = {
    Refusal("a-code", "A message."): ValueError,
    TypeRefusal("a-code", "A message."): TypeError,
    Failure("a-code", "A message."): RuntimeError,
    SharedError("a-code", "A message."): RuntimeError,
    RowError("a-code", "A message."): ValueError,
    MissingExtraError("a-code", "A message."): ImportError,
    NoEffectError("seed", 1, beside="b", because="2", fix="Leave it out"): ValueError,
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_caught_as_before_and_survives_pickling(error):
    assert isinstance(error, ERRORS[error])
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (again.code, str(again), again.__notes__) == (error.code, str(error), ["a note"])
    assert vars(again) == vars(error)
    assert error.code not in str(error)
