"""One loss per example, from that example alone.

- losses: the losses of classification and of tokens
- host_losses: the choice among them for a model of transformers
"""
