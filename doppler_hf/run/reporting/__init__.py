"""What is evaluated, printed and logged, and which of it may be published.

- evaluation: evaluations with the user's loss and a baseline
- metrics_per_user: metrics as means over users
- summary: the lines that a run prints
- start_warnings: what a run warns of before its first step
- other_runs: other private runs of the process on the same data, whose ε add up
- logged_loss: where the training loss is shown, and whether it is clipped
- published_results: the results that card and picture may have
"""
