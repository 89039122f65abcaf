"""Generators are searched for in the user's code, and not in what is installed, wherever that is."""

import pytest

from doppler_hf.privacy.own_generators import own_generators

SOURCE = "import random\nnames = random.Random(0)\ndef new_name():\n    return names.random()\n"


# Packages may lie in a user's home, and an environment may see those of the system.
@pytest.mark.parametrize(
    ("file", "number"),
    [("/home/me/names.py", 1), ("/home/me/lib/site-packages/names.py", 0), ("/usr/lib/dist-packages/names.py", 0)],
)
def test_a_generator_of_a_function_is_found_unless_it_is_installed(file, number):
    module = {}
    exec(compile(SOURCE, file, "exec"), module)
    assert len(own_generators(module["new_name"])) == number
