"""The table of features that each way to make gradients supports: loops train or are refused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import AB
from ranks import Pools
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import cs_kernels as cs
from cs_kernels.engine import supports

FEATURES: dict[str, dict[str, Any]] = {
    "a method that needs the gradients of all layers at once": {"method": cs.PCGrad()},
    "a weighting that computes losses again (`FAMO()`)": {"weighting": cs.FAMO()},
    "plain batch normalization in training": {"norm": nn.BatchNorm1d(6)},
    "`update_every` above 1": {"method": cs.PCGrad(groups="layer", update_every=2)},
    "kept gradients (`Protect` with `refresh_every` or `rank`)": {
        "method": cs.Protect(AB[0], refresh_every=2, groups="layer")
    },
    "`backward=`": {"backward": lambda loss, **options: loss.backward(**options)},
    "`count_conflicts`": {"counts": True},
    "micro-batches": {"waits": True},
    "task-specific normalization, as for `ConnectionStrength()`": {"norm": cs.nn.TaskBatchNorm1d},
    "Phase 1": {"schedule": cs.Sequential()},
}
ON_RANKS: dict[str, dict[str, Any]] = {
    "parameters after `fully_shard`": {"shards": True},
    "many ranks": {"ranks": True},
    "`GradDrop()` on many ranks": {"ranks": True, "method": cs.GradDrop()},
}


class Loop:
    """A trunk of two layers and a head per task, with one feature of the table in use."""

    def __init__(
        self,
        method: cs.Method | None = None,
        norm: Any = None,
        counts: bool = False,
        waits: bool = False,
        ranks: bool = False,
        shards: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(5, 6), nn.Identity(), nn.Linear(6, 6)]
        if norm is not None:
            layers[1] = norm(6, AB) if isinstance(norm, type) else norm
        self.trunk = nn.Sequential(*layers)
        if isinstance(norm, type):
            cs.nn.set_task(self.trunk, AB[0])
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in AB})
        if shards:
            fully_shard(self.trunk)
            for head in self.heads.values():
                fully_shard(head)
        if ranks:
            options["process_group"] = dist.group.WORLD
        self.parameters = [*self.trunk.parameters(), *self.heads.parameters()]
        self.sgd = torch.optim.SGD(self.parameters, lr=0.1)
        method = cs.PCGrad(groups="layer") if method is None else method
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.sgd, AB, method, **options)
        self.x = torch.randn(4, 5)
        if counts:
            self.opt.count_conflicts()
        self.waits = waits

    def losses(self, z: Tensor) -> dict[str, Tensor]:
        return {task: (self.heads[task](z) - 1).square().mean() for task in AB}

    def loss(self, task: str) -> Tensor:
        return self.losses(self.trunk(self.x))[task]

    def wait(self) -> None:
        if self.waits:
            self.opt.backward(self.losses(self.trunk(self.x)), update=False)

    def step(self, make: Callable[..., Any]) -> Any:
        return make([self.loss, self.loss] if self.waits else self.loss)

    def backward(self) -> None:
        self.wait()
        self.opt.backward(self.losses(self.trunk(self.x)))
        self.sgd.step()

    def features(self) -> None:
        self.wait()
        z = self.trunk(self.x)
        self.opt.backward(self.losses(z), features=z)
        self.sgd.step()

    def together(self) -> None:
        self.wait()
        self.opt.step_together(
            lambda run: {task: self.losses(z)[task] for task, z in run(self.x).items()}
        )


WAYS: dict[str, Callable[[Loop], Any]] = {
    supports.STEP: lambda loop: loop.step(loop.opt.step),
    supports.BACKWARD: Loop.backward,
    supports.FEATURES: Loop.features,
    supports.TOGETHER: Loop.together,
    supports.CAPTURED: lambda loop: loop.step(loop.opt.capture)(),
}


def _assert_as_in_the_table(name: str, options: dict[str, Any]) -> None:
    (feature,) = (one for one in supports.TABLE if one.name == name)
    for way, run in WAYS.items():
        loop = Loop(**options)
        before = [p.detach().clone() for p in loop.parameters]
        refused = way in feature.refused
        with pytest.raises(feature.error) if refused else nullcontext():
            run(loop)
        same = [torch.equal(p, old) for p, old in zip(loop.parameters, before, strict=True)]
        assert all(same) == refused, way


def _on_a_rank(rank: int) -> None:
    for name, options in ON_RANKS.items():
        _assert_as_in_the_table(name, options)


@pytest.mark.loop
@pytest.mark.parametrize("name", FEATURES)
def test_each_cell(name: str) -> None:
    _assert_as_in_the_table(name, FEATURES[name])


@pytest.mark.ranks
def test_each_cell_on_ranks(pools: Pools) -> None:
    pools(2).run(_on_a_rank)


@pytest.mark.loop
def test_every_row_is_tested() -> None:
    assert {*FEATURES, *ON_RANKS} == {feature.name for feature in supports.TABLE}
