"""What is computed before the first step: the numbers of the mechanism, what the arguments leave open, and estimates.

- plan: every number of the mechanism, computed once
- filter_and_noise: the filter and the shape of the noise, as given or chosen
- auto_noise: the shape of the noise that is chosen, for a run and for a trial of a search
- learning_rate: the learning rate of a run that sets none
- estimate: time and memory of a step
- memory: the bytes that a pass uses, computed on tensors without memory
"""
