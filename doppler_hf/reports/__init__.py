"""For people: tables and pictures, from numbers alone.

- planned_runs: what a run would cost, and its alternatives
- noise_shapes: what a shape of the noise buys at equal ε
- plots: every picture that the project draws
- run_report: one page of a run, from what it has published
"""
