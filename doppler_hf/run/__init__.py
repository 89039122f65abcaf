"""One private run of transformers' Trainer: its parts, its callbacks and its outputs.

- evaluation: evaluations, with the user's loss and a baseline
- saving: models, checkpoints, cards and logs
- private_run: the run, whose parts are opened and closed together
- steps: what it does in every step
- checks: all that is checked before the first step
- filter_and_noise: the filter and the shape of the noise, as named or chosen
- learning_rate: the rate of a run that names none
- plan: every number of the mechanism, computed once
- estimate: time and memory of a step, before there is one
- memory: the bytes that a pass has in use, on tensors without memory
- sharding: weights in shards on several processes
- sharded_states: saving and loading them
- processes: the same terms, weights and outcomes on every process
- optimizer: the optimizer of the arguments
- checkpoints: which are complete, and what a run reads from one
- ledger_callback: the ledger during training, and the guard of the budget
- earlier_ledgers: the ledgers of earlier trainings that a run continues
- lineage: the private trainings that a model's weights carry
- merged_model: whether a model is a base with an adapter merged into it
- round_secrets: the secret of a run's rounds, for whoever resumes it on this machine
- digests: a digest of the parameters, by which the ledger knows the model
- summary: the table at the start
- logged_loss: where the training loss is shown, and whether it is clipped
- model_card: the model card's section on privacy
"""
