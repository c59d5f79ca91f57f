"""Neural networks that learn to be optimisers: meta-train them, compare them, use them.

`meta_train`, `evaluate`, `plot` and `demo` do what the command line does; `save` and `load` keep learned optimisers.
"""

from l2lopt.errors import UserError
from l2lopt.experiments import demo, evaluate, meta_train, plot
from l2lopt.weights import load, save

__all__ = ["UserError", "demo", "evaluate", "load", "meta_train", "plot", "save"]
