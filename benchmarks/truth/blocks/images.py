"""Blocks of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, define, define_all, linear, register

define_all(
    "image",
    {"max_pooled": lambda h: h + F.interpolate(F.max_pool2d(h, 2), scale_factor=2)},
    plain=True,
)
define_all(
    "image_pool",
    {
        "mean_over_pixels": lambda h: h.mean((2, 3)),
        "largest_pixel": lambda h: h.flatten(2).amax(-1),
    },
)
define(
    "image_pool",
    "FlattenedPixels",
    lambda m, h: m.linear(h.flatten(1)),
    {"linear": linear(WIDTH * 16)},
)


@register("image", plain=True, conv=lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1))
def Convolution(m, h: Tensor) -> Tensor:
    return h + m.conv(h).relu()


@register("image", conv=lambda: nn.Conv3d(WIDTH, WIDTH, 3, padding=1))
def DepthOverRows(m, h: Tensor) -> Tensor:
    """A 3-d convolution whose depth is the batch."""
    return h + m.conv(h.transpose(0, 1)[None])[0].transpose(0, 1)


@register("image", kernel=lambda: nn.Parameter(0.2 * torch.randn(1, 1, 3, 3)))
def ImagesAsChannels(m, h: Tensor) -> Tensor:
    """The same filter over every image, with the batch in the groups of a convolution."""
    stacked = h.reshape(1, -1, *h.shape[2:])
    kernel = m.kernel.expand(stacked.shape[1], 1, 3, 3)
    return h + F.conv2d(stacked, kernel, padding=1, groups=stacked.shape[1]).view_as(h)


@register("image", linear=linear(WIDTH * 4, WIDTH * 4))
def Patches(m, h: Tensor) -> Tensor:
    """Patches of all images as rows of one matrix, normed over all of them."""
    rows = F.unfold(h, 2, stride=2).transpose(1, 2).reshape(-1, WIDTH * 4)
    out = m.linear(rows / (0.5 + rows.std(0)))
    columns = out.view(h.shape[0], -1, WIDTH * 4).transpose(1, 2)
    return h + F.fold(columns, tuple(h.shape[2:]), 2, stride=2)


@register("image")
def warped(h: Tensor) -> Tensor:
    """Sample each image on a grid computed from it."""
    theta = torch.eye(2, 3, dtype=h.dtype).expand(h.shape[0], 2, 3)
    shifted = theta + 0.1 * torch.tanh(h.mean((1, 2, 3)))[:, None, None]
    grid = F.affine_grid(shifted, list(h.shape), align_corners=False)
    return h + 0.5 * F.grid_sample(h, grid, align_corners=False)
