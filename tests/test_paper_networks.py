"""The networks of the paper's experiments: their sizes, outputs, and which loss reaches what."""

import copy
import itertools
from collections.abc import Callable, Mapping

import pytest
import torch
from paper import cross_stitch, mti_net, recon, rotograd, segnet
from paper.network import Network
from paper.networks import NAMES, make_network
from paper.tasks import TASKS, Task
from torch import Tensor, nn
from torch.nn import functional

import cs_kernels as cs

pytestmark = pytest.mark.paper

NYUD, PASCAL, CITYSCAPES = TASKS["nyud"], TASKS["pascal"], TASKS["cityscapes"]
MIB = 2**20


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _counted(name: str, tasks: Mapping[str, Task], **options: object) -> int:
    with torch.device("meta"):
        return _count(make_network(name, tasks, **options))


def _small(name: str, **options: object) -> Network:
    """A network of each kind that is quick on a CPU."""
    torch.manual_seed(0)
    tasks = NYUD if name in ("hrnet18", "resnet18") else CITYSCAPES
    width = 1.0 if name == "hrnet18" else 1 / 16
    return make_network(name, tasks, width=width, **options)


def _picture(network: Network) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 64 if "edge" in network.heads else 32, 64, generator=generator)


def _loss(predictions: list[Tensor]) -> Tensor:
    return sum((prediction - 1).square().mean() for prediction in predictions)


# Parameters, by arithmetic from the published structures.


def _conv(inputs: int, outputs: int, kernel: int, *, bias: bool = False) -> int:
    return inputs * outputs * kernel**2 + bias * outputs


def _conv_norm(inputs: int, outputs: int, kernel: int) -> int:
    return _conv(inputs, outputs, kernel) + 2 * outputs


def _basic_block(inputs: int, outputs: int) -> int:
    skip = 0 if inputs == outputs else _conv_norm(inputs, outputs, 1)
    return _conv_norm(inputs, outputs, 3) + _conv_norm(outputs, outputs, 3) + skip


def _hrnet() -> int:
    """HRNet-W18-Small-v2: stages of 1, 1, 3 and 2 modules with two blocks a branch."""

    def bottleneck(inputs: int, planes: int) -> int:
        layers = _conv_norm(inputs, planes, 1) + _conv_norm(planes, planes, 3)
        return layers + _conv_norm(planes, 4 * planes, 1)

    def module(channels: list[int]) -> int:
        total = sum(2 * _basic_block(c, c) for c in channels)
        for i, to in enumerate(channels):
            for j, source in enumerate(channels):
                if j > i:
                    total += _conv_norm(source, to, 1)
                elif j < i:  # Each stride of 2 is a convolution; the last one changes channels.
                    total += (i - j - 1) * _conv_norm(source, source, 3)
                    total += _conv_norm(source, to, 3)
        return total

    stem = _conv_norm(3, 64, 3) + _conv_norm(64, 64, 3)
    first = bottleneck(64, 64) + _conv_norm(64, 256, 1) + bottleneck(256, 64)
    transitions = _conv_norm(256, 18, 3) + _conv_norm(256, 36, 3)
    transitions += _conv_norm(36, 72, 3) + _conv_norm(72, 144, 3)
    stages = module([18, 36]) + 3 * module([18, 36, 72]) + 2 * module([18, 36, 72, 144])
    return stem + first + transitions + stages


def _resnet_pyramid(channels: int) -> int:
    stages = [64, 128, 256, 512]
    body = _conv_norm(3, 64, 7) + 2 * _basic_block(64, 64)
    for inputs, outputs in itertools.pairwise(stages):
        body += _basic_block(inputs, outputs) + _basic_block(outputs, outputs)
    return body + sum(
        _conv(c, channels, 1, bias=True) + _conv(channels, channels, 3, bias=True) for c in stages
    )


def _mti_net(channels: list[int], tasks: list[int]) -> int:
    """All but the backbone: scales with these channels, tasks with these numbers of outputs."""
    k = len(tasks)
    total = 0
    for scale, c in enumerate(channels):
        inputs = c + channels[scale + 1] if scale < 3 else c
        total += k * (_basic_block(inputs, c) + _basic_block(c, c))
        total += sum(_conv(c, outputs, 1, bias=True) for outputs in tasks)
        total += k * (k - 1) * 2 * _conv(c, c, 3)
        if scale > 0:
            n = k * c
            total += _basic_block(n, n // 4) + _basic_block(n // 4, n // 4)
            total += _conv(n // 4, n, 1, bias=True) + _basic_block(n, c)
            total += k * (_conv(c, c // 16, 1, bias=True) + _conv(c // 16, c, 1, bias=True))
    return total + _heads(channels, tasks)


def _heads(channels: list[int], tasks: list[int]) -> int:
    n = sum(channels)
    first = _conv(n, n, 1, bias=True) + 2 * n
    return sum(first + _conv(n, outputs, 1, bias=True) for outputs in tasks)


def test_hrnet_has_the_parameters_of_the_published_network() -> None:
    assert _hrnet() == 3_860_720
    with torch.device("meta"):
        assert _count(mti_net.HRNet()) == _hrnet()


@pytest.mark.parametrize(("tasks", "outputs"), [(NYUD, [40, 1, 1, 3]), (PASCAL, [21, 7, 1, 3, 1])])
def test_mti_net_has_the_parameters_of_the_published_network(
    tasks: dict[str, Task], outputs: list[int]
) -> None:
    channels = [18, 36, 72, 144]
    assert _counted("hrnet18", tasks) == _hrnet() + _mti_net(channels, outputs)
    pyramid = _resnet_pyramid(256)
    assert _counted("resnet18", tasks) == pyramid + _mti_net([256] * 4, outputs)
    assert _counted("resnet18", tasks, width=1 / 8) == (
        _resnet_pyramid(32) + _mti_net([32] * 4, outputs)
    )


def test_single_task_networks_are_the_backbone_and_a_head() -> None:
    tasks = {"semseg": NYUD["semseg"]}
    assert _counted("hrnet18", tasks) == _hrnet() + _heads([18, 36, 72, 144], [40])
    assert _counted("resnet18", tasks) == _resnet_pyramid(256) + _heads([256] * 4, [40])


def test_segnet_has_the_size_in_the_papers_table() -> None:
    count = _counted("segnet", CITYSCAPES)
    assert count + segnet.PUBLISHED_EXTRAS == 25_017_675
    assert f"{4 * count / MIB:.2f}" == "95.43"
    alone = sum(_counted("segnet", {name: task}) for name, task in CITYSCAPES.items())
    assert alone == 49_960_968
    assert f"{4 * alone / MIB:.2f}" == "190.59"


def test_task_norm_adds_26_normalizations_to_segnet() -> None:
    with torch.device("meta"):
        network = make_network("segnet", CITYSCAPES, task_norm=True)
    norms = [m for m in network.modules() if isinstance(m, cs.nn.TaskBatchNorm)]
    assert len(norms) == 26
    assert sum(len(norm.depth.weight) for norm in norms) == 7168
    assert f"{4 * _count(network) / MIB:.4f}" == "95.4895"


def test_cross_stitch_and_rotograd_have_the_sizes_in_the_papers_table() -> None:
    alone = sum(_counted("segnet", {name: task}) for name, task in CITYSCAPES.items())
    stitched = _counted("cross-stitch", CITYSCAPES)
    assert stitched == alone + 10 * 4
    assert f"{4 * stitched / MIB:.2f}" == "190.59"
    # The rotations themselves need values.
    rotations = 2 * _count(rotograd.Rotation(rotograd.SIZE))
    assert f"{4 * (_counted('segnet', CITYSCAPES) + rotations) / MIB:.2f}" == "103.43"
    small = _small("rotograd")
    assert sum(p.numel() for p in small.rotation.parameters()) == 2 * (rotograd.SIZE // 16) ** 2


# Outputs.


@pytest.mark.parametrize("name", NAMES)
def test_predictions_have_the_size_of_the_picture(name: str) -> None:
    network = _small(name)
    picture = _picture(network)
    tasks = NYUD if name in ("hrnet18", "resnet18") else CITYSCAPES
    predictions = network(picture)
    assert list(predictions) == list(tasks)
    for task, of_task in predictions.items():
        assert len(of_task) == (5 if tasks is NYUD else 1)
        shape = (2, tasks[task].channels, *picture.shape[-2:])
        assert all(p.shape == shape and p.dtype == torch.float32 for p in of_task)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_heads_of_the_asked_tasks_run(name: str) -> None:
    network = _small(name).eval()
    ran: list[str] = []
    for task, head in network.heads.items():
        head.register_forward_hook(lambda *_, task=task: ran.append(task))
    picture = _picture(network)
    with torch.no_grad():
        everything = network(picture)
        assert ran == list(network.heads)
        for task in network.heads:
            ran.clear()
            alone = network(picture, [task])
            assert ran == [task]
            assert list(alone) == [task]
            torch.testing.assert_close(alone[task], everything[task], rtol=0, atol=0)


def test_mti_net_predicts_from_fine_to_coarse_and_then_finally() -> None:
    network = _small("hrnet18").eval()
    picture = _picture(network)
    with torch.no_grad():
        maps, initial = network.trunk(picture)["normals"]
        final = network.heads["normals"](maps)[-1]
        predictions = network(picture)["normals"]
    assert [x.shape[-1] for x in [*initial, final]] == [16, 8, 4, 2, 16]
    for small, prediction in zip([*initial, final], predictions, strict=True):
        expected = functional.interpolate(
            small, scale_factor=64 // small.shape[-1], mode="bilinear"
        )
        torch.testing.assert_close(prediction, expected)


@pytest.mark.parametrize("name", ["hrnet18", "resnet18", "segnet"])
def test_single_task_networks_have_one_prediction(name: str) -> None:
    width = 1.0 if name == "hrnet18" else 1 / 16
    network = make_network(name, {"normals": NYUD["normals"]}, width=width, task_norm=True)
    with cs.nn.active_task(network.trunk, "normals"):
        (prediction,) = network(torch.randn(2, 3, 64, 64))["normals"]
    assert prediction.shape == (2, 3, 64, 64)


def test_run_trunk_is_no_submodule() -> None:
    network = _small("segnet").eval()
    picture = _picture(network)
    before = network(picture)
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    calls = []

    def compiled(picture: Tensor) -> Tensor:
        calls.append(picture)
        return inner(picture)

    inner = torch.compile(network.trunk, backend="eager")
    network.run_trunk = inner
    assert [name for name, _ in network.named_parameters(remove_duplicate=False)] == names
    torch.testing.assert_close(network(picture), before)
    network.run_trunk = compiled
    network(picture)
    assert len(calls) == 1


def test_a_copy_runs_its_own_trunk() -> None:
    network = _small("segnet")
    assert copy.deepcopy(network).run_trunk is not network.trunk


def test_bad_arguments_are_named() -> None:
    for argument, message in [
        ({"name": "vgg"}, "name must be one of .* got 'vgg'"),
        ({"tasks": {}}, "tasks must have at least one"),
        ({"width": 0.0}, r"width must be in \(0, 1\], got 0.0"),
        ({"width": 1.5}, r"width must be in \(0, 1\], got 1.5"),
        ({"name": "hrnet18", "width": 0.5}, "width must be 1 for 'hrnet18', got 0.5"),
        ({"pretrained": True}, "pretrained must be False for 'segnet', got True"),
        ({"name": "rotograd", "task_norm": True}, "task_norm must be False for 'rotograd'"),
        ({"name": "cross-stitch", "tasks": {"depth": CITYSCAPES["depth"]}}, "at least two"),
    ]:
        arguments = {"name": "segnet", "tasks": CITYSCAPES, **argument}
        with pytest.raises(ValueError, match=message):
            make_network(**arguments)
    with pytest.raises(ValueError, match=r"tasks must be among .* got 'edge'"):
        _small("segnet")(torch.zeros(2, 3, 32, 32), ["edge"])


# The parts of MTI-Net.


def test_propagation_masks_neighboring_channels() -> None:
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    part = mti_net.Distillation(["a", "b", "c"], 4)
    features = {task: torch.randn(2, 4, 3, 3) for task in "abc"}
    expected = features["b"]
    for other in "ac":
        gate = part.gates["b"][other]
        mask = functional.conv2d(features[other], gate.mask.weight, padding=1).sigmoid()
        expected = expected + mask * functional.conv2d(
            features[other], gate.value.weight, padding=1
        )
    torch.testing.assert_close(part(features)["b"], expected)


# The parameters that each loss reaches.


def _reached(network: Network, loss_of: Callable[[], Tensor]) -> set[str]:
    network.zero_grad()
    loss_of().backward()
    return {name for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_each_loss_reaches_the_trunk_and_its_own_head(name: str) -> None:
    network = _small(name)
    picture = _picture(network)
    names = {name for name, _ in network.named_parameters()}
    for task in network.heads:
        others = [other for other in network.heads if other != task]
        expected = {
            name
            for name in names
            if not any(
                name.startswith(f"heads.{other}.")
                or f".predict.{other}." in name
                # The gates of another task's features; in MTI-Net only.
                or f".gates.{other}." in name
                for other in others
            )
            and not name.startswith("rotation.")
        }
        final = {name for name in expected if ".predict." not in name}
        assert _reached(network, lambda task=task: _loss(network(picture)[task])) == expected
        last = _reached(network, lambda task=task: _loss(network(picture, [task])[task][-1:]))
        assert last == final
        assert {name for name in names if "backbone" in name} <= last


@pytest.mark.parametrize("name", ["hrnet18", "resnet18", "segnet", "cross-stitch"])
def test_task_norm_prioritizes_convolutions(name: str) -> None:
    network = _small(name, task_norm=True)
    tasks = list(network.heads)
    picture = _picture(network)
    sgd = torch.optim.SGD(network.parameters(), lr=0.01)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, tasks)
    opt.step(lambda task: _loss(network(picture, [task])[task]))
    norm_of = opt.coverage().prioritized
    if name == "segnet":
        convolutions = {
            f"{name}.weight" for name, m in network.trunk.named_modules() if type(m) is nn.Conv2d
        }
        assert set(norm_of) == convolutions
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


def _unpooled(maps: Tensor, indices: Tensor) -> Tensor:
    """By a loop over all entries."""
    b, c, h, w = maps.shape
    unpooled = maps.new_zeros(b, c, 2 * h, 2 * w)
    for n, k, i, j in itertools.product(*map(range, maps.shape)):
        at = int(indices[n, k, i, j])
        unpooled[n, k, at // (2 * w), at % (2 * w)] = maps[n, k, i, j]
    return unpooled


@torch.no_grad()
def test_stitched_segnets_follow_the_formula() -> None:
    torch.manual_seed(0)
    trunk = cross_stitch.StitchedSegNets(["a", "b"], 1 / 64).double().eval()
    for unit in [*trunk.down, *trunk.up]:
        nn.init.normal_(unit.weight)
    picture = a = b = torch.randn(1, 3, 32, 64, dtype=torch.float64)
    one, two = trunk.networks["a"], trunk.networks["b"]
    indices = []
    for stage in range(5):
        a, of_a = functional.max_pool2d(one.encoder[stage](a), 2, return_indices=True)
        b, of_b = functional.max_pool2d(two.encoder[stage](b), 2, return_indices=True)
        (aa, ab), (ba, bb) = trunk.down[stage].weight
        a, b = aa * a + ab * b, ba * a + bb * b
        indices.append((of_a, of_b))
    for stage in range(5):
        of_a, of_b = indices[4 - stage]
        a, b = one.decoder[stage](_unpooled(a, of_a)), two.decoder[stage](_unpooled(b, of_b))
        (aa, ab), (ba, bb) = trunk.up[stage].weight
        a, b = aa * a + ab * b, ba * a + bb * b
    torch.testing.assert_close(trunk(picture), {"a": (a,), "b": (b,)})


# RotoGrad.

SIZE = 5
"""Rotated entries, of the feature's 8."""


class Outputs(nn.Module):
    """A linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 1, 1, bias=False)

    def forward(self, maps: Tensor) -> list[Tensor]:
        return [self.layer(maps)]


class Regression:
    """Three linear tasks on a linear trunk, in float64, with their gradients by hand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        heads = {task: Outputs() for task in "abc"}
        self.network = rotograd.RotoGrad(nn.Conv2d(3, 2, 1, bias=False), heads, SIZE).double()
        for rotation in self.network.rotation.values():
            rotation.matrix = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64))[0]
        self.x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
        self.targets = {task: torch.randn(4, 1, 2, 2, dtype=torch.float64) for task in "abc"}
        self.initial: list[Tensor] = []

    def loss(self, task: str, predictions: list[Tensor]) -> Tensor:
        return (predictions[-1] - self.targets[task]).square().sum() / 2

    def backward(self) -> dict[str, Tensor]:
        return self.network.backward(self.x, self.loss)

    def by_hand(self) -> dict[str, Tensor]:
        network = self.network
        with torch.no_grad():
            z = torch.einsum("cd,ndhw->nchw", network.trunk.weight[..., 0, 0], self.x).flatten(1)
            matrices, rotated, own, gradients = {}, {}, {}, {}
            for task in "abc":
                full = torch.eye(8, dtype=torch.float64)
                full[:SIZE, :SIZE] = network.rotation[task].matrix
                matrices[task] = full
                r = (full @ z.T).T.view(4, 2, 2, 2)
                h = network.heads[task].layer.weight[0, :, 0, 0]
                error = torch.einsum("c,nchw->nhw", h, r) - self.targets[task][:, 0]
                gradients[f"heads.{task}.layer.weight"] = torch.einsum("nhw,nchw->c", error, r)
                rotated[task] = torch.einsum("nhw,c->nchw", error, h).flatten(1)
                own[task] = (full.T @ rotated[task].T).T
            norms = [own[task].square().sum().sqrt() for task in "abc"]
            self.initial = self.initial or norms
            ratios = [norm / first for norm, first in zip(norms, self.initial, strict=True)]
            scale = sum(q / sum(ratios) * norm for q, norm in zip(ratios, norms, strict=True))
            units = [own[task] / norm for task, norm in zip("abc", norms, strict=True)]
            dz = (scale * sum(units)).view(4, 2, 2, 2)
            gradients["trunk.weight"] = torch.einsum("nchw,ndhw->cd", dz, self.x)
            v = (sum(units) / 3)[:, :SIZE]
            for task in "abc":
                # R = B exp(A), A = X - X^T for the lower triangle X, which is 0 in a new base B.
                dr = -rotated[task][:, :SIZE].T @ v
                da = matrices[task][:SIZE, :SIZE].T @ dr
                gradients[f"rotation.{task}"] = (da - da.T).tril()
        return gradients


def _rotation_gradients(network: rotograd.RotoGrad) -> list[Tensor]:
    return [parameter.grad for parameter in network.rotation.parameters()]


def test_rotograd_follows_the_papers_algorithm() -> None:
    problem = Regression()
    network = problem.network
    sgd = torch.optim.SGD([*network.trunk.parameters(), *network.heads.parameters()], lr=0.02)
    for _ in range(3):  # The convergence ratios are 1 in the first step only.
        expected = problem.by_hand()
        losses = problem.backward()
        assert not any(loss.requires_grad for loss in losses.values())
        for task, predictions in network(problem.x).items():  # It rotates, too.
            torch.testing.assert_close(problem.loss(task, predictions).detach(), losses[task])
        for name in ["trunk.weight", *(f"heads.{task}.layer.weight" for task in "abc")]:
            found = network.get_parameter(name).grad.flatten()
            torch.testing.assert_close(found, expected[name].flatten(), rtol=1e-12, atol=1e-12)
        for task, found in zip("abc", _rotation_gradients(network), strict=True):
            torch.testing.assert_close(found, expected[f"rotation.{task}"], rtol=1e-12, atol=1e-12)
        sgd.step()
    ratios = problem.network.initial_norms / torch.stack(problem.initial)
    torch.testing.assert_close(ratios, torch.ones(3, dtype=torch.float64))


def test_rotations_stay_rotations_and_align_the_gradients() -> None:
    problem = Regression()
    network = problem.network
    adam = torch.optim.Adam(network.rotation.parameters(), lr=0.05)

    def agreement() -> float:
        problem.backward()
        with torch.no_grad():
            network.trunk.weight.grad.div_(network.initial_norms.mean())
        return network.trunk.weight.grad.norm().item()

    before = agreement()
    for _ in range(30):
        problem.backward()
        adam.step()
    for rotation in network.rotation.values():
        matrix = rotation.matrix.detach()
        eye = torch.eye(SIZE, dtype=torch.float64)
        torch.testing.assert_close(matrix @ matrix.T, eye, rtol=0, atol=1e-12)
    assert agreement() > before


def test_rotograd_accumulates_nothing() -> None:
    problem = Regression()
    problem.backward()
    before = [p.grad.clone() for p in problem.network.parameters()]
    problem.backward()
    torch.testing.assert_close([p.grad for p in problem.network.parameters()], before)


def test_a_resumed_run_of_rotograd_goes_on_exactly() -> None:
    def started() -> tuple[rotograd.RotoGrad, torch.optim.Adam]:
        network = _small("rotograd")
        return network, torch.optim.Adam(network.parameters(), lr=0.01)

    def train(
        network: rotograd.RotoGrad, adam: torch.optim.Adam, steps: int, contrast: float = 1.0
    ) -> None:
        for _ in range(steps):
            network.backward(
                contrast * _picture(network), lambda _, predictions: _loss(predictions)
            )
            adam.step()

    network, adam = started()
    train(network, adam, 2)
    saved = copy.deepcopy((network.state_dict(), adam.state_dict()))
    train(network, adam, 2)
    other, other_adam = started()
    train(other, other_adam, 1, contrast=3.0)  # Its own first norms are forgotten.
    other.load_state_dict(saved[0])
    other_adam.load_state_dict(saved[1])
    train(other, other_adam, 2)
    for name, value in network.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


# Recon.


class Layers(nn.Module):
    """A trunk of 4 linear layers with 6, 12, 2 and 20 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 4)
        self.c, self.d = nn.Linear(1, 1), nn.Linear(4, 4)


def test_recon_chooses_the_highest_scores() -> None:
    scores = {"a": 3, "b": 5, "c": 5, "d": 9, "e": 0}
    assert recon.choose(scores, 1) == ["d"]
    assert recon.choose(scores, 3) == ["d", "b", "c"]
    assert recon.choose(scores) == ["d", "b", "c", "a"]


CHOSEN = ["encoder.0.0", "encoder.2.4", "decoder.4.3"]


def test_specialized_layers_begin_as_the_shared_ones() -> None:
    network = _small("segnet").eval()
    picture = _picture(network)
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
    network = _small("segnet")
    picture = _picture(network)
    tasks = list(CITYSCAPES)
    recon.specialize(network, CHOSEN, tasks)
    sgd = torch.optim.SGD(network.parameters(), lr=0.05)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, tasks, method)

    def closure(task: str) -> Tensor:
        return (2 if task == "depth" else 1) * _loss(network(picture, [task])[task])

    def alone(task: str) -> dict[str, Tensor]:
        copied = copy.deepcopy(network)
        with cs.nn.active_task(copied.trunk, task):
            factor = 2 if task == "depth" else 1
            (factor * _loss(copied(picture, [task])[task])).backward()
        return {name: p.grad for name, p in copied.named_parameters()}

    expected = {task: alone(task) for task in tasks}
    before = copy.deepcopy(network.state_dict())
    opt.step(closure)
    for name in CHOSEN:
        for task in tasks:
            weight = f"trunk.{name}.{task}.weight"
            step = before[weight] - 0.05 * expected[task][weight]
            assert step.ne(before[weight]).any()
            torch.testing.assert_close(network.state_dict()[weight], step)
    copies = network.trunk.get_submodule("decoder.4.3")
    assert not torch.equal(copies.depth.weight, copies.semseg.weight)


def test_recon_from_counted_conflicts() -> None:
    network = _small("segnet")
    picture = _picture(network)
    tasks = list(CITYSCAPES)
    sgd = torch.optim.SGD(network.parameters(), lr=0.05)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, tasks, cs.PCGrad())
    opt.count_conflicts()
    for _ in range(3):
        opt.step(lambda task: _loss(network(picture, [task])[task]))
    scores = opt.conflicts().by_module().scores()
    chosen = recon.choose(scores, layers=5)
    count = _count(network)
    recon.specialize(network, chosen, tasks)
    assert chosen[0] == max(scores, key=lambda name: scores[name])
    assert len(chosen) == 5
    assert _count(network) > count
    assert all(type(network.trunk.get_submodule(name)) is recon.TaskModule for name in chosen)
