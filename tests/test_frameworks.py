"""Loops of other libraries: torch.compile, several optimizers, accelerate, Lightning, DDP, FSDP."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torchvision_operators
from networks import (
    AB,
    BOTH_PHASES,
    TASKS,
    Setup,
    Whole,
    assert_equal,
    flat_grad,
    optimizer_of,
    sgd_of,
    started,
)
from torch import Tensor, nn

import cs_kernels as cs

# The frameworks themselves cause these warnings.
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Trunk(nn.Sequential):
    """Has its own forward method, because torch.compile skips nn.Sequential's."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


PRIORITIZED = {"0.weight": "1", "3.weight": "4"}


def _trunk(tasks=AB):
    """Two convolutions with normalizations, and an in-place activation."""
    torch.manual_seed(0)
    first, second = ((nn.Conv2d(n, 8, 3), nn.BatchNorm2d(8)) for n in (3, 8))
    trunk = Trunk(*first, nn.ReLU(inplace=True), *second, nn.Flatten())
    return cs.nn.convert_task_batchnorm(trunk, tasks)


def _loss(network, x):
    return lambda task: network(x).square().mean()


def _counted():
    torch._dynamo.reset()
    return torch._dynamo.testing.CompileCounter()


@pytest.mark.compile
@pytest.mark.parametrize("way", ["wrapped trunk", "closure alone", "in place"])
@BOTH_PHASES
def test_compiled_trunks(way, schedule):
    """From the first compiled step on, each task has one graph, without breaks."""
    counter, x, networks = _counted(), torch.randn(4, 3, 8, 8), []
    for compiled in (False, True):
        trunk = _trunk()
        network, given = trunk, trunk
        if compiled and way == "in place":
            trunk.compile(backend=counter, fullgraph=True)
        elif compiled:
            network = torch.compile(trunk, backend=counter, fullgraph=True)
            given = network if way == "wrapped trunk" else trunk
        opt = optimizer_of(given, schedule=schedule)
        for step in range(3):
            opt.step(_loss(network, x))
            assert counter.frame_count == (len(AB) if compiled and step else 0)
        assert opt.coverage().prioritized == PRIORITIZED
        networks.append(trunk.state_dict())
    torch.testing.assert_close(*networks)


@pytest.mark.compile
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_tasks_than_torch_compiles_graphs_for():
    """Beyond its limit, torch would run eagerly, or raise with `fullgraph`."""
    counter, names = _counted(), ["a", "b", "c"]
    trunk, x = _trunk(names), torch.randn(4, 3, 8, 8)
    network = torch.compile(trunk, backend=counter, fullgraph=True)
    opt = optimizer_of(network, tasks=names)
    limit = torch._dynamo.config.recompile_limit
    for _ in range(3):
        opt.step(_loss(network, x))
    assert counter.frame_count == len(names) > limit
    # Prediction has its own graphs, in evaluation mode.
    trunk.eval()
    for name in names:
        with torch.no_grad(), cs.nn.active_task(trunk, name):
            network(x)
    assert counter.frame_count == 2 * len(names)
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.compile
def test_first_passes_of_two_threads():
    """First passes run eagerly; when both have ended, in any order, torch compiles again."""
    counter, x = _counted(), torch.randn(4, 3, 8, 8)
    first, second = _trunk(), _trunk()
    inside, ended = threading.Event(), threading.Event()

    def waits(task):
        inside.set()
        assert ended.wait(60)
        return second(x).mean()

    opt = optimizer_of(second)
    with ThreadPoolExecutor(1) as threads:
        other = []

        def starts_the_other(task):
            other[:] = other or [threads.submit(opt.step, waits)]
            assert inside.wait(60)
            return first(x).mean()

        optimizer_of(first).step(starts_the_other)
        ended.set()
        other[0].result()
    torch.compile(nn.ReLU(), backend=counter)(x)
    assert counter.frame_count == 1


class Growing(nn.Module):
    """A network whose second layer runs only in some passes."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))
        self.both = False

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if self.both else x


@pytest.mark.compile
def test_a_layer_that_first_runs_in_a_graph():
    """After the layer's first run, the next task's pass is observed; graphs do not break."""
    torch._dynamo.reset()
    x = torch.randn(8, 3)
    # The second network runs the first network's graphs, which have no hook.
    for trunk in [cs.nn.convert_task_batchnorm(Growing(), AB) for _ in range(2)]:
        network = torch.compile(trunk, backend="eager", fullgraph=True)
        opt = optimizer_of(network)
        for both, prioritized in ((False, 1), (False, 1), (True, 2), (True, 2)):
            trunk.both = both
            opt.step(_loss(network, x))
            assert len(opt.coverage().prioritized) == prioritized


@pytest.mark.compile
def test_a_layer_that_runs_in_evaluation_only():
    """The layer's first run neither ends the compiled steps nor enters the coverage."""
    torch._dynamo.reset()
    runs: list[int] = []
    trunk = cs.nn.convert_task_batchnorm(Growing(), AB)
    backend = lambda graph, inputs: lambda *args: runs.append(1) or graph(*args)  # noqa: E731
    network = torch.compile(trunk, backend=backend, fullgraph=True)
    opt, x = optimizer_of(network), torch.randn(8, 3)
    for epoch in range(3):
        runs.clear()
        for _ in range(2):
            opt.step(_loss(network, x))
        assert len(runs) == (2 if epoch == 0 else 4)
        trunk.eval().both = True
        with torch.no_grad(), cs.nn.active_task(trunk, "a"):
            network(x)
        trunk.train().both = False
    assert set(opt.coverage().prioritized) == {"one.0.weight"}


@pytest.mark.compile
def test_extract_from_a_compiled_trunk():
    trunk = _trunk()
    names = {name.replace(".a.", ".") for name in trunk.state_dict() if ".b." not in name}
    network = torch.compile(trunk, backend="eager")
    assert set(cs.nn.extract_task(network, "a").state_dict()) == names


@BOTH_PHASES
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_several_optimizers(schedule, scale):
    """The trunk and each head have an optimizer; a head's optimizer may have nothing to update."""
    setup, whole = (Setup(dtype=torch.float32, optimizer=torch.optim.SGD, lr=0.1) for _ in range(2))
    setup.optimizer = [sgd_of(module) for module in (setup.trunk, *setup.heads.values())]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale > 1 else None
    opt, one = setup.start(schedule=schedule, scaler=scaler), whole.start(schedule=schedule)
    for batch, tasks in ((0, TASKS[:2]), (1, TASKS)):
        opt.step(setup.closure(batch), tasks=tasks)
        one.step(whole.closure(batch), tasks=tasks)
    torch.testing.assert_close(setup.parameters(), whole.parameters())


def test_repr():
    _, opt = started(schedule=cs.Mixed(3))
    assert repr(opt) == (
        "MultiTaskOptimizer(Trunk with 9 shared parameters of 1366 elements, Adam,"
        " tasks=['depth', 'normals', 'edges'], method=ConnectionStrength(),"
        " schedule=Mixed(epochs=3, seed=0, draw='epoch'), weighting=EqualWeights())"
    )


class Dense(Whole):
    """A trunk that runs once for all tasks, and heads."""

    def losses(self, x) -> dict[str, Tensor]:
        z = self.trunk(x)
        return {task: (self.heads[task](z) - 3 * n).square().mean() for n, task in enumerate(AB)}


def _dense():
    torch.manual_seed(0)
    model = Dense()
    return model, sgd_of(model, lr=0.05)


def _train(model, optimizers, method, way="step", **options):
    """Makes three steps, with `step`, or with `backward` and the optimizers' own steps."""
    x = torch.ones(7, 5).cumsum(0).cos()
    opt = cs.MultiTaskOptimizer(model.trunk, optimizers, AB, copy.deepcopy(method), **options)
    for _ in range(3):
        if way == "step":
            opt.step(lambda task: model.losses(x)[task])
        else:
            opt.backward(model.losses(x))
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()


def test_muon_for_matrices_beside_adamw():
    """`step` equals `backward` followed by the steps of both optimizers."""
    models = []
    for way in ("step", "backward"):
        model, _ = _dense()
        muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)
        adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.01)
        _train(model, [muon, adamw], cs.PCGrad(), way)
        models.append([*model.parameters()])
    torch.testing.assert_close(*models)


def _with_factor(model, sgd, train):
    """The package must measure the factor, because Nash-MTL's update has a fixed norm."""

    def divide(*_):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(1024)

    sgd.register_step_pre_hook(divide)
    train(model, sgd, backward=lambda loss, **options: (1024 * loss).backward(**options))


def _accelerate(model, sgd, train):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    train(*accelerator.prepare(model, sgd), backward=accelerator.backward)


def _fabric(model, sgd, train):
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, sgd)
    wrapped.mark_forward_method("losses")
    train(wrapped, optimizer, backward=fabric.backward)


def _lightning(model, sgd, train):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.model = model

        def configure_optimizers(self):
            return sgd

        def training_step(self, batch, number):
            train(self.model, self.optimizers(), backward=self.manual_backward)

    parts = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(parts, False)}
    trainer = lightning.Trainer(**options)
    trainer.fit(Module(), torch.utils.data.DataLoader([torch.ones(1)], batch_size=None))
    assert trainer.global_step == 3


@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("method", [cs.PCGrad(), cs.NashMTL(), cs.Sum()], ids=repr)
@pytest.mark.parametrize("framework", [_with_factor, _accelerate, _fabric, _lightning])
def test_a_backward_pass_of_someone_else(request, framework, method, way):
    torchvision_operators.define()
    if framework is _accelerate:
        request.getfixturevalue("accelerate")
    (plain, plain_sgd), (model, sgd) = _dense(), _dense()
    _train(plain, plain_sgd, method, way)
    framework(model, sgd, partial(_train, method=method, way=way))
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=1e-5, atol=1e-7)


def test_a_backward_that_scales_beside_a_scaler():
    """A probe measures the product of both scales."""
    norms = []
    for factor in (1.0, 1024.0):
        model, sgd = _dense()
        # The scaler has divided by its own factor.
        sgd.register_step_pre_hook(lambda *_: norms.append(flat_grad(model.trunk).norm() / factor))
        opt = cs.MultiTaskOptimizer(
            *(model.trunk, sgd, AB, cs.NashMTL()),
            scaler=torch.amp.GradScaler("cpu", init_scale=16.0),
            backward=lambda loss, **options: (factor * loss).backward(**options),
        )
        opt.step(lambda task: model.losses(torch.eye(5))[task])
    torch.testing.assert_close(*norms)


def test_accelerate_must_not_accumulate_around_a_step(accelerate):
    """Inside `accumulate`, accelerate's optimizer steps only in the last micro-batch."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, sgd = accelerator.prepare(*_dense())
    refused = pytest.raises(RuntimeError, match="optimizer must step now")
    with accelerator.accumulate(model), refused:
        _train(model, sgd, cs.PCGrad(), backward=accelerator.backward)


@pytest.mark.parametrize("views", [False, True])
def test_gradients_in_the_buckets_of_ddp(group, views):
    """One process; with `gradient_as_bucket_view`, each pass overwrites earlier gradients."""
    networks, x = [], torch.randn(7, 5)
    for wrapped in (False, True):
        model, sgd = _dense()
        trunk: nn.Module = model.trunk
        if wrapped:
            trunk = nn.parallel.DistributedDataParallel(trunk, gradient_as_bucket_view=views)
        opt = cs.MultiTaskOptimizer(trunk, sgd, AB, cs.PCGrad())
        for _ in range(3):
            opt.step(lambda task: (model.heads[task](trunk(x)) - 3 * (task == "b")).square().mean())
        networks.append([*model.parameters()])
    assert_equal(*networks)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("sharded", [[0], [1], [0, 1]])
def test_hooks_of_fully_shard_are_seen_through(group, sharded):
    """The hooks of a layer and of its normalization pass their inputs on as views."""
    from torch.distributed.fsdp import fully_shard

    mesh, trunk = dist.init_device_mesh("cpu", (1,)), _trunk()
    for module in (*(trunk[n] for n in sharded), trunk):
        fully_shard(module, mesh=mesh)
    coverage = optimizer_of(trunk).trace(_loss(trunk, torch.randn(4, 3, 8, 8)))
    assert coverage.prioritized == PRIORITIZED
