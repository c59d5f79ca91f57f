"""Learned optimisers in other people's training loops: `LearnedOptimizer`, a `torch.optim.Optimizer`."""

from l2lopt.torch_optim.learned_optimizer import LearnedOptimizer

__all__ = ["LearnedOptimizer"]
