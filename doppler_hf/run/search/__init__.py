"""A hyperparameter search, of which only the best trial is published.

- search: the search, from its first trial to the published one
- search_space: from what the settings of its trials are drawn, and the arguments of a trial
- interrupted_searches: what is kept of a search until it ends, so that it is counted and can continue
"""
