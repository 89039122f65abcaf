"""DOPPLER's own regime: from scratch, 50 epochs of large batches at rates of its grids, at equal ε.

- tasks: data that are held in memory, and networks
- cells: one training, and what is kept of it
- spectrum: the autocorrelation of a run's private gradients
- results: the file of all cells, a line each
- search: which rate is tried next, and in which order lines are filled
- curvature: the largest eigenvalue at the weights of a run
- theory: what theory says of the runs
- equal_rates: the accuracy with each filter at the same rates
- explanations: what could explain the gains that the paper reports
- page: what was found
- runs_page: the tables of all runs
- command: the command line
"""
