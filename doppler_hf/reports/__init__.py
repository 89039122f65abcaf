"""For people: tables and pictures, from numbers alone.

- planned_runs: what a run would cost, and its alternatives
- plots: pictures of filters, as files
"""
