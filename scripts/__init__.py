"""What is run from a clone of the repository, and no part of the package.

- glue, image_classification, causal_lm, sft, dpo: train from a recipe, or from flags
- synthesize: trains on texts with labels, and samples synthetic ones
- training: what these share
- quickstart: what `make quickstart` runs
- reproduce: studies, which are in studies and regime
- studies, regime: their data, networks, runs and tables
- bench: benchmarks
- experiments: other measurements
- oldest_versions: the oldest packages that are admitted
- gallery: makes the notebooks of the gallery from the scripts next to them
- messages: every message of the package, with its code and place
"""
