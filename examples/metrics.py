"""Losses of the three tasks, their metrics, and the paper's Delta_m."""

import torch
from stereo import DISPARITY_SCALE, Scene
from torch import Tensor
from torch.nn import functional

# One primary metric a task, and whether lower is better.
PRIMARY = {
    "disparity": ("rmse", True),
    "normals": ("mean", True),
    "edges": ("F", False),
}


def loss(task: str, output: Tensor, scene: Scene) -> Tensor:
    """L1 for disparity and for unit normals, balanced cross-entropy for edges."""
    target, known = scene.targets[task], scene.known[task]
    if task == "edges":
        # The weight of each class is the share of the other one.
        positive = (target * known).sum() / known.sum()
        balance = torch.where(target > 0, 1 - positive, positive) * known
        return functional.binary_cross_entropy_with_logits(output, target, balance)
    return ((output - target).abs() * known).sum() / (known.sum() * target.shape[1])


def evaluate(task: str, output: Tensor, scene: Scene) -> dict[str, float]:
    """The metrics of one task: disparity in pixels, angles in degrees, shares in percent."""
    target, known = scene.targets[task], scene.known[task][:, 0] > 0
    if task == "disparity":
        error = (output - target)[:, 0][known] * DISPARITY_SCALE
        truth = target[:, 0][known] * DISPARITY_SCALE
        return {
            "rmse": error.square().mean().sqrt().item(),
            "abs_rel": (error.abs() / truth).mean().item(),
        }
    if task == "normals":
        cosine = (output * target).sum(1)[known].clamp(-1, 1)
        angle = torch.rad2deg(torch.arccos(cosine))
        return {
            "mean": angle.mean().item(),
            "median": angle.median().item(),
            **{f"<{t:g}": 100 * (angle < t).float().mean().item() for t in (11.25, 22.5, 30)},
        }
    # Per pixel, at a probability of one half.
    found, edge = output[:, 0][known] > 0, target[:, 0][known] > 0
    both = (found & edge).sum().item()
    return {"F": 100 * 2 * both / max(1, found.sum().item() + edge.sum().item())}


def delta_m(metrics: dict[str, dict[str, float]], baseline: dict[str, dict[str, float]]) -> float:
    """(1/T) sum_i (-1)^{l_i} (M_m,i - M_b,i) / M_b,i in percent; l_i = 1 where lower is better."""
    total = 0.0
    for task, (name, lower) in PRIMARY.items():
        change = (metrics[task][name] - baseline[task][name]) / baseline[task][name]
        total += -change if lower else change
    return 100 * total / len(PRIMARY)
