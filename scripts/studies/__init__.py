"""Studies that settle which method trains best at equal ε: all tuned on one grid, on data that are not reported.

- studies: what is compared on what
- tasks: data, network, and the settings that all methods share
- data: data in three parts
- images, texts: where they come from
- scattering: what images are turned into for some tasks
- networks: what is trained
- runs: one training, and the log of all
- tuning: the search for a learning rate, a study from end to end, and its tables
"""
