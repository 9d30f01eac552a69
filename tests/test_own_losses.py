"""Gradients and losses beside those of the tasks: kept, or refused with a reason; never dropped."""

from collections.abc import Callable

import pytest
import torch
from networks import AB, assert_equal, sgd_of
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 6)
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in AB})
        self.sgd = sgd_of(self.trunk, self.heads)
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.sgd, AB, cs.PCGrad())
        self.x = torch.randn(8, 5)

    def loss(self, task: str) -> Tensor:
        found: Tensor = (self.heads[task](self.trunk(self.x)) - AB.index(task)).square().mean()
        return found

    def penalty(self) -> Tensor:
        return 0.1 * self.trunk.weight.square().sum()

    def make(self, how: str) -> None:
        if how == "step":
            self.opt.step(self.loss)
        else:
            self.opt.backward({task: self.loss(task) for task in AB})


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("of_head", [True, False])
def test_a_gradient_of_one_s_own_is_not_dropped(how: str, first: bool, of_head: bool) -> None:
    loop = Loop()
    if not first:
        loop.make(how)
        if how == "backward":
            loop.sgd.step()
        loop.sgd.zero_grad()
    loss = loop.heads["a"](loop.trunk(loop.x).detach()).sum() if of_head else loop.penalty()
    loss.backward()
    name = r"a parameter of shape \(1, 6\)" if of_head else "weight"
    with pytest.raises(
        RuntimeError, match=f"a loss of your own .* for {name} and . others: add this"
    ):
        loop.make(how)
    loop.sgd.zero_grad()
    loop.make(how)


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("of_head", [True, False])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_gradient_of_one_s_own_that_is_added_to_a_used_one(
    how: str, of_head: bool, zeros: bool
) -> None:
    loop = Loop()
    loop.make(how)
    if how == "backward":
        loop.sgd.step()
    if zeros:
        loop.sgd.zero_grad(set_to_none=False)
    (loop.heads["a"](loop.trunk(loop.x).detach()).sum() if of_head else loop.penalty()).backward()
    with pytest.raises(RuntimeError, match=r"a loss of your own .* for .* others: add this"):
        loop.make(how)
    loop.sgd.zero_grad()
    loop.make(how)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_clipping_after_the_step(how: str) -> None:
    """It has no effect, so it is in the wrong place."""
    loop = Loop()
    loop.make(how)
    if how == "backward":
        nn.utils.clip_grad_norm_(loop.trunk.parameters(), 1e-3)
        loop.sgd.step()
    nn.utils.clip_grad_norm_(loop.trunk.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"Clipping belongs before optimizer\.step"):
        loop.make(how)


def test_an_update_whose_step_a_scaler_skips() -> None:
    loop, scaler = Loop(), torch.amp.GradScaler("cpu")
    for _ in range(2):
        loop.opt.backward({task: scaler.scale(loop.loss(task) * torch.inf) for task in AB})
        scaler.unscale_(loop.sgd)
        scaler.step(loop.sgd)
        scaler.update()


def test_a_gradient_of_one_s_own_after_backward_adds_to_the_update() -> None:
    loop, other = Loop(), Loop()
    for one in (loop, other):
        one.make("backward")
    loop.penalty().backward()
    expected = other.trunk.weight.grad + 0.2 * other.trunk.weight
    torch.testing.assert_close(loop.trunk.weight.grad, expected)
    loop.sgd.step()
    loop.make("backward")


def test_after_a_skipped_update() -> None:
    """It was dropped on purpose; what is there now is something else."""
    loop = Loop()
    loop.make("backward")
    loop.sgd.zero_grad()
    loop.penalty().backward()
    with pytest.raises(RuntimeError, match=r"a loss of your own .* for weight and 0 others"):
        loop.make("backward")


@pytest.mark.parametrize("how", ["step", "backward"])
def test_an_update_is_not_used_twice(how: str) -> None:
    loop = Loop()
    loop.make(how)
    if how == "backward":
        loop.sgd.step()
    before = loop.trunk.weight.detach().clone()
    loop.loss("a").backward()  # Adds to the update.
    with pytest.raises(RuntimeError, match=r"has used the update in \.grad before"):
        loop.sgd.step()
    assert torch.equal(before, loop.trunk.weight)
    loop.sgd.zero_grad()
    loop.loss("a").backward()
    loop.sgd.step()
    assert not torch.equal(before, loop.trunk.weight)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_two_that_share_a_torch_optimizer(how: str) -> None:
    """The second would drop the update of the first."""
    loop, other = Loop(), Loop()
    loop.sgd.add_param_group({"params": [*other.trunk.parameters(), *other.heads.parameters()]})
    loop.opt = cs.MultiTaskOptimizer(loop.trunk, loop.sgd, AB, cs.PCGrad())
    other.opt = cs.MultiTaskOptimizer(other.trunk, loop.sgd, AB, cs.PCGrad())
    for end in (loop.sgd.step, loop.sgd.zero_grad):
        loop.make("backward")
        with pytest.raises(RuntimeError, match="another MultiTaskOptimizer's backward"):
            other.make(how)
        assert loop.trunk.weight.grad.any()
        end()
        other.make(how)
        if how == "backward":
            loop.sgd.step()
        loop.sgd.zero_grad()


def test_two_that_share_a_torch_optimizer_in_turn() -> None:
    loop, other = Loop(), Loop()
    loop.sgd.add_param_group({"params": [*other.trunk.parameters(), *other.heads.parameters()]})
    loop.opt = cs.MultiTaskOptimizer(loop.trunk, loop.sgd, AB, cs.PCGrad())
    other.opt = cs.MultiTaskOptimizer(other.trunk, loop.sgd, AB, cs.PCGrad())
    alone = Loop()
    for _ in range(3):
        for one in (loop, other, alone):
            one.make("backward")
            (alone if one is alone else loop).sgd.step()
            if one is not alone:
                with pytest.raises(RuntimeError, match=r"has used the update in \.grad before"):
                    loop.sgd.step()
    for one in (loop, other):
        assert_equal([*one.trunk.parameters()], [*alone.trunk.parameters()])


LOOPS: dict[str, Callable[[Loop], None]] = {
    "a norm that is read": lambda o: nn.utils.get_total_norm(
        [p.grad for p in o.trunk.parameters()]
    ),
    "zeros in place": lambda o: o.sgd.zero_grad(set_to_none=False),
    "plain steps": lambda o: [
        (o.sgd.zero_grad(), o.loss("a").backward(), o.sgd.step()) for _ in "ab"
    ],
    "plain steps with zeros": lambda o: [
        (
            o.sgd.zero_grad(),
            o.sgd.zero_grad(set_to_none=False),
            o.loss("a").backward(),
            o.sgd.step(),
        )
        for _ in "ab"
    ],
    "a gradient that is dropped": lambda o: (
        o.sgd.zero_grad(),
        o.penalty().backward(),
        o.sgd.zero_grad(),
    ),
    "gradients of zero": lambda o: (o.sgd.zero_grad(), (0 * o.penalty()).backward()),
}


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("between", LOOPS)
def test_right_loops_are_left_alone(between: str, how: str) -> None:
    loop = Loop()
    for _ in range(3):
        loop.make(how)
        if how == "backward":
            loop.sgd.step()
        LOOPS[between](loop)


def test_gradients_from_before_the_optimizer_was_built() -> None:
    """They were used by plain steps."""
    before = Loop()
    before.loss("a").backward()
    before.sgd.step()
    after = cs.MultiTaskOptimizer(before.trunk, before.sgd, AB, cs.PCGrad())
    after.step(before.loss)


# --- a loss that reaches parameters without an effect ---


@pytest.mark.parametrize("method", [cs.PCGrad, cs.UPGrad, cs.NashMTL, cs.GradDrop])
@pytest.mark.parametrize("idiom", [True, False])
def test_zero_times_everything(method: type[cs.Method], idiom: bool) -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"trunk": nn.Linear(5, 6), "a": nn.Linear(6, 1), "b": nn.Linear(6, 1)})
    sgd = sgd_of(net)
    opt = cs.MultiTaskOptimizer(net, sgd, AB, method())

    def losses() -> dict[str, Tensor]:
        z, zero = net["trunk"](torch.randn(8, 5)), 0 * sum(p.sum() for p in net.parameters())
        extra = zero if idiom else 0
        return {t: (net[t](z) - i).square().mean() + extra for i, t in enumerate(AB)}

    if idiom:
        with pytest.warns(UserWarning, match=r"gradient of 'b' is zero .* a.weight and 3 others"):
            opt.backward(losses())
        sgd.step()
    for _ in range(2):  # Once, or never.
        opt.backward(losses())
        sgd.step()


# --- why a loss does not reach the trunk, and what to do ---


def _no_grad(loop: Loop) -> Tensor:
    with torch.no_grad():
        z = loop.trunk(loop.x)
    return loop.heads["a"](z).sum()


def _other(loop: Loop) -> Tensor:
    return loop.heads["a"](nn.Linear(5, 6).requires_grad_(False)(loop.x)).sum()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            lambda o: o.heads["a"](o.trunk(o.x).detach()).sum(),
            "was detached on the way to the loss",
        ),
        (_no_grad, "ran without gradients"),
        (_other, "no layer of trunk ran in this pass, but perhaps one of a copy"),
    ],
)
def test_why_a_loss_does_not_reach_the_trunk(loss: Callable[[Loop], Tensor], reason: str) -> None:
    loop = Loop()
    with pytest.raises(ValueError, match=f"depend on a parameter of trunk.*'a'.*{reason}"):
        loop.opt.step(lambda _: loss(loop))
    with pytest.raises(ValueError, match="features were detached, or computed without gradients"):
        _backward(loss)


def _backward(loss: Callable[[Loop], Tensor]) -> None:
    loop = Loop()
    loop.opt.backward({"a": loss(loop), "b": loop.loss("b")})


def test_parameters_that_were_exchanged() -> None:
    loop = Loop()
    loop.make("step")
    loop.trunk.load_state_dict(
        {k: v.clone() for k, v in loop.trunk.state_dict().items()}, assign=True
    )
    with pytest.raises(ValueError, match=r"trunk must keep the parameters .* build a new one"):
        loop.make("step")


def test_a_batch_without_labels() -> None:
    loop = Loop()
    with pytest.raises(
        ValueError, match=r"no labels for it, name the others, step\(closure, tasks"
    ):
        loop.opt.step(lambda task: loop.loss("a") if task == "a" else torch.tensor(0.0))
    with pytest.raises(ValueError, match="no labels for it, leave it out"):
        loop.opt.backward({"a": loop.loss("a"), "b": torch.tensor(0.0)})


def test_a_network_that_is_only_read() -> None:
    loop, discriminator = Loop(), nn.Linear(6, 1)
    loss = discriminator(loop.trunk(loop.x)).mean()
    with pytest.raises(
        ValueError, match=r"freeze them by requires_grad_\(False\) if they are only"
    ):
        loop.opt.backward({"a": loss, "b": loop.loss("b")})


def test_sparse_gradients() -> None:
    trunk = nn.Sequential(nn.EmbeddingBag(20, 5, sparse=True), nn.Linear(5, 6))
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.PCGrad())
    z = trunk(torch.randint(0, 20, (8, 3)))
    with pytest.raises(
        ValueError, match=r"use sparse=False, Sum\(\), or backward\(losses, features=z"
    ):
        opt.backward({"a": z.mean(), "b": z.square().mean()})


def test_a_frozen_trunk() -> None:
    trunk, heads = nn.Linear(5, 6).requires_grad_(False), nn.Linear(6, 1)
    with pytest.raises(ValueError, match="unfreeze some, or train the heads"):
        cs.MultiTaskOptimizer(trunk, sgd_of(trunk, heads), AB, cs.PCGrad())


def test_lbfgs_and_fused_modules_say_what_to_do() -> None:
    trunk = nn.Linear(5, 6)
    with pytest.raises(ValueError, match=r"hand over SGD\(lr=0\)"):
        cs.MultiTaskOptimizer(trunk, torch.optim.LBFGS(trunk.parameters()), AB, cs.PCGrad())

    class Fused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 6)
            self.bn = nn.BatchNorm1d(6)

    with pytest.raises(ValueError, match=r"must not be fused for quantization .* Fused at '0'"):
        cs.nn.convert_task_batchnorm(nn.Sequential(Fused()), AB)


def test_layers_that_would_be_ignored() -> None:
    trunk = cs.nn.convert_task_batchnorm(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), AB)
    for method in (cs.PCGrad(), cs.GradDrop(), cs.Sum(separate=True)):
        with pytest.raises(ValueError, match=r"layers must be empty for .* got {'0': None}"):
            cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, method, layers={"0": None})
    cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, layers={"0": None})
    cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, cs.Sum(), layers={"0": None})


def test_a_method_says_itself_whether_it_is_layerwise() -> None:
    """A `combine` of its own may look at all layers."""

    class Own(cs.Method):
        layerwise = True

        def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
            reached = gradients.reached()
            if not reached:
                gradients.clear()
                return
            rows = gradients.of(reached)
            for i, update in enumerate(gradients.updates(reached)):
                of = rows[i * len(gradients.rows) : (i + 1) * len(gradients.rows)]
                update.copy_(sum(g for g in of if g is not None))
            gradients.assign(reached)

    class Unsaid(cs.ConnectionStrength):
        def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
            super().combine(gradients, layout, step)

    def together(method: cs.Method) -> None:
        torch.manual_seed(0)
        trunk = cs.nn.convert_task_batchnorm(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), AB)
        opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), AB, method)
        x = torch.randn(8, 5)
        opt.step_together(lambda run: {t: (z - 1).square().mean() for t, z in run(x).items()})

    together(Own())
    assert not Unsaid().layerwise
    with pytest.raises(ValueError, match="which never has all gradients"):
        together(Unsaid())
