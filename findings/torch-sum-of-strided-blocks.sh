#!/usr/bin/env bash
# torch 2.13.0 on a CPU: the sum of every second pixel of many small images in float32.
#
# Guess before running: torch's sum adds in pairs (cascade summation, since 1.6), so a view is as good as its copy. The sum of four
# million numbers 0.3 should be right to about 1e-6 in either case, and the mean 0.3.
#
# What happens: the copy is right to 3e-7. The view x[:, ::2, ::2] of shape (1048576, 2, 2) gives a sum that is 2.1 % too large, and
# its mean is 0.3063. The numbers of an inner block are added in pairs, but the sums of the blocks one after another in float32, so
# from 2^20 on each block of 1.2 is rounded to a multiple of 1/8. No warning, and nothing in the documentation of sum or mean.
#
# Exit status: 0 while this is so, 1 if the view becomes right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch

torch.set_num_threads(1)
print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
images = torch.full((2**20, 4, 4), 0.3)
view = images[:, ::2, ::2]
exact = view.double().sum()
for name, numbers in (("view", view), ("copy", view.contiguous())):
    error = float(numbers.sum().double() / exact - 1)
    print(f"{name}: strides {numbers.stride()}, sum {numbers.sum().item():.1f} of {exact.item():.1f}, off by {error:+.1e}, mean {numbers.mean().item():.6f}")
is_wrong = abs(float(view.sum().double() / exact - 1)) > 1e-2
is_copy_right = abs(float(view.contiguous().sum().double() / exact - 1)) < 1e-5
print("as described" if is_wrong and is_copy_right else "changed")
sys.exit(0 if is_wrong and is_copy_right else 1)
PYTHON
# Output on two x86-64 cores (AVX2):
#   torch 2.13.0+cpu AVX2
#   view: strides (16, 8, 2), sum 1284813.4 of 1258291.2, off by +2.1e-02, mean 0.306323
#   copy: strides (4, 2, 1), sum 1258291.6 of 1258291.2, off by +3.0e-07, mean 0.300000
#   as described
