"""The networks of the paper's experiments: their sizes, outputs, and which loss reaches what."""

import copy
import re
from collections.abc import Callable, Mapping

import pytest
import torch
from networks import assert_equal, sgd_of
from paper import cross_stitch, mti_net, recon, rotograd, segnet
from paper.network import Network
from paper.networks import NAMES, make_network
from paper.tasks import TASKS, Task
from torch import Tensor, nn
from torch.nn import functional

import cs_kernels as cs

pytestmark = pytest.mark.paper

NYUD, PASCAL, CITYSCAPES = TASKS["nyud"], TASKS["pascal"], TASKS["cityscapes"]
MTI_NETS = ("hrnet18", "resnet18")
EVERY_NETWORK = pytest.mark.parametrize("name", NAMES)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _counted(name: str, tasks: Mapping[str, Task], **options: object) -> int:
    with torch.device("meta"):
        return _count(make_network(name, tasks, **options))


def _small(
    name: str, tasks: Mapping[str, Task] | None = None, **options: object
) -> tuple[Network, Tensor]:
    """A network of each kind that is quick on a CPU, and a picture."""
    torch.manual_seed(0)
    width = 1.0 if name == "hrnet18" else 1 / 16
    tasks = tasks or (NYUD if name in MTI_NETS else CITYSCAPES)
    network = make_network(name, tasks, width=width, **options)
    generator = torch.Generator().manual_seed(1)
    return network, torch.randn(2, 3, 64 if name in MTI_NETS else 32, 64, generator=generator)


def _loss(predictions: list[Tensor]) -> Tensor:
    return sum((prediction - 1).square().mean() for prediction in predictions)


# The numbers of parameters follow by arithmetic from the published structures.


def test_hrnet_has_the_parameters_of_the_published_network() -> None:
    """HRNet-W18-Small-v2: stages of 1, 1, 3 and 2 modules with two blocks a branch."""
    with torch.device("meta"):
        assert _count(mti_net.HRNet()) == 3_860_720


@pytest.mark.parametrize(
    ("tasks", "hrnet", "resnet", "narrow_resnet"),
    [
        (NYUD, 17_960_945, 144_853_985, 13_310_265),
        (PASCAL, 24_494_171, 205_085_525, 14_250_419),
        ({"semseg": NYUD["semseg"]}, 3_945_270, 14_876_264, 11_266_280),
    ],
    ids=["nyud", "pascal", "a single task"],
)
def test_mti_net_has_the_parameters_of_the_published_network(
    tasks: dict[str, Task], hrnet: int, resnet: int, narrow_resnet: int
) -> None:
    """With a single task, it is the backbone and a head."""
    assert _counted("hrnet18", tasks) == hrnet
    assert _counted("resnet18", tasks) == resnet
    assert _counted("resnet18", tasks, width=1 / 8) == narrow_resnet


def test_sizes_are_those_in_the_papers_table() -> None:
    """In MiB; a rotation itself needs values, so it is counted by itself."""

    def mebibytes(count: int) -> str:
        return f"{4 * count / 2**20:.2f}"

    segnet_size = _counted("segnet", CITYSCAPES)
    assert segnet_size + segnet.PUBLISHED_EXTRAS == 25_017_675
    assert mebibytes(segnet_size) == "95.43"
    alone = sum(_counted("segnet", {name: task}) for name, task in CITYSCAPES.items())
    assert alone == 49_960_968
    stitched = _counted("cross-stitch", CITYSCAPES)
    assert stitched == alone + 10 * 4
    assert mebibytes(alone) == mebibytes(stitched) == "190.59"
    # Task-specific normalization adds a gamma and a beta to each of 7168 channels.
    assert _counted("segnet", CITYSCAPES, task_norm=True) == segnet_size + 2 * 7168
    rotations = 2 * _count(rotograd.Rotation(rotograd.SIZE))
    assert mebibytes(segnet_size + rotations) == "103.43"
    small, _ = _small("rotograd")
    assert _count(small.rotation) == 2 * (rotograd.SIZE // 16) ** 2


# Outputs.


@EVERY_NETWORK
def test_predictions_have_the_size_of_the_picture(name: str) -> None:
    network, picture = _small(name)
    predictions = network(picture)
    tasks = NYUD if name in MTI_NETS else CITYSCAPES
    assert list(predictions) == list(tasks)
    for task, of_task in predictions.items():
        assert len(of_task) == (5 if name in MTI_NETS else 1)
        shape = (2, tasks[task].channels, *picture.shape[-2:])
        assert all(p.shape == shape and p.dtype == torch.float32 for p in of_task)


@EVERY_NETWORK
@torch.no_grad()
def test_only_the_heads_of_the_asked_tasks_run(name: str) -> None:
    network, picture = _small(name)
    network.eval()
    ran: list[str] = []
    for task, head in network.heads.items():
        head.register_forward_hook(lambda *_, task=task: ran.append(task))
    everything = network(picture)
    assert ran == list(network.heads)
    for task in network.heads:
        ran.clear()
        alone = network(picture, [task])
        assert ran == list(alone) == [task]
        assert_equal(alone[task], everything[task])


@torch.no_grad()
def test_mti_net_predicts_from_fine_to_coarse_and_then_finally() -> None:
    network, picture = _small("hrnet18")
    network.eval()
    maps, initial = network.trunk(picture)["normals"]
    scales = [*initial, network.heads["normals"](maps)[-1]]
    assert [x.shape[-1] for x in scales] == [16, 8, 4, 2, 16]
    expected = [
        functional.interpolate(x, scale_factor=64 // x.shape[-1], mode="bilinear") for x in scales
    ]
    torch.testing.assert_close(network(picture)["normals"], expected)


@pytest.mark.parametrize("name", ["hrnet18", "resnet18", "segnet"])
def test_single_task_networks_have_one_prediction(name: str) -> None:
    network, picture = _small(name, {"normals": NYUD["normals"]}, task_norm=True)
    with cs.nn.active_task(network.trunk, "normals"):
        (prediction,) = network(picture)["normals"]
    assert prediction.shape == (2, 3, *picture.shape[-2:])


def _names(network: Network) -> list[str]:
    return [name for name, _ in network.named_parameters(remove_duplicate=False)]


def test_run_trunk_is_no_submodule() -> None:
    network, picture = _small("segnet")
    copied = copy.deepcopy(network.eval())
    assert copied.run_trunk is copied.trunk
    before, names, calls = network(picture), _names(network), []
    compiled = network.run_trunk = torch.compile(network.trunk, backend="eager")
    assert _names(network) == names
    network.run_trunk = lambda picture: calls.append(1) or compiled(picture)
    torch.testing.assert_close(network(picture), before)
    assert calls == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "vgg"}, "name must be one of .* got 'vgg'"),
        ({"tasks": {}}, "tasks must have at least one"),
        ({"width": 0.0}, r"width must be in \(0, 1\], got 0.0"),
        ({"width": 1.5}, r"width must be in \(0, 1\], got 1.5"),
        ({"name": "hrnet18", "width": 0.5}, "width must be 1 for 'hrnet18', got 0.5"),
        ({"pretrained": True}, "pretrained must be False for 'segnet', got True"),
        ({"name": "rotograd", "task_norm": True}, "task_norm must be False for 'rotograd'"),
        ({"name": "cross-stitch", "tasks": {"depth": CITYSCAPES["depth"]}}, "at least two"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_network(**{"name": "segnet", "tasks": CITYSCAPES, **arguments})


def test_tasks_of_other_networks_are_refused() -> None:
    network, picture = _small("segnet")
    with pytest.raises(ValueError, match=r"tasks must be among .* got 'edge'"):
        network(picture, ["edge"])


# The parts of MTI-Net.


def test_propagation_masks_neighboring_channels() -> None:
    part = mti_net.Propagation(["a", "b", "c"], 4).eval()
    features = {task: torch.randn(2, 4, 3, 3) for task in "abc"}
    together = torch.cat(list(features.values()), 1)
    scores = part.attend(together)
    masked = torch.empty_like(together)
    for c in range(12):
        group = scores[:, c // 3 * 3 : c // 3 * 3 + 3]
        masked[:, c] = together[:, c] * scores[:, c].exp() / group.exp().sum(1)
    shared = part.reduce(masked)
    propagated = part(features)
    for task in "abc":
        first, _, last, _ = part.excite[task].factors
        means = shared.mean((2, 3))
        factors = torch.sigmoid(last(torch.relu(first(means))))
        expected = shared * factors[..., None, None] + features[task]
        torch.testing.assert_close(propagated[task], expected)


def test_distillation_adds_the_other_tasks_features() -> None:
    part = mti_net.Distillation(["a", "b", "c"], 4)
    features = {task: torch.randn(2, 4, 3, 3) for task in "abc"}
    expected = features["b"]
    for other in "ac":
        gate = part.gates["b"][other]
        mask, value = (
            functional.conv2d(features[other], layer.weight, padding=1)
            for layer in (gate.mask, gate.value)
        )
        expected = expected + mask.sigmoid() * value
    torch.testing.assert_close(part(features)["b"], expected)


# The parameters that each loss reaches.


def _reached(network: Network, loss_of: Callable[[], Tensor]) -> set[str]:
    network.zero_grad()
    loss_of().backward()
    return {name for name, p in network.named_parameters() if p.grad is not None}


@EVERY_NETWORK
def test_each_loss_reaches_the_trunk_and_its_own_head(name: str) -> None:
    """In MTI-Net, also its initial predictions, and the gates of its own features."""
    network, picture = _small(name)
    names = {*_names(network)}
    for task in network.heads:
        others = "|".join(other for other in network.heads if other != task)
        elsewhere = re.compile(rf"heads\.({others})\.|.*\.(predict|gates)\.({others})\.|rotation\.")
        expected = {name for name in names if not elsewhere.match(name)}
        assert _reached(network, lambda task=task: _loss(network(picture)[task])) == expected
        last = _reached(network, lambda task=task: _loss(network(picture, [task])[task][-1:]))
        assert last == {name for name in expected if ".predict." not in name}
        assert {name for name in names if "backbone" in name} <= last


@pytest.mark.parametrize("name", ["hrnet18", "resnet18", "segnet", "cross-stitch"])
def test_task_norm_prioritizes_convolutions(name: str) -> None:
    network, picture = _small(name, task_norm=True)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network, lr=0.01), list(network.heads))
    opt.step(lambda task: _loss(network(picture, [task])[task]))
    norm_of = opt.coverage().prioritized
    if name == "segnet":
        modules = network.trunk.named_modules()
        assert set(norm_of) == {f"{name}.weight" for name, m in modules if type(m) is nn.Conv2d}
        assert norm_of["encoder.0.0.weight"] == "encoder.0.1"
    elif name == "cross-stitch":
        assert norm_of["networks.depth.decoder.4.3.weight"] == "networks.depth.decoder.4.4"
        assert len(norm_of) == 52
    else:
        refine = "initial.0.refine.edge.0"
        assert norm_of[f"{refine}.conv1.weight"] == f"{refine}.bn1"
        assert norm_of["propagate.1.reduce.conv2.weight"] == "propagate.1.reduce.bn2"
        assert not any("predict" in name or "gates" in name for name in norm_of)
        assert any(name.startswith("backbone.body") for name in norm_of)


# Cross-stitch.


def test_a_cross_stitch_unit_begins_near_the_identity() -> None:
    unit = cross_stitch.CrossStitch(3)
    a, b, c = torch.randn(3, 2, 4, 2, 2)
    mixed = unit([a, b, c])
    torch.testing.assert_close(mixed[0], 0.9 * a + 0.05 * b + 0.05 * c)
    torch.testing.assert_close(mixed[2], 0.05 * a + 0.05 * b + 0.9 * c)


@torch.no_grad()
def test_stitched_segnets_follow_the_formula() -> None:
    trunk = cross_stitch.StitchedSegNets(["a", "b"], 1 / 64).double().eval()
    for unit in [*trunk.down, *trunk.up]:
        nn.init.normal_(unit.weight)
    picture = torch.randn(1, 3, 32, 64, dtype=torch.float64)
    one, two = trunk.networks["a"], trunk.networks["b"]
    a, b, places = picture, picture, []

    def mixed(unit: cross_stitch.CrossStitch, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        (aa, ab), (ba, bb) = unit.weight
        return aa * a + ab * b, ba * a + bb * b

    for stage in range(5):
        a, of_a = functional.max_pool2d(one.encoder[stage](a), 2, return_indices=True)
        b, of_b = functional.max_pool2d(two.encoder[stage](b), 2, return_indices=True)
        a, b = mixed(trunk.down[stage], a, b)
        places.append((of_a, of_b))
    for stage in range(5):
        of_a, of_b = places.pop()
        a = one.decoder[stage](functional.max_unpool2d(a, of_a, 2))
        b = two.decoder[stage](functional.max_unpool2d(b, of_b, 2))
        a, b = mixed(trunk.up[stage], a, b)
    torch.testing.assert_close(trunk(picture), {"a": (a,), "b": (b,)})


# RotoGrad.

SIZE = 5
"""Rotated entries, of the feature's 8."""


class Outputs(nn.Conv2d):
    """A linear head."""

    def forward(self, maps: Tensor) -> list[Tensor]:
        return [super().forward(maps)]


class Regression:
    """Three linear tasks on a linear trunk, in float64, with the paper's equations by autograd."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        heads = {task: Outputs(2, 1, 1, bias=False) for task in "abc"}
        self.network = rotograd.RotoGrad(nn.Conv2d(3, 2, 1, bias=False), heads, SIZE).double()
        for rotation in self.network.rotation.values():
            rotation.matrix = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64))[0]
        self.x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
        self.targets = {task: torch.randn(4, 1, 2, 2, dtype=torch.float64) for task in "abc"}
        self.initial: Tensor | None = None

    def loss(self, task: str, predictions: list[Tensor]) -> Tensor:
        return (predictions[-1] - self.targets[task]).square().sum() / 2

    def backward(self) -> dict[str, Tensor]:
        return self.network.backward(self.x, self.loss)

    def expected(self) -> dict[str, Tensor]:
        network = self.network
        shared = network.trunk(self.x)
        feature = shared.detach().requires_grad_()
        gradients, own, rotated = {}, [], {}
        for task, head in network.heads.items():
            whole = torch.eye(8, dtype=torch.float64)
            whole[:SIZE, :SIZE] = network.rotation[task].matrix.detach()
            seen = (feature.flatten(1) @ whole.T).view_as(feature)
            loss = self.loss(task, head(seen))
            found = torch.autograd.grad(loss, [head.weight, seen, feature])
            gradients[f"heads.{task}.weight"] = found[0]
            rotated[task] = found[1].flatten(1)[:, :SIZE]
            own.append(found[2])
        norms = torch.stack([gradient.norm() for gradient in own])
        self.initial = norms if self.initial is None else self.initial
        ratios = norms / self.initial
        units = sum(gradient / norm for gradient, norm in zip(own, norms, strict=True))
        scale = (ratios / ratios.sum() * norms).sum()
        (gradients["trunk.weight"],) = torch.autograd.grad(
            shared, network.trunk.weight, scale * units
        )
        v = units.flatten(1)[:, :SIZE] / 3
        for task, rotation in network.rotation.items():
            loss = -(rotated[task] @ rotation.matrix * v).sum()
            (gradients[f"rotation.{task}"],) = torch.autograd.grad(loss, rotation.parameters())
        return gradients


def test_rotograd_follows_the_papers_algorithm() -> None:
    problem = Regression()
    network = problem.network
    sgd = sgd_of(network.trunk, network.heads, lr=0.02)
    for _ in range(3):  # Ratios are 1 in the first step only, and gradients do not add up.
        expected = problem.expected()
        losses = problem.backward()
        assert not any(loss.requires_grad for loss in losses.values())
        for task, predictions in network(problem.x).items():  # It rotates, too.
            torch.testing.assert_close(problem.loss(task, predictions).detach(), losses[task])
        found = {f"rotation.{t}": next(network.rotation[t].parameters()).grad for t in "abc"}
        for name in ["trunk.weight", *(f"heads.{task}.weight" for task in "abc")]:
            found[name] = network.get_parameter(name).grad
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        sgd.step()
    torch.testing.assert_close(network.initial_norms, problem.initial)


def test_rotations_stay_rotations_and_align_the_gradients() -> None:
    problem = Regression()
    network = problem.network
    adam = torch.optim.Adam(network.rotation.parameters(), lr=0.05)

    def agreement() -> float:
        problem.backward()
        return (network.trunk.weight.grad.norm() / network.initial_norms.mean()).item()

    before = agreement()
    for _ in range(30):
        problem.backward()
        adam.step()
    eye = torch.eye(SIZE, dtype=torch.float64)
    for rotation in network.rotation.values():
        matrix = rotation.matrix.detach()
        torch.testing.assert_close(matrix @ matrix.T, eye, rtol=0, atol=1e-12)
    assert agreement() > before


# Recon.


def test_recon_chooses_the_highest_scores() -> None:
    scores = {"a": 3, "b": 5, "c": 5, "d": 9, "e": 0}
    assert recon.choose(scores, 1) == ["d"]
    assert recon.choose(scores, 3) == ["d", "b", "c"]
    assert recon.choose(scores) == ["d", "b", "c", "a"]


CHOSEN = ["encoder.0.0", "encoder.2.4", "decoder.4.3"]


def test_specialized_layers_begin_as_the_shared_ones() -> None:
    network, picture = _small("segnet")
    network.eval()
    before, count = network(picture), _count(network)
    sizes = sum(_count(network.trunk.get_submodule(name)) for name in CHOSEN)
    assert recon.specialize(network, CHOSEN, list(CITYSCAPES)) is network
    assert _count(network) == count + sizes
    for task in CITYSCAPES:
        with cs.nn.active_task(network.trunk, task):
            torch.testing.assert_close(network(picture, [task])[task], before[task])


METHODS = [cs.Sum(), cs.PCGrad(), cs.CAGrad(), cs.MGDA(), cs.GradDrop()]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_copies_are_trained_apart(method: cs.Method) -> None:
    network, picture = _small("segnet")
    tasks = list(CITYSCAPES)
    recon.specialize(network, CHOSEN, tasks)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network, lr=0.05), tasks, method)

    def loss_of(network: Network, task: str) -> Tensor:
        return (2 if task == "depth" else 1) * _loss(network(picture, [task])[task])

    expected = {}
    for task in tasks:
        copied = copy.deepcopy(network)
        with cs.nn.active_task(copied.trunk, task):
            loss_of(copied, task).backward()
        for name in CHOSEN:
            weight = copied.get_parameter(f"trunk.{name}.{task}.weight")
            expected[name, task] = (weight - 0.05 * weight.grad).detach()
            assert weight.grad.any()
    opt.step(lambda task: loss_of(network, task))
    for (name, task), weight in expected.items():
        found = network.get_parameter(f"trunk.{name}.{task}.weight").detach()
        torch.testing.assert_close(found, weight)
    copies = network.trunk.get_submodule("decoder.4.3")
    assert not torch.equal(copies.depth.weight, copies.semseg.weight)
