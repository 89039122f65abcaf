"""Several processes that train one model.

- processes: the same terms, weights and outcomes on every process
- sharding: weights in shards on several processes
- sharded_states: saving and loading of sharded weights
"""
