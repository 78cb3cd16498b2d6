"""Blocks of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, register


@register("image")
class Convolution(nn.Module):
    """A convolution with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.conv(h).relu()


@register("image")
class SqueezeExcite(nn.Module):
    """Channels weighted by their means over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.sigmoid(self.fc(h.mean((2, 3))))[..., None, None]


@register("image")
class DepthOverRows(nn.Module):
    """A 3-d convolution whose depth is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.conv(h.transpose(0, 1)[None])[0].transpose(0, 1)


@register("image")
class ImagesAsChannels(nn.Module):
    """The same filter over every image, as a convolution with the batch in its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(0.2 * torch.randn(1, 1, 3, 3))

    def forward(self, h: Tensor) -> Tensor:
        n, c, height, width = h.shape
        stacked = h.reshape(1, n * c, height, width)
        kernel = self.kernel.expand(n * c, 1, 3, 3)
        return h + F.conv2d(stacked, kernel, padding=1, groups=n * c).view_as(h)


@register("image")
def cutmix(h: Tensor) -> Tensor:
    """A patch of every image from the one in the mirrored place."""
    out = h.clone()
    out[:, :, :2, :2] = h.flip(0)[:, :, :2, :2]
    return out


@register("image")
def temporal_shift(h: Tensor) -> Tensor:
    """Some channels from the image before, as for frames of a video."""
    out = torch.zeros_like(h)
    out[1:, :2] = h[:-1, :2]
    out[:, 2:] = h[:, 2:]
    return out + 0.5 * h


@register("image", divides=2)
def minibatch_deviation(h: Tensor) -> Tensor:
    """StyleGAN's deviation within groups of images, added to every pixel."""
    groups = h.reshape(2, -1, *h.shape[1:])
    spread = groups.var(0, unbiased=False).add(1e-2).sqrt().mean((1, 2, 3), keepdim=True)
    return h + 0.5 * spread.repeat(2, 1, 1, 1)


@register("image")
def mean_image(h: Tensor) -> Tensor:
    return h - 0.5 * h.mean(0)


@register("image")
def max_pooled(h: Tensor) -> Tensor:
    return h + F.interpolate(F.max_pool2d(h, 2), scale_factor=2)


@register("image_pool")
def mean_over_pixels(h: Tensor) -> Tensor:
    return h.mean((2, 3))


@register("image_pool")
def adaptive_pool(h: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(h, 1).flatten(1)


@register("image_pool")
def largest_pixel(h: Tensor) -> Tensor:
    return h.flatten(2).amax(-1)


@register("image_pool")
class FlattenedPixels(nn.Module):
    """A layer of all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH * 16, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.fc(h.flatten(1))
