"""Losses of order and of pairs: ranking, metric learning, survival, fairness."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, register


@register("rows_head")
def soft_auc(h: Tensor, keep: Tensor) -> Tensor:
    """A smooth area under the curve: every kept row against every other."""
    out = h.mean(1)
    pair = keep[:, None] & ~keep[None]
    return (torch.sigmoid(2 * (out[None] - out[:, None])) * pair).sum() / pair.sum().clamp(min=1)


@register("rows_head")
def soft_ranks(h: Tensor, scores: Tensor) -> Tensor:
    """Spearman's correlation of soft ranks."""

    def ranked(x: Tensor) -> Tensor:
        rank = torch.sigmoid((x[:, None] - x[None]) * 2).sum(1)
        return rank - rank.mean()

    given, wanted = ranked(h.sum(1)), ranked(scores)
    return 1 - F.cosine_similarity(given, wanted, dim=0)


@register("rows_head")
def discounted_gain(h: Tensor, scores: Tensor) -> Tensor:
    """ApproxNDCG: soft places, discounted by a logarithm, over the ideal order."""
    out, gain = h.sum(1), torch.sigmoid(scores)
    place = 1 + torch.sigmoid(out[None] - out[:, None]).sum(1)
    ideal = torch.log2(torch.arange(h.shape[0], dtype=h.dtype) + 2)
    best = (gain.sort(descending=True).values / ideal).sum()
    return 1 - (gain / torch.log2(1 + place)).sum() / best


@register("rows_head")
def lambda_weighted(h: Tensor, scores: Tensor) -> Tensor:
    """Pairs weighted by how far apart they stand in the order."""
    out = h.mean(1)
    place = out.detach().argsort(descending=True).argsort().to(h.dtype)
    weight = (1 / (2 + place[:, None]) - 1 / (2 + place[None])).abs()
    return (
        weight * F.softplus(-(scores[:, None] - scores[None]) * (out[:, None] - out[None]))
    ).sum()


@register("rows_head")
def lifted_structure(h: Tensor, labels: Tensor) -> Tensor:
    """All negatives of a pair, by log-sum-exps over the batch."""
    apart = torch.cdist(h, h + 1e-2)
    same = labels[:, None] == labels[None]
    near = (1.0 - apart).masked_fill(same, -1e9).logsumexp(1)
    far = apart.masked_fill(~same, -1e9).logsumexp(1)
    return F.softplus(near + far).mean()


@register("rows_head")
def multi_similarity(h: Tensor, labels: Tensor) -> Tensor:
    """Similarities to positives and negatives, each by a log of a sum."""
    z = F.normalize(h, dim=1)
    similar = z @ z.t()
    same = labels[:, None] == labels[None]
    positive = torch.log1p((torch.exp(-2 * (similar - 0.5)) * same).sum(1))
    negative = torch.log1p((torch.exp(5 * (similar - 0.5)) * ~same).sum(1))
    return (positive / 2 + negative / 5).mean()


@register("rows_head")
def semi_hard_triplet(h: Tensor, labels: Tensor) -> Tensor:
    """The nearest negative that lies farther than the mean positive."""
    z = F.normalize(h, dim=1)
    apart = (z[:, None] - z[None]).square().sum(-1)
    same = labels[:, None] == labels[None]
    positive = (apart * same).sum(1) / same.sum(1)
    behind = apart.masked_fill(same | (apart <= positive[:, None]), 9.0)
    return F.relu(positive - behind.min(1).values + 0.8).mean() + 0.01 * positive.mean()


@register("rows_head")
class ProxyAnchor(nn.Module):
    """Learnt proxies; only those with a positive in the batch count."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(CLASSES + 2, WIDTH))

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        similar = F.normalize(h, dim=1) @ F.normalize(self.proxies, dim=1).t()
        hot = F.one_hot(labels, CLASSES + 2).to(h.dtype)
        positive = torch.log1p((torch.exp(-4 * (similar - 0.1)) * hot).sum(0))
        negative = torch.log1p((torch.exp(4 * (similar + 0.1)) * (1 - hot)).sum(0))
        return positive.sum() / (hot.sum(0) > 0).sum() + negative.mean()


@register("rows_head", divides=2)
def siamese_halves(h: Tensor, labels: Tensor) -> Tensor:
    """Rows of the first half beside those of the second: alike if their labels are."""
    first, second = h.chunk(2)
    one, other = labels.chunk(2)
    sign = torch.where(one == other, 1.0, -1.0)
    return F.cosine_embedding_loss(first, second, sign, margin=0.2)


@register("rows_head", divides=2)
def preferred_pairs(h: Tensor) -> Tensor:
    """Chosen and rejected rows interleaved, as reward models have them."""
    chosen, rejected = h.mean(1).view(-1, 2).unbind(1)
    return -F.logsigmoid(chosen - rejected).mean()


@register("rows_head")
def combined_pairs(h: Tensor, scores: Tensor) -> Tensor:
    """Pairs listed by `torch.combinations`."""
    first, second = torch.combinations(torch.arange(h.shape[0])).unbind(1)
    apart = (h[first] - h[second]).square().sum(1)
    return F.smooth_l1_loss(apart, (scores[first] - scores[second]).abs())


@register("rows_head")
def parity(h: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    """A difference of the means of two groups, as fairness penalties have it."""
    out, group = torch.sigmoid(h.sum(1)), keep.to(h.dtype)
    kept = (out * group).sum() / group.sum()
    others = (out * (1 - group)).sum() / (1 - group).sum().clamp(min=1)
    return F.mse_loss(h, target) + (kept - others).abs()


@register("rows_head")
def worst_group(h: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Group DRO: the largest mean of a class."""
    loss = (h - target).square().mean(1)
    sums = torch.zeros(CLASSES, dtype=h.dtype).index_add(0, labels, loss)
    return (sums / torch.bincount(labels, minlength=CLASSES).clamp(min=1)).max()


@register("rows_head")
def calibrated(h: Tensor, keep: Tensor) -> Tensor:
    """Confidence beside accuracy in bins."""
    p, right = torch.sigmoid(h.mean(1)), keep.to(h.dtype)
    bins = torch.bucketize(p.detach(), torch.tensor([0.4, 0.5, 0.6], dtype=h.dtype))
    gap = torch.zeros(4, dtype=h.dtype).index_add(0, bins, p - right)
    return gap.abs().sum() / h.shape[0] + F.binary_cross_entropy(p, right)


@register("rows_head")
def trimmed_mean(h: Tensor, target: Tensor) -> Tensor:
    """Without the two largest losses."""
    loss = (h - target).square().mean(1)
    return loss.sort().values[:-2].mean()


@register("rows_head")
def below_median(h: Tensor, target: Tensor) -> Tensor:
    """Rows whose loss lies below the median of the batch count twice."""
    loss = (h - target).square().mean(1)
    weight = torch.where(loss.detach() < loss.detach().median(), 2.0, 1.0)
    return (weight * loss).mean()


@register("rows_head")
def picked_by_mask(h: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    """The mean over rows that a Boolean index picks: how many is known only then."""
    return (h - target).square().mean(1)[keep].mean()


@register("rows_head")
def temporal_difference(h: Tensor, scores: Tensor, keep: Tensor) -> Tensor:
    """Rows are steps of one episode: returns by a loop from the last to the first."""
    value, future, losses = h.mean(1), h.new_zeros(()), []
    for t in range(h.shape[0] - 1, -1, -1):
        future = scores[t] + 0.9 * future * keep[t]
        losses.append((value[t] - future).square())
    return torch.stack(losses).mean()


@register("rows_head")
def advantage_normed(h: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """A clipped policy gradient whose advantages are normed over the batch (PPO)."""
    log_p = h[:, :CLASSES].log_softmax(-1).gather(1, labels[:, None])[:, 0]
    ratio = torch.exp(log_p + 1.0)
    advantage = (scores - scores.mean()) / (scores.std() + 1e-2)
    clipped = ratio.clamp(0.8, 1.2) * advantage
    entropy = -(h[:, :CLASSES].softmax(-1) * h[:, :CLASSES].log_softmax(-1)).sum(-1)
    return -torch.min(ratio * advantage, clipped).mean() - 0.01 * entropy.mean()


@register("rows_head")
def group_relative(h: Tensor, scores: Tensor, groups: Tensor) -> Tensor:
    """Advantages within groups of samples of one prompt (GRPO)."""
    hot = F.one_hot(groups, CLASSES).to(h.dtype)
    count = hot.sum(0).clamp(min=1)
    mean = (hot * scores[:, None]).sum(0) / count
    spread = ((hot * (scores[:, None] - mean).square()).sum(0) / count).add(0.1).sqrt()
    advantage = (scores - mean[groups]) / spread[groups]
    return -(advantage * h.log_softmax(-1)[:, 0]).mean() + 0.01 * h.square().mean()
