"""Evidence of a verification: what ranks and one device are seen to do, in values that cross processes.

A module for each kind: tensors beside one device's (`deviations`, `multiples`, `known_changes`, `gains`), replicas,
outputs of modules, random draws, collectives, state that is kept, runs that are saved and loaded. Nothing here says
why; the rules in `causes` do.
"""
