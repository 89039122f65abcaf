"""What is searched for memory is not asked: it may do anything when it is."""

from doppler_hf.privacy.clipping.memory import numbers, put


class ImportsAll(dict):
    """As transformers' mappings from configurations to models."""

    def items(self):
        raise AssertionError("asked for its items")

    def __setitem__(self, key, value):
        raise AssertionError("asked to keep an item")


def test_a_mapping_of_its_own_is_read_and_written_as_a_dictionary():
    mapping = ImportsAll(mean=1.5)
    found = numbers(mapping)
    assert found == {(id(mapping), "mean"): (mapping, 1.5)}
    put(mapping, "mean", 2.5)
    assert dict.items(mapping) == {"mean": 2.5}.items()
