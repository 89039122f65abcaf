"""The notes of a pass: where what they compare lies."""

import torch

from doppler_hf.privacy.clipping.book import Book
from doppler_hf.privacy.clipping.per_sample_gradient import Dense


def test_the_places_of_others_are_chosen_on_the_device_of_the_parameter():
    """A choice on the CPU was an error for gradients on a GPU whose terms cancel, as those of attention's key bias do."""
    chosen = []

    class Noting(Dense):
        def of_examples(self, kept):
            chosen.append(kept.device.type)
            return Dense(torch.zeros(1, 2))

    book = Book(norm_rule="auto")
    book.num_examples, book.examined = 2, torch.tensor([True, False])
    book.note(torch.empty(2, device="meta"), Noting(torch.zeros(2, 2)))
    assert chosen == ["meta"]
    assert not book.coupled
