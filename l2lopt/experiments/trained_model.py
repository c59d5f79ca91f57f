"""Trained models out of their runs' folders, to be used in Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import optimisees
from l2lopt.core.layout import Params
from l2lopt.core.types import Aux
from l2lopt.experiments import build, from_python
from l2lopt.experiments import config as configs
from l2lopt.experiments.config import TrainConfig
from l2lopt.experiments.run_folder import CONFIG, saved_tensors
from l2lopt.optimisee import MODEL, Optimisee
from l2lopt.storage.tensor_file import check_tensors


class TrainedModel(NamedTuple):
    """A model as `train` has left it.

    Attributes:
        optimisee: The problem, with its data; its methods take the parameters.
        params: Trained parameters.
        aux: The loss's own state, such as batch norm's running statistics.
    """

    optimisee: Optimisee
    params: Params
    aux: Aux


def load_trained(run: str | Path, *, optimisee: Optimisee | None = None, changes: Sequence[str] = ()) -> TrainedModel:
    """The model that `train` has left in a folder: its optimisee, parameters and the loss's own state.

    Args:
        run: Folder of the run.
        optimisee: The optimisee that the run was given, if it was made in Python.
        changes: Changes to its config, such as "device=cpu".

    Raises:
        UserError: For a folder without a finished training, damaged files, or an optimisee that is not that of the run.

    Examples:
        >>> import l2lopt, torch
        >>> inputs = torch.randn(200, 4)
        >>> samples = inputs, (inputs.sum(1) > 0).long()
        >>> problem = l2lopt.make_optimisee(lambda: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, samples)
        >>> _ = l2lopt.train(problem, "runs/model", optimiser="torch.optim.Adam", changes=["train.steps=30"])
        >>> trained = l2lopt.load_trained("runs/model", optimisee=problem)
        >>> model = torch.nn.Linear(4, 2)
        >>> model.load_state_dict({**trained.params, **trained.aux}, strict=False)
        <All keys matched successfully>
    """
    folder = Path(run)
    params, aux = saved_tensors(folder, "a trained model")
    config = configs.load(folder / CONFIG, changes, kind=TrainConfig)
    place = build.device(config.device)
    (made,) = from_python.matched(from_python.listed(optimisee), [config.optimisee], place)
    problem = made or optimisees.build(config.optimisee, device=str(place))
    first, state = problem.init(0)
    check_tensors(folder / MODEL, first, params, "train again")
    check_tensors(folder / MODEL, state, aux, "train again", any_number=True)
    # In the order of the initial values: the file has them by name.
    placed = ({name: part[name].to(place) for name in like} for part, like in ((params, first), (aux, state)))
    return TrainedModel(problem, *placed)
