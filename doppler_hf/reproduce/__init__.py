"""Studies that settle which method trains best at equal ε: all tuned on one grid, on data that are not reported.

- studies: what is compared on what
- tasks: data, network, and the settings that all methods share
- data: data in three parts
- images, words: images, and sentences as counts of words
- frozen_layers: texts as outputs of an encoder's frozen layers
- networks: what is trained
- runs: one training
- log: all that were run
- tuning: the search for a learning rate, and a study from end to end
- tables: accuracies and paired differences
"""
