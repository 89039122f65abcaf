"""One private run of transformers' Trainer: its parts, its callbacks and its outputs.

- evaluation: evaluations, with the user's loss and a baseline
- saving: models, checkpoints, cards and logs
- private_run: the run, from its plan to its end, with what it does in every step
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
- callback: by which Transformers' events reach the run
- beside_model: the ledger beside a saved model
- trained_model: the model that a run trains, as its ledger knows it
- earlier_ledgers: the ledgers of earlier trainings that a run continues
- lineage: the private trainings that a model's weights carry
- merged_model: whether a model is a base with an adapter merged into it
- rounds: the rounds of the sampling, new ones or those of an earlier run
- round_secrets: the secret of a run's rounds, for whoever resumes it on this machine
- own_code: whether a method is the user's own
- precision: how coarsely a model rounds
- digests: a digest of the parameters, by which the ledger knows the model
- summary: the table at the start
- logged_loss: where the training loss is shown, and whether it is clipped
- model_card: the model card's section on privacy
"""
