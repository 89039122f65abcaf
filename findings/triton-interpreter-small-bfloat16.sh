#!/usr/bin/env bash
# triton 3.9.0, TRITON_INTERPRET=1: float32 numbers below the smallest normal one, cast to bfloat16.
#
# Guess before running: bfloat16 has the exponents of float32, so a cast keeps the size of a number. The interpreter may cut off
# where a GPU rounds, so 3e-40 should become 2.8e-40, and a smaller number should not become a larger one.
#
# What happens: 3e-40 becomes 7.4e-39 and 1e-41 becomes 8.7e-39, so the order is reversed, and the other way round bfloat16's 9.2e-41
# is read as 0 and its 2.8e-40 as 5.9e-39. Compiled, the cast is one instruction that is right. A kernel that passes its tests in the
# interpreter may therefore be checked against numbers that no GPU computes.
#
# Exit status: 0 while this is so, 1 if sizes are kept.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.9.0 numpy
cat > "$folder/cast.py" <<'PYTHON'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def cast(source, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(source + at).to(out.dtype.element_ty))


print("triton", triton.__version__, "torch", torch.__version__)
small = torch.tensor([1e-41, 3e-40, 1e-38, 1.0])
found = torch.empty(4, dtype=torch.bfloat16)
cast[(1,)](small, found, 4)
print("float32 ", small.tolist())
print("bfloat16", found.tolist(), "interpreted")
print("bfloat16", small.bfloat16().tolist(), "by torch")
halves, read = small.bfloat16(), torch.empty(4)
halves[0] = 9.2e-41
cast[(1,)](halves, read, 4)
print("bfloat16", halves.tolist())
print("float32 ", read.tolist(), "interpreted")
is_reversed = found[0] > 10 * small[0] and found[0] > found[1]
is_lost = read[0] == 0 and halves[0] != 0
print("as described" if is_reversed and is_lost else "changed")
sys.exit(0 if is_reversed and is_lost else 1)
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/cast.py" 2> "$folder/errors" || { status=$?; cat "$folder/errors"; exit "$status"; }
# Output:
#   triton 3.9.0 torch 2.13.0+cpu
#   float32  [9.999665841421895e-42, 2.999997843319071e-40, 9.999999350456404e-39, 1.0]
#   bfloat16 [8.724372135009165e-39, 7.438675188797288e-39, 8.173359158061218e-39, 1.0] interpreted
#   bfloat16 [0.0, 2.7550648847397363e-40, 1.0010069081221042e-38, 1.0] by torch
#   bfloat16 [9.183549615799121e-41, 2.7550648847397363e-40, 1.0010069081221042e-38, 1.0]
#   float32  [0.0, 5.877471754111438e-39, 8.265194654219209e-39, 1.0] interpreted
#   as described
