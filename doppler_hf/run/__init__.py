"""One private run of Transformers' `Trainer`: `private_run` holds it from its plan to its end, with the parts of every step.

Here is what happens during training:

- private_run: the run, from its plan to its end, with the parts of every step
- callback: the callback that passes Transformers' events to the run
- optimizer: the optimizer of the arguments
- other_batches: batches for callbacks to look at
- interruptions: Ctrl-C, errors and SIGTERM
- digests: a digest of the parameters, by which the ledger knows the model
- precision: how coarsely a model rounds
- own_code: a test whether a method is the user's own
- states_folder: the user's own folder, for what must not be in an output folder

What a run is made from. These folders know nothing of `private_run`:

- planning: what is computed before the first step
- resuming: what a run takes from an earlier run
- weights: where a model's weights come from, and what their training has cost
- processes: several processes that train one model

What is made of a run. `private_run` knows nothing of these folders:

- reporting: what is evaluated, printed and logged, and which of it may be published
- saving: what is written into the output folder
- search: a hyperparameter search, of which only the best trial is published
"""
