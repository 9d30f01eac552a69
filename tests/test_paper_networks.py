"""The networks of the paper's experiments: sizes, outputs, and which parameters losses reach."""

import copy
import re

import pytest
import torch
from networks import assert_equal, sgd_of
from paper import cross_stitch, mti_net, recon, rotograd, segnet
from paper.networks import NAMES, make_network
from paper.tasks import TASKS
from torch import Tensor, nn
from torch.nn import functional

import cs_kernels as cs

pytestmark = pytest.mark.paper

NYUD, PASCAL, CITYSCAPES = TASKS["nyud"], TASKS["pascal"], TASKS["cityscapes"]
MTI_NETS = ("hrnet18", "resnet18")
EVERY_NETWORK = pytest.mark.parametrize("name", NAMES)


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def small(name, tasks=None, **options):
    """A version of a network that is quick on a CPU, and a picture."""
    torch.manual_seed(0)
    width = 1.0 if name == "hrnet18" else 1 / 16
    tasks = tasks or (NYUD if name in MTI_NETS else CITYSCAPES)
    network = make_network(name, tasks, width=width, **options)
    return network, torch.randn(2, 3, 64 if name in MTI_NETS else 32, 64)


def loss_of(predictions) -> Tensor:
    return sum((prediction - 1).square().mean() for prediction in predictions)


SEGNET = 25_017_675 - segnet.PUBLISHED_EXTRAS  # 95.43 MiB.
ALONE = 49_960_968  # 190.59 MiB.


@pytest.mark.parametrize(
    ("name", "tasks", "options", "parameters"),
    [
        *(("hrnet18", tasks, {}, n) for tasks, n in ((NYUD, 17_960_945), (PASCAL, 24_494_171))),
        *(("resnet18", tasks, {}, n) for tasks, n in ((NYUD, 144_853_985), (PASCAL, 205_085_525))),
        ("resnet18", NYUD, {"width": 1 / 8}, 13_310_265),
        # With a single task, the network is the backbone and a head.
        ("hrnet18", {"semseg": NYUD["semseg"]}, {}, 3_945_270),
        ("resnet18", {"semseg": NYUD["semseg"]}, {}, 14_876_264),
        ("segnet", CITYSCAPES, {}, SEGNET),
        # A gamma and a beta for each of 7168 channels.
        ("segnet", CITYSCAPES, {"task_norm": True}, SEGNET + 2 * 7168),
        ("cross-stitch", CITYSCAPES, {}, ALONE + 10 * 4),
    ],
)
def test_parameters_of_the_published_networks(name, tasks, options, parameters):
    """The numbers follow from the published structures."""
    with torch.device("meta"):
        assert count(make_network(name, tasks, **options)) == parameters


def test_sizes_of_parts():
    """HRNet-W18-Small-v2 has stages of 1, 1, 3 and 2 modules with two blocks per branch."""
    with torch.device("meta"):
        assert count(mti_net.HRNet()) == 3_860_720
        alone = [make_network("segnet", {name: task}) for name, task in CITYSCAPES.items()]
        assert sum(map(count, alone)) == ALONE
    rotations = 2 * count(rotograd.Rotation(rotograd.SIZE))  # A rotation needs values.
    assert f"{4 * (SEGNET + rotations) / 2**20:.2f}" == "103.43"  # MiB, in the paper's table.
    assert count(small("rotograd")[0].rotation) == 2 * (rotograd.SIZE // 16) ** 2


@EVERY_NETWORK
@torch.no_grad()
def test_predictions(name):
    """Predictions have the picture's size; only heads of the requested tasks run."""
    network, picture = small(name)
    network.eval()
    ran: list[str] = []
    for task, head in network.heads.items():
        head.register_forward_hook(lambda *_, task=task: ran.append(task))
    predictions = network(picture)
    tasks = NYUD if name in MTI_NETS else CITYSCAPES
    assert list(predictions) == ran == list(network.heads) == list(tasks)
    for task, of_task in predictions.items():
        assert len(of_task) == (5 if name in MTI_NETS else 1)
        shape = (2, tasks[task].channels, *picture.shape[-2:])
        assert all(p.shape == shape and p.dtype == torch.float32 for p in of_task)
        ran.clear()
        alone = network(picture, [task])
        assert ran == list(alone) == [task]
        assert_equal(alone[task], of_task)


@torch.no_grad()
def test_mti_net_predicts_from_fine_to_coarse_and_then_finally():
    network, picture = small("hrnet18")
    network.eval()
    maps, initial = network.trunk(picture)["normals"]
    scales = [*initial, network.heads["normals"](maps)[-1]]
    assert [x.shape[-1] for x in scales] == [16, 8, 4, 2, 16]
    expected = [
        functional.interpolate(x, scale_factor=64 // x.shape[-1], mode="bilinear") for x in scales
    ]
    torch.testing.assert_close(network(picture)["normals"], expected)


@pytest.mark.parametrize("name", ["hrnet18", "resnet18", "segnet"])
def test_single_task_networks_have_one_prediction(name):
    network, picture = small(name, {"normals": NYUD["normals"]}, task_norm=True)
    with cs.nn.active_task(network.trunk, "normals"):
        (prediction,) = network(picture)["normals"]
    assert prediction.shape == (2, 3, *picture.shape[-2:])


def names_of(network) -> list[str]:
    return [name for name, _ in network.named_parameters(remove_duplicate=False)]


def test_run_trunk_is_no_submodule():
    network, picture = small("segnet")
    copied = copy.deepcopy(network.eval())
    assert copied.run_trunk is copied.trunk
    before, names, calls = network(picture), names_of(network), []
    network.run_trunk = nn.Sequential(network.trunk)
    assert names_of(network) == names
    network.run_trunk = lambda picture: calls.append(1) or network.trunk(picture)
    assert_equal(network(picture), before)
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
        ({"width": 1 / 64}, r"tasks must be among .* got 'edge'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):  # noqa: PT012
        network = make_network(**{"name": "segnet", "tasks": CITYSCAPES, **arguments})
        network(torch.zeros(1, 3, 32, 32), ["edge"])


def test_propagation_masks_neighboring_channels():
    part = mti_net.Propagation(["a", "b", "c"], 4).eval()
    features = {task: torch.randn(2, 4, 3, 3) for task in "abc"}
    together = torch.cat(list(features.values()), 1)
    scores = part.attend(together).exp()
    groups = torch.stack([scores[:, c // 3 * 3 : c // 3 * 3 + 3].sum(1) for c in range(12)], 1)
    shared = part.reduce(together * scores / groups)
    propagated = part(features)
    for task in "abc":
        first, _, last, _ = part.excite[task].factors
        factors = torch.sigmoid(last(torch.relu(first(shared.mean((2, 3))))))
        expected = shared * factors[..., None, None] + features[task]
        torch.testing.assert_close(propagated[task], expected)


def test_distillation_adds_the_other_tasks_features():
    part = mti_net.Distillation(["a", "b", "c"], 4)
    features = {task: torch.randn(2, 4, 3, 3) for task in "abc"}
    expected = features["b"]
    for other in "ac":
        gate, x = part.gates["b"][other], features[other]
        mask, value = (functional.conv2d(x, f.weight, padding=1) for f in (gate.mask, gate.value))
        expected = expected + mask.sigmoid() * value
    torch.testing.assert_close(part(features)["b"], expected)


@EVERY_NETWORK
def test_each_loss_reaches_the_trunk_and_its_own_head(name):
    """In MTI-Net, a loss also reaches its task's initial predictions and gates."""
    network, picture = small(name)
    parameters = dict(network.named_parameters())
    predictions = network(picture)

    def reached(loss) -> set[str]:
        options = {"allow_unused": True, "retain_graph": True}
        grads = torch.autograd.grad(loss, [*parameters.values()], **options)
        return {name for name, grad in zip(parameters, grads, strict=True) if grad is not None}

    for task in network.heads:
        others = "|".join(other for other in network.heads if other != task)
        elsewhere = re.compile(rf"heads\.({others})\.|.*\.(predict|gates)\.({others})\.|rotation\.")
        expected = {name for name in parameters if not elsewhere.match(name)}
        assert {name for name in parameters if "backbone" in name} <= expected
        assert reached(loss_of(predictions[task])) == expected
        last = {name for name in expected if ".predict." not in name}
        assert reached(loss_of(predictions[task][-1:])) == last


@pytest.mark.parametrize(
    ("name", "conv", "norm"),
    [
        ("hrnet18", "initial.0.refine.edge.0.conv1", "initial.0.refine.edge.0.bn1"),
        ("resnet18", "propagate.1.reduce.conv2", "propagate.1.reduce.bn2"),
        ("segnet", "encoder.0.0", "encoder.0.1"),
        ("cross-stitch", "networks.depth.decoder.4.3", "networks.depth.decoder.4.4"),
    ],
)
def test_task_norm_prioritizes_convolutions(name, conv, norm):
    network, picture = small(name, task_norm=True)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network, lr=0.01), list(network.heads))
    opt.trace(lambda task: loss_of(network(picture, [task])[task]))
    norm_of = opt.coverage().prioritized
    assert norm_of[f"{conv}.weight"] == norm
    assert sorted(norm_of.values()) == sorted(
        name for name, m in network.trunk.named_modules() if isinstance(m, cs.nn.TaskBatchNorm)
    )


@torch.no_grad()
def test_stitched_segnets_follow_the_formula():
    """A unit's initial weight is near the identity."""
    near = 0.05 + 0.85 * torch.eye(3)
    torch.testing.assert_close(cross_stitch.CrossStitch(3).weight, near)
    trunk = cross_stitch.StitchedSegNets(["a", "b"], 1 / 64).double().eval()
    for unit in [*trunk.down, *trunk.up]:
        nn.init.normal_(unit.weight)
    picture = torch.randn(1, 3, 32, 64, dtype=torch.float64)
    networks, maps, places = [*trunk.networks.values()], [picture, picture], []

    def mixed(unit, maps):
        return [sum(w * x for w, x in zip(row, maps, strict=True)) for row in unit.weight]

    for stage in range(5):
        encoded = [net.encoder[stage](x) for net, x in zip(networks, maps, strict=True)]
        pooled = [functional.max_pool2d(x, 2, return_indices=True) for x in encoded]
        maps = mixed(trunk.down[stage], [x for x, _ in pooled])
        places.append([indices for _, indices in pooled])
    for stage in range(5):
        sparse = map(functional.max_unpool2d, maps, places.pop(), (2, 2))
        decoded = [net.decoder[stage](x) for net, x in zip(networks, sparse, strict=True)]
        maps = mixed(trunk.up[stage], decoded)
    torch.testing.assert_close(trunk(picture), {"a": (maps[0],), "b": (maps[1],)})


SIZE = 5
"""The number of rotated entries; a feature has 8 entries."""


class Outputs(nn.Conv2d):
    """A linear head."""

    def forward(self, maps):
        return [super().forward(maps)]


class Regression:
    """Three linear tasks on a linear trunk; `expected` has the paper's equations by autograd."""

    def __init__(self):
        heads = {task: Outputs(2, 1, 1, bias=False) for task in "abc"}
        self.network = rotograd.RotoGrad(nn.Conv2d(3, 2, 1, bias=False), heads, SIZE)
        for rotation in self.network.rotation.values():
            rotation.matrix = torch.linalg.qr(torch.randn(SIZE, SIZE))[0]
        self.x = torch.randn(4, 3, 2, 2)
        self.targets = {task: torch.randn(4, 1, 2, 2) for task in "abc"}
        self.initial = None

    def loss(self, task, predictions) -> Tensor:
        return (predictions[-1] - self.targets[task]).square().sum() / 2

    def backward(self) -> dict[str, Tensor]:
        return self.network.backward(self.x, self.loss)

    def expected(self) -> dict[str, Tensor]:
        network, gradients, own, rotated = self.network, {}, [], {}
        shared = network.trunk(self.x)
        feature = shared.detach().requires_grad_()
        for task, head in network.heads.items():
            whole = torch.block_diag(network.rotation[task].matrix.detach(), torch.eye(8 - SIZE))
            seen = (feature.flatten(1) @ whole.T).view_as(feature)
            loss = self.loss(task, head(seen))
            inputs = [head.weight, seen, feature]
            gradients[f"heads.{task}.weight"], of_seen, of_own = torch.autograd.grad(loss, inputs)
            rotated[task] = of_seen.flatten(1)[:, :SIZE]
            own.append(of_own)
        norms = torch.stack([gradient.norm() for gradient in own])
        self.initial = norms if self.initial is None else self.initial
        ratios = norms / self.initial
        units = sum(gradient / norm for gradient, norm in zip(own, norms, strict=True))
        scale = (ratios / ratios.sum() * norms).sum()
        trunk = network.trunk.weight
        (gradients["trunk.weight"],) = torch.autograd.grad(shared, trunk, scale * units)
        v = units.flatten(1)[:, :SIZE] / 3
        for task, rotation in network.rotation.items():
            loss = -(rotated[task] @ rotation.matrix * v).sum()
            (gradients[f"rotation.{task}"],) = torch.autograd.grad(loss, rotation.parameters())
        return gradients


def test_rotograd_follows_the_papers_algorithm(float64):
    problem = Regression()
    network = problem.network
    sgd = sgd_of(network.trunk, network.heads, lr=0.02)
    for _ in range(3):  # Later ratios differ from 1; gradients must not accumulate.
        expected, losses = problem.expected(), problem.backward()
        assert not any(loss.requires_grad for loss in losses.values())
        for task, predictions in network(problem.x).items():  # The forward pass rotates, too.
            torch.testing.assert_close(problem.loss(task, predictions).detach(), losses[task])
        grads = {f"rotation.{t}": next(network.rotation[t].parameters()).grad for t in "abc"}
        for name in ["trunk.weight", *(f"heads.{task}.weight" for task in "abc")]:
            grads[name] = network.get_parameter(name).grad
        torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)
        sgd.step()
    torch.testing.assert_close(network.initial_norms, problem.initial)


def test_rotations_stay_rotations_and_align_the_gradients(float64):
    problem = Regression()
    network = problem.network
    adam = torch.optim.Adam(network.rotation.parameters(), lr=0.05)
    agreement = []
    for _ in range(30):
        problem.backward()
        agreement.append(network.trunk.weight.grad.norm())
        adam.step()
    for rotation in network.rotation.values():
        matrix = rotation.matrix.detach()
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(SIZE), rtol=0, atol=1e-12)
    assert agreement[-1] > agreement[0]


CHOSEN = ["encoder.0.0", "encoder.2.4", "decoder.4.3"]


def test_recon_copies_the_layers_with_the_highest_scores():
    """Copies initially equal the shared layer."""
    scores = {"a": 3, "b": 5, "c": 5, "d": 9, "e": 0}
    assert recon.choose(scores, 3) == ["d", "b", "c"]
    assert recon.choose(scores) == ["d", "b", "c", "a"]
    network, picture = small("segnet")
    network.eval()
    before, size = network(picture), count(network)
    size += sum(count(network.trunk.get_submodule(name)) for name in CHOSEN)
    assert recon.specialize(network, CHOSEN, list(CITYSCAPES)) is network
    assert count(network) == size
    for task in CITYSCAPES:
        with cs.nn.active_task(network.trunk, task):
            torch.testing.assert_close(network(picture, [task])[task], before[task])


@pytest.mark.parametrize("method", [cs.Sum(), cs.PCGrad(), cs.GradDrop()], ids=repr)
def test_copies_are_trained_apart(method):
    network, picture = small("segnet")
    tasks = list(CITYSCAPES)
    recon.specialize(network, CHOSEN, tasks)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd_of(network, lr=0.05), tasks, method)
    factors, expected = {"semseg": 1, "depth": 2}, {}
    for task in tasks:
        copied = copy.deepcopy(network)
        with cs.nn.active_task(copied.trunk, task):
            (factors[task] * loss_of(copied(picture, [task])[task])).backward()
        for name in CHOSEN:
            weight = copied.get_parameter(f"trunk.{name}.{task}.weight")
            expected[f"trunk.{name}.{task}.weight"] = (weight - 0.05 * weight.grad).detach()
            assert weight.grad.any()
    opt.step(lambda task: factors[task] * loss_of(network(picture, [task])[task]))
    for name, weight in expected.items():
        torch.testing.assert_close(network.get_parameter(name).detach(), weight)
