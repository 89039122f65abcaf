"""Find out whether a data set contains a row more than once, so that its record would contribute more than C.

Rows are compared by their places. Their content does not matter, because equal rows may belong to two people.
"""

from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from doppler_hf.privacy.batching.places import begins_of, columns_of, in_common_order, is_value, parts_of, row_numbers


def has_repeats(dataset: Any) -> bool:
    """Return whether a data set contains a row more than once, for example after `select`, `repeat` or concatenation.

    A row that is there twice in one column is there twice: a record may have got another label or number each time.
    """
    if isinstance(dataset, list | tuple):
        own = [id(row) for row in dataset if not is_value(row)]
        return len({*own}) < len(own)
    columns = in_common_order({id(part): columns_of(part) for part in parts_of(dataset)})
    is_in_order = not isinstance(dataset, Subset | ConcatDataset) and getattr(dataset, "_indices", None) is None
    compared_before = set()
    for number in sorted({number for found in columns.values() for number in found}):
        column = {part: found.get(number, found[min(found)]) for part, found in columns.items()}
        chunks = [chunk for each in column.values() for chunk in each]
        places = dict.fromkeys(place for place, _, _ in chunks)
        # If each chunk has its own memory, no row of a data set in its order can repeat.
        if is_in_order and len(places) == len(chunks):
            continue
        # Columns that were cut and joined alike have the same rows twice.
        names = dict(zip(places, range(len(places)), strict=True))
        form = tuple((names[place], start, size) for place, start, size in chunks)
        if form in compared_before:
            continue
        compared_before.add(form)
        begins, size = begins_of(column.values())
        numbers, is_there = row_numbers(dataset, column, begins), np.zeros(size, dtype=bool)
        is_there[numbers] = True
        if is_there.sum() < len(numbers):
            return True
    return False
