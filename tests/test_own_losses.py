"""A user's own gradients and losses are used or refused with a reason, but never dropped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import AB, assert_equal, sgd_of
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

BOTH_WAYS = pytest.mark.parametrize("way", ["step", "backward"])


def built(trunk: nn.Module, optimizer: Any, *arguments: Any, **options: Any) -> Any:
    return cs.MultiTaskOptimizer(trunk, optimizer, AB, *(arguments or [cs.PCGrad()]), **options)


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 6)
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in AB})
        self.sgd = sgd_of(self.trunk, self.heads)
        self.opt = built(self.trunk, self.sgd)
        self.x = torch.randn(8, 5)

    def loss(self, task: str) -> Tensor:
        loss: Tensor = (self.heads[task](self.trunk(self.x)) - AB.index(task)).square().mean()
        return loss

    def penalty(self) -> Tensor:
        return 0.1 * self.trunk.weight.square().sum()

    def head_loss(self) -> Tensor:
        return self.heads["a"](self.trunk(self.x).detach()).sum()

    def leave(self) -> None:
        """Makes an update that waits for its step."""
        self.opt.backward({task: self.loss(task) for task in AB})

    def make(self, way: str) -> None:
        if way == "step":
            self.opt.step(self.loss)
        else:
            self.leave()
            self.sgd.step()


ACTIONS: dict[str, Callable[[Loop], object]] = {
    "L": Loop.leave,
    "s": lambda loop: loop.sgd.step(),
    "z": lambda loop: loop.sgd.zero_grad(),
    "Z": lambda loop: loop.sgd.zero_grad(set_to_none=False),
    "o": lambda loop: loop.penalty().backward(),
    "h": lambda loop: loop.head_loss().backward(),
    "0": lambda loop: (0 * loop.penalty()).backward(),
    "a": lambda loop: loop.loss("a").backward(),
    "c": lambda loop: nn.utils.clip_grad_norm_(loop.trunk.parameters(), 1e-3),
    "n": lambda loop: nn.utils.get_total_norm([p.grad for p in loop.trunk.parameters()]),
}
OWN = r"gradients of weight( \(and . more\))? come from a loss outside .*: add this"
OWN_OF_HEAD = r"of a parameter of shape \(1, 6\) \(and . more\) .* a loss outside .*: add this"
CLIPPING = r"Clip before optimizer\.step"
USED = r"has already used the update in \.grad"
LOOPS = {
    # The user's own gradients, in the first step or later, also added to a used update.
    **dict.fromkeys(("oM", "MzoM", "MoM", "MZoM", "LzoM"), OWN),
    **dict.fromkeys(("hM", "MzhM"), OWN_OF_HEAD),
    **dict.fromkeys(("MhM", "MZhM"), "a loss outside this"),
    **dict.fromkeys(("McM", "LcscM"), CLIPPING),
    # An update may be used only once.
    **dict.fromkeys(("Ms", "Mas", "Lsas"), USED),
    # Correct loops.
    **dict.fromkeys(("MnMnM", "MZMZM", "MzaszasM", "MzZaszZasM", "MzozM", "Mz0M", "LcsM", "LosM")),
}


def run(loop: Loop, letters: str, way: str) -> None:
    for letter in letters:
        loop.make(way) if letter == "M" else ACTIONS[letter](loop)


@BOTH_WAYS
@pytest.mark.parametrize("letters", LOOPS)
def test_loops(letters: str, way: str) -> None:
    """A refused call changes no parameter; once gradients are cleared, the loop goes on."""
    loop = Loop()
    run(loop, letters[:-1], way)
    if LOOPS[letters] is None:
        run(loop, letters[-1], way)
        return
    before = loop.trunk.weight.detach().clone()
    with pytest.raises(RuntimeError, match=LOOPS[letters]):
        run(loop, letters[-1], way)
    assert torch.equal(before, loop.trunk.weight)
    run(loop, "zasM", way)
    assert not torch.equal(before, loop.trunk.weight)


def test_an_update_whose_step_a_scaler_skips() -> None:
    loop, scaler = Loop(), torch.amp.GradScaler("cpu")
    for _ in range(2):
        loop.opt.backward({task: scaler.scale(loop.loss(task) * torch.inf) for task in AB})
        scaler.unscale_(loop.sgd)
        scaler.step(loop.sgd)
        scaler.update()


def test_an_own_gradient_after_backward_adds_to_the_update() -> None:
    loop, other = Loop(), Loop()
    run(loop, "Lo", "backward")
    other.leave()
    expected = other.trunk.weight.grad + 0.2 * other.trunk.weight
    torch.testing.assert_close(loop.trunk.weight.grad, expected)


def test_gradients_from_before_the_optimizer_was_built() -> None:
    """Plain steps have already used these gradients."""
    loop = Loop()
    run(loop, "as", "")
    built(loop.trunk, loop.sgd).step(loop.loss)


@BOTH_WAYS
def test_two_that_share_a_torch_optimizer(way: str) -> None:
    """Neither MultiTaskOptimizer drops the other's update; each trains as if it were alone."""
    loop, other, alone = Loop(), Loop(), Loop()
    loop.sgd.add_param_group({"params": [*other.trunk.parameters(), *other.heads.parameters()]})
    other.sgd = loop.sgd
    for one in (loop, other):
        one.opt = built(one.trunk, loop.sgd)
    for one in (loop, other, loop, other, alone, alone):
        one.make("backward")
        with pytest.raises(RuntimeError, match=USED):
            one.sgd.step()
    for one in (loop, other):
        assert_equal([*one.trunk.parameters()], [*alone.trunk.parameters()])
    for end in (loop.sgd.step, loop.sgd.zero_grad):
        loop.leave()
        with pytest.raises(RuntimeError, match="another MultiTaskOptimizer's backward"):
            other.make(way)
        assert loop.trunk.weight.grad.any()
        end()
        other.make(way)


@pytest.mark.parametrize("method", [cs.PCGrad, cs.UPGrad, cs.NashMTL, cs.GradDrop])
@pytest.mark.parametrize("idiom", [True, False])
def test_zero_times_everything(method: type[cs.Method], idiom: bool) -> None:
    """A loss that reaches a parameter only through a factor of zero causes one warning."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"trunk": nn.Linear(5, 6), "a": nn.Linear(6, 1), "b": nn.Linear(6, 1)})
    opt = built(net, sgd_of(net), method())

    def train() -> None:
        z, zero = net["trunk"](torch.randn(8, 5)), 0 * sum(p.sum() for p in net.parameters())
        extra = zero if idiom else 0
        opt.backward({t: (net[t](z) - i).square().mean() + extra for i, t in enumerate(AB)})
        opt.optimizer.step()

    if idiom:
        with pytest.warns(UserWarning, match=r"zero .* a.weight, which only 'a' .* for 3 more"):
            train()
    for _ in range(2):
        train()


def _step(loss: Callable[[Loop], Tensor]) -> Callable[[], object]:
    return lambda: (o := Loop()).opt.step(lambda task: loss(o) if task == "a" else o.loss(task))


def _backward(loss: Callable[[Loop], Tensor]) -> Callable[[], object]:
    return lambda: (loop := Loop()).opt.backward({"a": loss(loop), "b": loop.loss("b")})


def _no_grad(loop: Loop) -> Tensor:
    with torch.no_grad():
        z = loop.trunk(loop.x)
    return loop.heads["a"](z).sum()


def _of_a_copy(loop: Loop) -> Tensor:
    return loop.heads["a"](nn.Linear(5, 6).requires_grad_(False)(loop.x)).sum()


def _only_read(loop: Loop) -> Tensor:
    return nn.Linear(6, 1)(loop.trunk(loop.x)).mean()


def _without_labels(loop: Loop) -> Tensor:
    return torch.tensor(0.0)


def _exchanged() -> None:
    loop = Loop()
    loop.make("step")
    state = {name: value.clone() for name, value in loop.trunk.state_dict().items()}
    loop.trunk.load_state_dict(state, assign=True)
    loop.make("step")


def _sparse() -> None:
    trunk = nn.Sequential(nn.EmbeddingBag(20, 5, sparse=True), nn.Linear(5, 6))
    z = trunk(torch.randint(0, 20, (8, 3)))
    built(trunk, sgd_of(trunk)).backward({"a": z.mean(), "b": z.square().mean()})


class Fused(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 6)
        self.bn = nn.BatchNorm1d(6)


def converted(method: cs.Method, **options: Any) -> cs.MultiTaskOptimizer:
    trunk = cs.nn.convert_task_batchnorm(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), AB)
    return built(trunk, sgd_of(trunk), method, **options)


def together(method: cs.Method) -> None:
    converted(method).step_together(
        lambda run: {t: (z - 1).square().mean() for t, z in run(torch.randn(8, 5)).items()}
    )


class Unsaid(cs.ConnectionStrength):
    """Has its own `combine`, which could read all layers, so `layerwise` becomes False."""

    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        super().combine(gradients, layout, step)


REACHES = "depend on a parameter of trunk.*'a'.*"
DETACHED = "features of trunk were detached, or computed without gradients"
IGNORED = r"layers must be empty for .* got {'0': None}"


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (_step(Loop.head_loss), REACHES + "was detached on the way to the loss"),
        (_step(_no_grad), REACHES + "ran without gradients"),
        (_step(_of_a_copy), REACHES + "no layer of trunk ran in this pass: did a copy"),
        *((_backward(loss), DETACHED) for loss in (Loop.head_loss, _no_grad, _of_a_copy)),
        (_step(_without_labels), r"for the task, pass only the others: step\(closure, tasks"),
        (_backward(_without_labels), "no labels for the task, leave it out"),
        (_backward(_only_read), r"freeze them with requires_grad_\(False\) if this loss only"),
        (_exchanged, r"trunk must keep the parameters .* build a new MultiTask"),
        (_sparse, r"use sparse=False, .*Sum\(\) or backward\(losses, features=z"),
        (
            lambda: built(nn.Linear(5, 6).requires_grad_(False), sgd_of(nn.Linear(6, 1))),
            "unfreeze some, or train the heads",
        ),
        (
            lambda: built(trunk := nn.Linear(5, 6), torch.optim.LBFGS(trunk.parameters())),
            r"train with Adam and surgery first",
        ),
        (
            lambda: cs.nn.convert_task_batchnorm(nn.Sequential(Fused()), AB),
            r"must not be fused for quantization .* Fused '0'",
        ),
        *(
            (lambda method=method: converted(method, layers={"0": None}), IGNORED)
            for method in (cs.PCGrad(), cs.GradDrop(), cs.Sum(separate=True))
        ),
        (lambda: together(Unsaid()), "which never has all gradients"),
    ],
)
def test_messages(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def test_accepted_methods() -> None:
    for method in (cs.ConnectionStrength(), cs.Sum()):
        converted(method, layers={"0": None})
    together(type("Said", (Unsaid,), {"layerwise": True})())
