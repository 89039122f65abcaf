"""Where a model's weights come from, and what their training has cost.

- trained_model: the model that a run trains, as its ledger knows it
- lineage: the earlier private runs that trained a model's weights
- merges: how to recognise weights into which an adapter was merged
- trained_openly: which weights were trained without privacy in this process, and on which data
- merged_model: a check that a model is a base with an adapter merged into it
- config_differences: what differs between two configurations, for the model card and `merged_model`
"""
