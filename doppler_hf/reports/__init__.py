"""For people: tables and pictures, from numbers alone.

- planned_runs: what a run would cost, and its alternatives
- planned_noise: the noise and the filter that a training takes of it
- plots: pictures of runs and filters, as files
- run_report: one page of a run, from what it has published
"""
