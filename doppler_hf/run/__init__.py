"""One private run of transformers' Trainer: what it is made of, and what it leaves behind.

- private_run: the run: its parts opened and closed together
- plan: every number of the mechanism, computed once
- engine: the self-check, the engine of per-sample gradients, and its first pass
- optimizer: the optimizer that the arguments ask for
- filter_choice: the filter that the arguments name, or that is chosen for the run
- ledger_callback: the ledger along the way, and the guard of the budget
- summary: the table at the start
- weight_filter_callback: the filter on the weights, and its part of a checkpoint
- gradient_recorder: a small image of every private gradient
- projection: how a gradient becomes one
- model_card: what the model card says of privacy
"""
