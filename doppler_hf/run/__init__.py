"""One private run of transformers' Trainer: its parts, its callbacks and its outputs.

- around: what the trainer does around its steps
- private_run: the run, whose parts are opened and closed together
- refusals: what it refuses of the trainer, the data and the checkpoint
- choices: the filter and the shape of the noise, as named or chosen
- learning_rate: the rate of a run that names none
- plan: every number of the mechanism, computed once
- estimate: time and memory of a step, before there is one
- sharding: weights in shards on several processes
- sharded_states: what is saved and loaded of them
- in_step: as many passes on each of these
- replicas: the same terms, weights and outcomes on every process
- whole_draw: the pieces of a draw, each as it was drawn
- halving: micro-batches that do not fit into memory
- engine: the engine of per-sample gradients, attached to the model
- start_check: its comparison with plain autograd before the first step
- own_code: errors of the user's own code, told with their reason
- own_loss: whether the model's own loss is the one that is trained
- optimizer: the optimizer of the arguments
- checkpoints: which are whole, and what a run reads of one
- ledger_callback: the ledger during training, and the guard of the budget
- earlier_ledgers: those of earlier trainings that a run continues
- parameters: a digest of the parameters, by which the ledger knows the model
- summary: the table at the start
- weight_filter_callback: the filter on the weights, and its part of a checkpoint
- gradient_recorder: a small image of every private gradient
- projection: the map from a gradient to its image
- model_card: the model card's section on privacy
"""
