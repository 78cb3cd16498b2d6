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


@register("image")
class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm2(self.second(self.norm1(self.first(h)).tanh()))


@register("image")
class HyperConvolution(nn.Module):
    """A filter of each image's own, by groups of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(WIDTH, WIDTH * 9)

    def forward(self, h: Tensor) -> Tensor:
        n, c, height, width = h.shape
        kernel = self.make(h.mean((2, 3))).view(n * c, 1, 3, 3)
        out = F.conv2d(h.reshape(1, n * c, height, width), kernel, padding=1, groups=n * c)
        return h + 0.5 * out.view_as(h).tanh()


@register("image")
class Downsampled(nn.Module):
    """A strided convolution and a transposed one back."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(WIDTH, WIDTH, 2, stride=2)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.up(self.down(h).tanh())


@register("image")
class Patches(nn.Module):
    """Patches of all images as rows of one matrix, normed over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH * 4, WIDTH * 4)

    def forward(self, h: Tensor) -> Tensor:
        columns = F.unfold(h, 2, stride=2)
        rows = columns.transpose(1, 2).reshape(-1, WIDTH * 4)
        out = self.linear(rows / (0.5 + rows.std(0)))
        back = out.view(h.shape[0], -1, WIDTH * 4).transpose(1, 2)
        return h + F.fold(back, tuple(h.shape[2:]), 2, stride=2)


@register("image")
class EvoNorm(nn.Module):
    """A norm by the larger of the batch's and the instance's deviation, with running variance."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(1, WIDTH, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        batch = h.var((0, 2, 3), unbiased=False, keepdim=True)
        self.running_var.mul_(0.9).add_(0.1 * batch.detach())
        instance = h.var((2, 3), unbiased=False, keepdim=True)
        return h / torch.max((batch + 0.1).sqrt(), 0.5 * h + (instance + 0.1).sqrt())


@register("image")
def style_mixed(h: Tensor, permutation: Tensor, mixing: Tensor) -> Tensor:
    """Statistics of each image mixed with those of another (MixStyle)."""
    mean, std = h.mean((2, 3), keepdim=True), h.std((2, 3), keepdim=True) + 0.1
    share = mixing[:, None, None, None]
    mean2 = share * mean + (1 - share) * mean[permutation]
    std2 = share * std + (1 - share) * std[permutation]
    return (h - mean) / std * std2 + mean2


@register("image")
def frames_of_a_video(h: Tensor) -> Tensor:
    """The batch as time: differences of frames, and their mean."""
    motion = h.diff(dim=0, prepend=h[:1])
    return h + 0.5 * motion - 0.2 * motion.mean(0)


@register("image", divides=2)
def montage(h: Tensor) -> Tensor:
    """Two images side by side, pooled over their seam, and apart again."""
    wide = torch.cat(h.chunk(2), dim=3)
    smooth = F.avg_pool2d(wide, 3, stride=1, padding=1)
    return torch.cat(smooth.chunk(2, dim=3)) + 0.5 * h


@register("image")
def resized(h: Tensor) -> Tensor:
    small = F.interpolate(h, size=(2, 2), mode="bilinear", align_corners=False)
    return h - 0.5 * F.interpolate(small, size=h.shape[2:], mode="nearest")


@register("image")
def warped(h: Tensor) -> Tensor:
    """Sampled on a grid of each image's own."""
    theta = torch.eye(2, 3, dtype=h.dtype).expand(h.shape[0], 2, 3)
    shifted = theta + 0.1 * torch.tanh(h.mean((1, 2, 3)))[:, None, None]
    grid = F.affine_grid(shifted, list(h.shape), align_corners=False)
    return h + 0.5 * F.grid_sample(h, grid, align_corners=False)
