"""One loss per example, from that example alone.

- losses: classification and tokens
- host_losses: which of them a model of transformers gets
"""
