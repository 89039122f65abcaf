"""For people: tables and pictures, from numbers alone.

- planned_runs: what a run would cost, and its alternatives
- plots: pictures of runs and filters, as files
- run_report: one page of a run, from what it has published
"""
