"""What a learned rule sees of each coordinate: its gradient's history and what all coordinates share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from l2lopt.core.errors import UserError, above_0
from l2lopt.core.layout import Layout, Params
from l2lopt.core.precision import double
from l2lopt.optimisers.hand_designed import bias_corrected, check_decay, check_decays, safe_sqrt

LARGEST_P = 87
"""e⁻ᵖ is a normal number of float32 up to here."""


class StepInputs(NamedTuple):
    """What an input may look at.

    Attributes:
        grads: The gradient, finite, [*batch, n].
        params: θ, [*batch, n].
        step: The number of this update, counted from 1.
        loss: [*batch], or None where the caller has none.
        layout: Layout of the coordinates, for means over groups and functions of whole tensors.
        finite: Whether the gradient is, [*batch, n]; where it is not, `grads` is 0.
    """

    grads: Tensor
    params: Tensor
    step: Tensor
    loss: Tensor | None
    layout: Layout
    finite: Tensor


class Input(nn.Module, ABC):
    """One kind of input.

    What an input gives a coordinate may depend on other coordinates through `step_inputs.layout` only: through means
    over groups, or through `step_inputs.layout.whole(name, function, values)` for a function of whole tensors. That is
    recorded for backpropagation block by block, and a constant there.

    Attributes:
        size: Features per coordinate.
        memory: The names of the running values [*batch, n] it keeps, zero at first.
    """

    size: int
    memory: Sequence[str] = ()

    @abstractmethod
    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """The features [size, *batch, n] and the memory after this step."""


class LogAndSign(Input):
    """The gradient's size and sign on a log scale (Andrychowicz et al. 2016, appendix A).

    |g| ≥ e⁻ᵖ: (log|g| / p, sign g); else (−1, eᵖ g). The second lies in [−1, 1], the first at or above −1.

    Args:
        p: The smallest size told apart is e⁻ᵖ; p in (0, 87], as float32 knows no smaller one.
    """

    size = 2

    def __init__(self, p: float = 10.0) -> None:
        super().__init__()
        above_0("log-and-sign", p=p)
        if p > LARGEST_P:
            expected, remedy = f"at most {LARGEST_P}", "change the value"
            raise UserError("log-and-sign: p", expected=expected, found=str(p), remedy=remedy)
        self.p = p

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """(log|g| / p, sign g), or (−1, eᵖ g) where g is small."""
        return log_and_sign(step_inputs.grads, self.p), memory


class RNNprop(Input):
    """The gradient and its running mean, each over the running root mean square (Lv et al. 2017).

    (m̂ / (√v̂ + ε), g / (√v̂ + ε)) with m̂, v̂ the bias-corrected running means of g and g². The first is Adam's
    direction.

    Args:
        betas: Decay rates of the two running means, each in [0, 1).
        eps: ε > 0.
    """

    size = 2
    memory = ("m", "v")

    def __init__(self, betas: Sequence[float] = (0.9, 0.99), eps: float = 1e-8) -> None:
        super().__init__()
        self.beta1, self.beta2 = check_decays("rnnprop: betas", betas)
        above_0("rnnprop", eps=eps)
        self.eps = eps

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """(m̂, g) / (√v̂ + ε)."""
        mean, root, memory = moments(step_inputs, memory, self.beta1, self.beta2)
        scale = root + self.eps
        return torch.stack([mean / scale, step_inputs.grads / scale]), memory


class LogStep(Input):
    """The logarithm of the step count, log(t) / scale, the same for all coordinates.

    Args:
        scale: 7 puts 1,000 steps at 0.99.
    """

    size = 1

    def __init__(self, scale: float = 7.0) -> None:
        super().__init__()
        above_0("log-step", scale=scale)
        self.scale = scale

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """log(t) / scale."""
        # An integer's logarithm is float32 by default, too coarse for runs in float64.
        value = (double(step_inputs.step).log() / self.scale).to(step_inputs.grads)
        return value.expand(1, *step_inputs.grads.shape), memory


class Parameter(Input):
    """The parameter θ itself."""

    size = 1

    def __init__(self) -> None:
        super().__init__()  # a signature without options: nn.Module's takes any

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """θ."""
        return step_inputs.params.unsqueeze(0), memory


class Loss(Input):
    """The loss, the same for all coordinates of a row, on the scale of `LogAndSign` (Ravi and Larochelle 2017).

    A loss that is not finite counts as 1: as a feature it would make every parameter of the row NaN, whatever the
    gradients are.

    Args:
        p: The smallest loss told apart is e⁻ᵖ; p > 0.
    """

    size = 2

    def __init__(self, p: float = 10.0) -> None:
        super().__init__()
        above_0("loss", p=p)
        self.p = p

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """(log ℓ / p, 1), or (−1, eᵖ ℓ) where ℓ is small."""
        if step_inputs.loss is None:
            remedy = "pass loss= to update"
            raise UserError("input 'loss'", expected="the loss of this step", found="none", remedy=remedy)
        loss = step_inputs.loss.where(step_inputs.loss.isfinite(), 1.0)
        return log_and_sign(loss[..., None].expand_as(step_inputs.grads), self.p), memory


class Momenta(Input):
    """Running means of the gradient over several spans, each over the running root mean square (Metz et al. 2020).

    (m̂_β / (√v̂ + ε))_β with m̂_β, v̂ the bias-corrected running means of g and g².

    Args:
        betas: Decay rates of the means of g, each in [0, 1).
        square_beta: Decay rate of the mean of g².
        eps: ε > 0.
    """

    def __init__(
        self, betas: Sequence[float] = (0.5, 0.9, 0.99, 0.999), square_beta: float = 0.999, eps: float = 1e-8
    ) -> None:
        super().__init__()
        if not betas:
            raise UserError("momenta: betas", expected="at least one", found="none", remedy="give a decay rate")
        self.betas = [check_decay("momenta: betas", beta) for beta in betas]
        self.square_beta = check_decay("momenta: square_beta", square_beta)
        above_0("momenta", eps=eps)
        self.eps = eps
        self.size = len(self.betas)
        self.memory = (*(f"m{index}" for index in range(self.size)), "v")

    def forward(self, step_inputs: StepInputs, memory: Params) -> tuple[Tensor, Params]:
        """A feature for each β."""
        g = step_inputs.grads
        after = {"v": self.square_beta * memory["v"] + (1 - self.square_beta) * g.square()}
        scale = safe_sqrt(bias_corrected(after["v"], self.square_beta, step_inputs.step)) + self.eps
        features = []
        for index, beta in enumerate(self.betas):
            mean = beta * memory[f"m{index}"] + (1 - beta) * g
            features.append(bias_corrected(mean, beta, step_inputs.step) / scale)
            after[f"m{index}"] = mean
        return torch.stack(features), after


def moments(step_inputs: StepInputs, memory: Params, beta1: float, beta2: float) -> tuple[Tensor, Tensor, Params]:
    """m̂ and √v̂, the bias-corrected running means of g and g², and the memory of both: {"m", "v"}."""
    g, step = step_inputs.grads, step_inputs.step
    m = beta1 * memory["m"] + (1 - beta1) * g
    v = beta2 * memory["v"] + (1 - beta2) * g.square()
    return bias_corrected(m, beta1, step), safe_sqrt(bias_corrected(v, beta2, step)), {"m": m, "v": v}


def log_and_sign(x: Tensor, p: float) -> Tensor:
    """(log|x| / p, sign x) where |x| ≥ e⁻ᵖ, else (−1, eᵖ x); stacked on a new first axis."""
    least = torch.exp(x.new_tensor(-p))
    # The clamp keeps log away from 0 in the branch that is not taken, where its derivative would be NaN.
    size = x.abs().clamp(min=least).log() / p
    return torch.stack([size, torch.where(x.abs() >= least, x.sign(), x / least)])


INPUTS: Mapping[str, type[Input]] = {
    "log-and-sign": LogAndSign,
    "rnnprop": RNNprop,
    "momenta": Momenta,
    "log-step": LogStep,
    "parameter": Parameter,
    "loss": Loss,
}
