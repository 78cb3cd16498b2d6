"""Self-supervised losses with targets or penalties from the whole batch, and density losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, register

PROTOTYPES = 4


class _Prototypes(nn.Module):
    """Prototypes that rows are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Linear(WIDTH, PROTOTYPES, bias=False)


@register("rows_head")
class Swav(_Prototypes):
    """Targets balanced over the batch by Sinkhorn's iteration."""

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        scores = self.prototypes(F.normalize(h, dim=1))
        with torch.no_grad():
            q = torch.exp(self.prototypes(F.normalize(target, dim=1)) / 0.5).t()
            q = q / q.sum()
            for _ in range(3):
                q = q / q.sum(1, keepdim=True) / PROTOTYPES
                q = q / q.sum(0, keepdim=True) / h.shape[0]
            q = (q * h.shape[0]).t()
        return -(q * (scores / 0.3).log_softmax(-1)).sum(1).mean()


@register("rows_head")
class Dino(_Prototypes):
    """Teacher outputs centred by a moving mean over batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, PROTOTYPES))

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        teacher = self.prototypes(target).detach()
        wanted = ((teacher - self.centre) / 0.5).softmax(-1)
        self.centre = 0.9 * self.centre + 0.1 * teacher.mean(0, keepdim=True)
        return -(wanted * self.prototypes(h).log_softmax(-1)).sum(-1).mean()


@register("rows_head")
class MeanEntropy(_Prototypes):
    """Confident rows and a mean prediction of high entropy (MSN, SCAN)."""

    def forward(self, h: Tensor) -> Tensor:
        p = self.prototypes(h).softmax(-1)
        mean = p.mean(0)
        return -(p * p.log()).sum(1).mean() + 2 * (mean * mean.log()).sum()


@register("rows_head")
class SoftKMeans(_Prototypes):
    """Rows assigned to means of the batch that are found by two iterations."""

    def forward(self, h: Tensor) -> Tensor:
        centres = self.prototypes.weight
        for _ in range(2):
            share = (-torch.cdist(h, centres).square()).softmax(-1)
            centres = share.t() @ h / share.sum(0)[:, None]
        return (share * torch.cdist(h, centres + 1e-3).square()).sum(1).mean()


@register("rows_head")
class DeepClustering(_Prototypes):
    """A sharpened target distribution, normed by how many rows a cluster has (DEC)."""

    def forward(self, h: Tensor) -> Tensor:
        apart = (h[:, None] - self.prototypes.weight[None]).square().sum(-1)
        q = 1 / (1 + apart)
        q = q / q.sum(1, keepdim=True)
        weight = q.square() / q.sum(0)
        p = (weight / weight.sum(1, keepdim=True)).detach()
        return F.kl_div(q.log(), p, reduction="batchmean")


@register("rows_head", divides=2)
class ByolHalves(nn.Module):
    """Each half predicts the other, without gradients to what is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.predict = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        wanted = torch.cat(h.detach().chunk(2)[::-1])
        return 1 - F.cosine_similarity(self.predict(h), wanted, dim=1).mean()


@register("rows_head")
class WhitenedMse(nn.Module):
    """Two views whitened over the batch, then compared."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3)

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.white(self.project(h)), self.white(self.project(target)))

    @staticmethod
    def white(z: Tensor) -> Tensor:
        """Centred, with unit covariance."""
        centred = z - z.mean(0)
        covariance = centred.t() @ centred / z.shape[0] + 0.3 * torch.eye(3, dtype=z.dtype)
        return centred @ torch.linalg.inv(covariance)


@register("rows_head")
class NearestInQueue(nn.Module):
    """The nearest neighbour in a queue is the positive (NNCLR)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(14, WIDTH))

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        z, queue = F.normalize(h, dim=1), F.normalize(self.queue.clone(), dim=1)
        nearest = queue[(z.detach() @ queue.t()).argmax(1)]
        loss = F.cross_entropy(nearest @ F.normalize(target + h, dim=1).t() * 3, _own(h))
        self.queue.copy_(torch.cat([h.detach(), self.queue])[:14])
        return loss


@register("rows_head")
class CoordinateRate(nn.Module):
    """The log-determinant of the covariance: how much room rows take (MCR2)."""

    def forward(self, h: Tensor) -> Tensor:
        matrix = torch.eye(WIDTH, dtype=h.dtype) + h.t() @ h / h.shape[0]
        return -0.5 * torch.logdet(matrix) + 0.05 * h.square().mean()


@register("rows_head")
class UncertaintyWeighted(nn.Module):
    """Two losses weighted by learnt variances, with a term of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, h: Tensor, target: Tensor, scores: Tensor) -> Tensor:
        losses = torch.stack([F.mse_loss(h, target), F.l1_loss(h.mean(1), scores)])
        return (torch.exp(-self.log_variance) * losses + self.log_variance).sum()


@register("rows_head")
class Variational(nn.Module):
    """A reconstruction and a divergence; noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.decode = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, target: Tensor, noise: Tensor) -> Tensor:
        mean, log_var = self.code(h).chunk(2, dim=1)
        out = self.decode(mean + noise * torch.exp(0.5 * log_var))
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        return F.mse_loss(out, target, reduction="sum") / h.shape[0] + 0.1 * divergence


@register("rows_head")
class AggregatePosterior(nn.Module):
    """Total correlation: the density of each code under all rows (beta-TCVAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(WIDTH, 4)

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        z, mean = self.code(h), self.code(target)
        log_q = -0.5 * (z[:, None] - mean[None]).square()
        joint = log_q.sum(-1).logsumexp(1)
        marginal = log_q.logsumexp(1).sum(-1)
        return (joint - marginal).mean() + 0.1 * z.square().mean()


@register("rows_head")
def energy_distance(h: Tensor, target: Tensor) -> Tensor:
    """Distances between and within two samples."""
    across = torch.cdist(h, target).mean()
    return 2 * across - torch.pdist(h).mean() - torch.pdist(target).mean()


@register("rows_head")
def sliced_wasserstein(h: Tensor, target: Tensor) -> Tensor:
    """Sorted projections of two samples."""
    direction = torch.linspace(-1, 1, WIDTH * 3, dtype=h.dtype).view(WIDTH, 3).cos()
    given, wanted = (h @ direction).sort(0).values, (target @ direction).sort(0).values
    return (given - wanted).square().mean()


@register("rows_head")
def relativistic(h: Tensor, target: Tensor) -> Tensor:
    """Real rows against the mean of the fake ones, and the other way round (RaGAN)."""
    fake, real = h.mean(1), target.mean(1)
    first = F.softplus(-(real - fake.mean()))
    return (first + F.softplus(fake - real.mean())).mean()


@register("rows_head")
def log_of_summed_likelihoods(h: Tensor, target: Tensor) -> Tensor:
    """A mixture density of the targets under all rows (Parzen windows)."""
    near = -0.5 * (target[:, None] - h[None]).square().sum(-1)
    return -(near.logsumexp(1) - torch.log(torch.tensor(float(h.shape[0])))).mean()


@register("rows_head")
def gaussian_fitted(h: Tensor, target: Tensor) -> Tensor:
    """The divergence of the Gaussian of the batch from the standard one, and a regression."""
    mean, var = h.mean(0), h.var(0) + 0.05
    return 0.5 * (var + mean.square() - 1 - var.log()).sum() + F.huber_loss(h, target)


def _own(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0])
