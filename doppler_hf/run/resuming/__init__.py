"""What a run takes from an earlier run: its checkpoint, its ledger, and the rounds of its sampling.

- checkpoints: which checkpoints are complete, and what a run reads from them
- earlier_ledgers: the ledgers of earlier runs that a run continues
- rounds: the rounds of the sampling, new or continued from an earlier run
- round_secrets: the secret of a run's rounds, kept for resuming it on this machine
"""
