"""What a model sees of images in uint8: normalised, and changed at random in training."""

import torch
from torch import Tensor, nn

from optimisees import precision


class Normalised(nn.Module):
    """A model on images in uint8: they are normalised by the training set's mean and standard deviation per channel.

    Args:
        model: Model of images [batch, channels, height, width] in the dtype of the statistics.
        mean: Mean of each channel, in [0, 255].
        deviation: Standard deviation of each channel.
        channels_last: The model gets its images with the channels lying last in memory.
        autocast: The model computes in bfloat16 where that is safe; what it gives is of the dtype of the statistics.
    """

    def __init__(
        self, model: nn.Module, mean: Tensor, deviation: Tensor, channels_last: bool = False, autocast: bool = False
    ) -> None:
        super().__init__()
        self.model, self.channels_last, self.autocast = model, channels_last, autocast
        self.mean, self.deviation = mean.view(-1, 1, 1), deviation.view(-1, 1, 1)  # constants, and so no buffers

    def forward(self, images: Tensor) -> Tensor:
        """The model's outputs."""
        x = (images.to(self.mean.dtype) - self.mean) / self.deviation
        if self.channels_last:  # in words that vmap knows
            x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        with precision.autocast(x.device, self.autocast):
            outputs: Tensor = self.model(x)
        return outputs.to(x.dtype)


def statistics(images: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, 1 where it is 0, per channel of images [n, channels, height, width] in uint8."""
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.transpose(0, 1)])
    shares = counts.double() / max(images[:, 0].numel(), 1)
    mean = shares @ values
    deviation = (shares * (values - mean[:, None]).square()).sum(1).sqrt()
    return mean.to(dtype), deviation.where(deviation > 0, 1.0).to(dtype)


def crop_and_flip(images: Tensor, source: torch.Generator, padding: int = 4) -> Tensor:
    """Images [n, channels, h, w], each moved by up to `padding` pixels, black coming in, and half of them mirrored."""
    count, channels, height, width = images.shape
    offsets = torch.randint(2 * padding + 1, (2, count, 1), generator=source)
    mirrored = torch.rand((count, 1), generator=source) < 0.5
    columns = torch.where(mirrored, torch.arange(width).flip(0), torch.arange(width)) + offsets[1]
    rows = torch.arange(height) + offsets[0]
    padded = nn.functional.pad(images, (padding,) * 4)
    places = (torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None])
    index = (*places, rows[:, None, :, None], columns[:, None, None, :])
    return padded[tuple(part.to(images.device) for part in index)]
