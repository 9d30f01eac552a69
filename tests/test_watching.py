"""Which normalization is behind which layer: also through views, hooks and late first runs."""

import copy
import io
import pickle

import pytest
import torch
from networks import TASKS
from torch import Tensor, nn

import cs_kernels as cs

AB = ["a", "b"]


class Network(nn.Module):
    """Layers and one forward function."""

    def __init__(self, forward: str, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(self, f"_{self.how}")(x)
        return result

    def _in_place(self, x: Tensor) -> Tensor:
        return self.norm(self.relu(self.layer(x)))

    def _flattened(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.norm(y.flatten(0, 1)).reshape_as(y)

    def _transposed(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).transpose(1, 2))

    def _in_place_through_a_view(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.view(-1).relu_()
        return self.norm(y.flatten(0, 1))

    def _direct(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))

    def _by_keyword(self, x: Tensor) -> Tensor:
        return self.norm(input=self.layer(x))

    def _half(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)[:, :4])

    def _squeezed(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).squeeze(-1).squeeze(-1))


def _optimizer(trunk: nn.Module, method: cs.Method | None = None, **options: object):
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    return cs.MultiTaskOptimizer(trunk, sgd, AB, method, **options)


def _coverage(trunk: nn.Module, x: Tensor) -> cs.Coverage:
    cs.nn.convert_task_batchnorm(trunk, AB)
    return _optimizer(trunk, cs.Sum()).trace(lambda task: trunk(x).sum())


@pytest.mark.parametrize("inplace", [False, True])
def test_an_activation_in_between_counts_in_place_too(inplace: bool) -> None:
    trunk = Network(
        "in_place", layer=nn.Conv2d(3, 4, 1), relu=nn.ReLU(inplace), norm=nn.BatchNorm2d(4)
    )
    coverage = _coverage(trunk, torch.randn(2, 3, 5, 5))
    assert coverage.prioritized == {}
    assert coverage.plain["layer.weight"].startswith("no task-specific normalization takes")


@pytest.mark.parametrize(
    ("forward", "layer", "norm", "x", "seen"),
    [
        ("flattened", nn.Linear(3, 8), nn.BatchNorm1d(8), (2, 5, 3), True),
        ("transposed", nn.Linear(3, 8), nn.BatchNorm1d(8), (2, 5, 3), True),
        ("in_place_through_a_view", nn.Linear(3, 8), nn.BatchNorm1d(8), (2, 5, 3), False),
        ("by_keyword", nn.Linear(3, 8), nn.BatchNorm1d(8), (5, 3), True),
        ("squeezed", nn.Conv2d(3, 8, 2), nn.BatchNorm1d(8), (4, 3, 2, 2), True),
        ("half", nn.Conv2d(3, 8, 1), nn.BatchNorm2d(4), (2, 3, 5, 5), False),
        ("direct", nn.ConvTranspose1d(3, 8, 2), nn.BatchNorm1d(8), (2, 3, 5), True),
        ("direct", nn.Conv3d(3, 8, 2), nn.BatchNorm3d(8), (2, 3, 4, 4, 4), True),
    ],
)
def test_views(
    forward: str, layer: nn.Module, norm: nn.Module, x: tuple[int, ...], seen: bool
) -> None:
    coverage = _coverage(Network(forward, layer=layer, norm=norm), torch.randn(x))
    assert coverage.prioritized == ({"layer.weight": "norm"} if seen else {})


@pytest.mark.parametrize("positions", [5, 8])
def test_a_normalization_over_positions(positions: int) -> None:
    """BatchNorm1d takes dimension 1, which a Linear leaves as it was: also if sizes agree."""
    trunk = Network("direct", layer=nn.Linear(3, 8), norm=nn.BatchNorm1d(positions))
    x = torch.randn(4, positions, 3)
    coverage = _coverage(trunk, x)
    assert coverage.plain["layer.weight"] == "norm normalizes other channels than its outputs"
    with pytest.raises(ValueError, match=r"(?s)must have a layer.*other channels than its outputs"):
        _optimizer(trunk).step(lambda task: trunk(x).square().mean())


def test_a_module_whose_statistics_have_another_size() -> None:
    class Doubled(nn.BatchNorm1d):
        def __init__(self, channels: int) -> None:
            super().__init__(2 * channels)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat([x, x], 1))

    trunk = Network("direct", layer=nn.Linear(3, 8), norm=Doubled(8))
    coverage = _coverage(trunk, torch.randn(4, 3))
    assert coverage.plain["layer.weight"] == "norm has other channels than its 8 outputs"


def test_after_trace_a_step_without_a_prioritized_layer_raises() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    cs.nn.convert_task_batchnorm(trunk, AB)
    opt, x = _optimizer(trunk), torch.randn(6, 3)
    before = copy.deepcopy(trunk.state_dict())

    def loss(task: str) -> Tensor:
        return trunk(x).square().mean()

    assert opt.trace(loss).prioritized == {}
    for _ in range(2):
        with pytest.raises(ValueError, match="must have a layer whose output"):
            opt.step(loss)
    assert all(torch.equal(v, before[k]) for k, v in trunk.state_dict().items())


class Deep(nn.Module):
    """As many blocks run as are asked for."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3)
        )
        self.depth = 1

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = torch.relu(block(x))
        return x


def _conflict(trunk: nn.Module, x: Tensor, task: str) -> Tensor:
    """Tasks in conflict in every channel."""
    return (1 if task == "a" else -2) * trunk(x).sum() + trunk(x).square().mean()


@pytest.mark.parametrize("schedule", [cs.Joint(), cs.Sequential()], ids=repr)
def test_a_layer_that_first_runs_later(schedule: cs.Schedule) -> None:
    """It is prioritized in that very step, as in a run that was told beforehand."""
    networks = []
    for told in (False, True):
        torch.manual_seed(0)
        trunk = cs.nn.convert_task_batchnorm(Deep(), AB)
        x = torch.randn(16, 4)
        layers = {f"blocks.{n}.0": f"blocks.{n}.1" for n in range(3)} if told else None
        opt = _optimizer(trunk, schedule=schedule, layers=layers)
        for depth in (1, 1, 2, 3):
            trunk.depth = depth
            opt.step(lambda task, trunk=trunk, x=x: _conflict(trunk, x, task))
            if not told:
                assert len(opt.coverage().prioritized) == depth
                plain = opt.coverage().plain
                assert [n for n, why in plain.items() if why == "the layer has not run"] == [
                    f"blocks.{n}.0.weight" for n in range(depth, 3)
                ]
        networks.append(trunk.state_dict())
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in trunk.modules()) or told
    for name, tensor in networks[0].items():
        assert torch.equal(tensor, networks[1][name]), name


def test_a_layer_that_first_runs_in_the_second_task() -> None:
    trunk = cs.nn.convert_task_batchnorm(Deep(), AB)
    opt, x = _optimizer(trunk), torch.randn(16, 4)

    def loss(task: str) -> Tensor:
        trunk.depth = 1 if task == "a" else 2
        return _conflict(trunk, x, task)

    opt.step(loss)
    assert opt.coverage().prioritized == {"blocks.0.0.weight": "blocks.0.1"}
    assert opt.coverage().own["blocks.1.0.weight"] == "b"  # No other task reaches it.


def test_a_network_with_a_layer_that_has_not_run_is_copied_and_saved() -> None:
    """Whoever waits for its first run does not travel along."""
    trunk = cs.nn.convert_task_batchnorm(Deep(), AB)
    opt, x = _optimizer(trunk), torch.randn(16, 4)
    opt.step(lambda task: _conflict(trunk, x, task))
    average = copy.deepcopy(trunk)
    loaded = pickle.loads(pickle.dumps(trunk))
    file = io.BytesIO()
    torch.save(trunk, file)
    version = opt._watcher.version
    for other in (average, loaded):
        other.depth = 3
        with cs.nn.active_task(other, "a"):
            other(x)
    assert opt._watcher.version == version


def test_a_first_run_in_a_pass_that_fails() -> None:
    trunk = cs.nn.convert_task_batchnorm(Deep(), AB)
    opt, x = _optimizer(trunk), torch.randn(16, 4)
    opt.step(lambda task: _conflict(trunk, x, task))
    trunk.depth = 2
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: _conflict(trunk, x, task) / (1 // 0))
    opt.step(lambda task: _conflict(trunk, x, task))
    assert "blocks.1.0.weight" in opt.coverage().prioritized


class Shifted(nn.Module):
    """A convolution of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight) + 1


def test_layers_of_ones_own_can_be_named() -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(Shifted(), nn.BatchNorm1d(4))
    cs.nn.convert_task_batchnorm(trunk, AB)
    x = torch.randn(16, 3)
    opt = _optimizer(trunk, layers={"0": "1"})
    opt.step(lambda task: _conflict(trunk, x, task))
    assert opt.coverage().prioritized == {"0.weight": "1"}
    assert opt.priority()["0"].shape == (4,)


def test_layers_are_never_ignored() -> None:
    """By another name of the same module, or of another module with the same weight."""
    trunk = Deep()
    trunk.alias = trunk.blocks[0][0]
    trunk.emb = nn.Embedding(3, 4)
    cs.nn.convert_task_batchnorm(trunk, AB)
    x = torch.randn(16, 4)
    opt = _optimizer(trunk, cs.Sum(), layers={"alias": None, "emb": None})
    coverage = opt.trace(lambda task: _conflict(trunk, x, task))
    assert coverage.plain["blocks.0.0.weight"] == "excluded by `layers`"
    for layers, message in (
        ({"blocks.0.1.a": "blocks.0.1"}, "with a shared weight, got 'blocks.0.1.a'"),
        ({"blocks.0": None}, "with a shared weight, got 'blocks.0'"),
        ({"alias": None, "blocks.0.0": "blocks.0.1"}, "one weight to one normalization"),
    ):
        with pytest.raises(ValueError, match=message):
            _optimizer(trunk, cs.Sum(), layers=layers)


def test_a_whole_network_of_tasks() -> None:
    """Normalizations of heads inside the trunk: their layers are the task's own."""
    trunk = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
            **{f"head_{t}": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for t in AB},
        }
    )
    cs.nn.convert_task_batchnorm(trunk, AB)
    opt, x = _optimizer(trunk), torch.randn(16, 3)
    opt.step(lambda task: trunk[f"head_{task}"](trunk["stem"](x)).square().mean())
    coverage = opt.coverage()
    assert coverage.prioritized == {"stem.0.weight": "stem.1"}
    assert coverage.own["head_a.0.weight"] == "a"
    assert list(opt.priority()) == ["stem.0"]
    assert str(coverage).startswith("1 of 2 shared parameters are prioritized, 75.0 % of 16")


# --- Conversion and a task's life ---------------------------------------------------------------


def test_nothing_to_convert() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"batch normalization.*2 LayerNorm, 1 GroupNorm"):
        cs.nn.convert_task_batchnorm(module, AB)
    with pytest.raises(ValueError, match=r"got Linear with these normalizations: none"):
        cs.nn.convert_task_batchnorm(nn.Linear(3, 4), AB)


def test_modules_that_refer_to_each_other() -> None:
    parent = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    parent[0].add_module("parent", parent)
    cs.nn.convert_task_batchnorm(parent, AB)
    assert isinstance(parent[1], cs.nn.TaskBatchNorm)


def _trained(seed: int = 0) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(0))
    x = torch.randn(2, 3, 6, 6)
    for _ in range(2):
        network(x)
    nn.init.uniform_(network[1].weight)
    return network, x


def test_a_checkpoint_of_the_unconverted_network() -> None:
    plain, x = _trained()
    state = copy.deepcopy(plain.state_dict())
    for strict in (True, False):
        trunk = cs.nn.convert_task_batchnorm(_trained(1)[0], TASKS)
        assert not any(trunk.load_state_dict(state, strict=strict))
        trunk.eval(), plain.eval()
        for task in TASKS:
            with cs.nn.active_task(trunk, task):
                assert torch.equal(trunk(x), plain(x))
        assert state.keys() == plain.state_dict().keys()
    # What it does not have is still missed, and what nobody knows is still unexpected.
    del state["1.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"1\.depth\.bias"'):
        trunk.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nobody"):
        trunk.load_state_dict({**plain.state_dict(), "1.nobody": torch.ones(1)})


def test_a_task_named_as_a_weight() -> None:
    """`norm.weight.weight` is the converted one's, `norm.weight` the unconverted one's."""
    plain, x = _trained()
    trunk = cs.nn.convert_task_batchnorm(_trained(1)[0], ["weight", "bias"])
    trunk.load_state_dict(plain.state_dict())
    again = cs.nn.convert_task_batchnorm(_trained(2)[0], ["weight", "bias"])
    again.load_state_dict(trunk.state_dict())
    with cs.nn.active_task(again.eval(), "bias"):
        assert torch.equal(again(x), plain.eval()(x))


def test_extract_task() -> None:
    plain, x = _trained()
    trunk = cs.nn.convert_task_batchnorm(copy.deepcopy(plain), TASKS)
    opt = cs.MultiTaskOptimizer(trunk, torch.optim.SGD(trunk.parameters(), lr=0.1), TASKS)
    for _ in range(2):
        opt.step(lambda task: (1 + TASKS.index(task)) * trunk(x).square().mean())
    before = copy.deepcopy(trunk.state_dict())
    for task in TASKS:
        network = cs.nn.extract_task(trunk, task)
        assert not cs.nn.task_norms(network)
        assert type(network[1]) is nn.BatchNorm2d
        state = network.state_dict()
        assert state.keys() == plain.state_dict().keys()
        fresh = copy.deepcopy(plain)
        fresh.load_state_dict(state)
        trunk.eval(), network.eval(), fresh.eval()
        with cs.nn.active_task(trunk, task):
            assert torch.equal(network(x), trunk(x))
            assert torch.equal(fresh(x), trunk(x))
        exported = torch.export.export(network, (x,))
        torch.testing.assert_close(exported.module()(x), network(x))
        with torch.no_grad():
            network[0].weight.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trunk.state_dict().items())
    alone = cs.nn.extract_task(cs.nn.TaskBatchNorm1d(3, TASKS), "edges")
    assert type(alone) is nn.BatchNorm1d
    with pytest.raises(ValueError, match=r"task must be one of.*'flow'"):
        cs.nn.extract_task(trunk, "flow")
    with pytest.raises(ValueError, match=r"task-specific normalization, got Conv2d with none"):
        cs.nn.extract_task(nn.Conv2d(1, 1, 1), "depth")


def test_extract_a_module_that_is_used_twice() -> None:
    norm = nn.BatchNorm1d(3)
    trunk = nn.ModuleDict({"one": norm, "inner": nn.Sequential(nn.Linear(3, 3), norm)})
    network = cs.nn.extract_task(cs.nn.convert_task_batchnorm(trunk, AB), "a")
    assert network["one"] is network["inner"][1]


def test_add_task() -> None:
    trunk, x = _trained()
    cs.nn.convert_task_batchnorm(trunk, AB)
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    cs.MultiTaskOptimizer(trunk, sgd, AB).step(
        lambda task: (1 if task == "a" else 3) * trunk(x).square().mean()
    )
    trunk[1].of("a").weight.requires_grad_(False)
    for task, like, message in (
        ("a", "b", "task must be a new one, got 'a'"),
        ("c", "d", "task must be one of"),
        ("x.y", "a", "without a dot"),
        ("forward", "a", "named as an attribute"),
    ):
        with pytest.raises(ValueError, match=message):
            cs.nn.add_task(trunk, task, like=like)
        assert trunk[1].tasks == ("a", "b")
    with pytest.raises(ValueError, match="task-specific normalization, got Linear"):
        cs.nn.add_task(nn.Linear(3, 3), "c", like="a")
    new = cs.nn.add_task(trunk, "c", like="a")
    assert [p.requires_grad for p in new] == [False, True]
    trunk.eval()
    with cs.nn.active_task(trunk, "a"):
        expected = trunk(x)
    with cs.nn.active_task(trunk, "c"):
        assert torch.equal(trunk(x), expected)
    trunk.train()
    with pytest.raises(ValueError, match=r"optimizer must hold.*1\.c\.bias"):
        cs.MultiTaskOptimizer(trunk, sgd, [*AB, "c"])
    sgd.add_param_group({"params": new})
    opt = cs.MultiTaskOptimizer(trunk, sgd, [*AB, "c"])
    opt.step(lambda task: trunk(x).square().mean() * (2 if task == "c" else 1))
    assert not torch.equal(trunk[1].of("a").bias, trunk[1].of("c").bias)


def test_update_bn() -> None:
    """One task's statistics are torch's own of that task's network; the others' stay."""
    trunk, _ = _trained()
    cs.nn.convert_task_batchnorm(trunk, TASKS)
    trunk[2].eval()
    loader = [[torch.randn(4, 3, 6, 6), torch.zeros(4)] for _ in range(3)]
    plain = cs.nn.extract_task(trunk, "depth")
    torch.optim.swa_utils.update_bn(loader, plain)
    before = copy.deepcopy(trunk.state_dict())
    modes = [module.training for module in trunk.modules()]
    cs.nn.update_bn(loader, trunk, "depth")
    assert modes == [module.training for module in trunk.modules()]
    assert trunk[1].of("depth").momentum == 0.1
    assert trunk[1].active is None
    for name, tensor in trunk.state_dict().items():
        expected = before[name]
        if "1.depth." in name:
            expected = plain.state_dict()[name.replace("depth.", "")]
            assert torch.equal(tensor, expected)
            assert "running" not in name or not torch.equal(tensor, before[name])
        assert torch.equal(tensor, expected), name
    after = copy.deepcopy(trunk.state_dict())
    for bad, error in (([], ValueError), ([torch.randn(4, 3, 6, 6), "no tensor"], TypeError)):
        with pytest.raises(error):
            cs.nn.update_bn(bad, trunk, "depth")
        assert all(torch.equal(tensor, after[n]) for n, tensor in trunk.state_dict().items())
        assert trunk[1].of("depth").momentum == 0.1
    with pytest.raises(ValueError, match="task must be one of"):
        cs.nn.update_bn(loader, trunk, "flow")


def test_a_first_run_outside_a_step_is_nobodys_concern() -> None:
    """In a validation, in inference mode too: nothing is learned, no hook is set."""
    trunk = cs.nn.convert_task_batchnorm(Deep(), AB)
    opt, x = _optimizer(trunk), torch.randn(16, 4)
    opt.step(lambda task: _conflict(trunk, x, task))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        trunk.depth = 3
        trunk.eval()
        with mode(), cs.nn.active_task(trunk, "a"):
            trunk(x)
        pickle.dumps(trunk)
        trunk.train()
        trunk.depth = 1
        opt.step(lambda task: _conflict(trunk, x, task))
        assert set(opt.coverage().prioritized) == {"blocks.0.0.weight"}


def test_inference_mode_hides_changes_in_place() -> None:
    trunk = Network("in_place", layer=nn.Linear(3, 4), relu=nn.ReLU(True), norm=nn.BatchNorm1d(4))
    cs.nn.convert_task_batchnorm(trunk, AB)
    opt, x = _optimizer(trunk, cs.Sum()), torch.randn(6, 3)

    def loss(task: str) -> Tensor:
        trunk.eval()
        with torch.inference_mode():
            trunk(x)
        trunk.train()
        return trunk(x).sum()

    assert opt.trace(loss).prioritized == {}


def test_a_lazy_normalization_has_to_run_first() -> None:
    module = nn.Sequential(nn.Linear(2, 4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"must have run once.*got 1, a LazyBatchNorm1d"):
        cs.nn.convert_task_batchnorm(module, AB)
    module(torch.randn(3, 2))
    cs.nn.convert_task_batchnorm(module, AB)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_of_a_converted_network_are_refused() -> None:
    """They would keep one task for good; those of one task's network are none's concern."""
    trunk, x = _trained()
    cs.nn.convert_task_batchnorm(trunk, AB)
    cs.nn.set_task(trunk, "a")
    trunk.eval()
    with pytest.raises(RuntimeError, match="extract_task"):
        torch.fx.symbolic_trace(trunk)
    with pytest.raises(RuntimeError, match="extract_task"):
        torch.jit.trace(trunk, x)
    plain = cs.nn.extract_task(trunk, "a")
    assert torch.equal(torch.fx.symbolic_trace(plain)(x), trunk(x))


@pytest.mark.parametrize("assign", [False, True])
def test_an_unconverted_checkpoint_in_a_bigger_network(assign: bool) -> None:
    """Every task has memory of its own afterwards."""
    plain, x = _trained()
    state = {f"trunk.{name}": tensor for name, tensor in plain.state_dict().items()}
    network = nn.ModuleDict({"trunk": cs.nn.convert_task_batchnorm(_trained(1)[0], TASKS)})
    network.load_state_dict(state, assign=assign)
    network.eval(), plain.eval()
    norm = network["trunk"][1]
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        places = {getattr(norm.of(task), name).data_ptr() for task in TASKS}
        assert len(places | {getattr(plain[1], name).data_ptr()}) == len(TASKS) + 1
    for task in TASKS:
        assert isinstance(norm.of(task).weight, nn.Parameter)
        with cs.nn.active_task(network, task):
            assert torch.equal(network["trunk"](x), plain(x))


def test_a_checkpoint_with_one_task_more() -> None:
    """The message has the keys of the checkpoint."""
    more = cs.nn.convert_task_batchnorm(_trained()[0], ["a", "b", "c"])
    trunk = cs.nn.convert_task_batchnorm(_trained(1)[0], AB)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"1\.c\.weight"') as raised:
        trunk.load_state_dict(more.state_dict())
    assert "a.c" not in str(raised.value)


class Activated(nn.BatchNorm2d):
    """With a module inside, as timm has them."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.act = nn.PReLU(features)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(super().forward(x))
        return result


def test_an_unconverted_checkpoint_of_a_nested_normalization() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), Activated(4))
    nn.init.uniform_(plain[1].act.weight)
    trunk = cs.nn.convert_task_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), Activated(4)), AB)
    trunk.load_state_dict(plain.state_dict())
    assert torch.equal(trunk[1].of("b").act.weight, plain[1].act.weight)


def test_an_optimizer_is_copied_with_a_layer_that_has_not_run() -> None:
    trunk = cs.nn.convert_task_batchnorm(Deep(), AB)
    opt, x = _optimizer(trunk), torch.randn(16, 4)
    opt.step(lambda task: _conflict(trunk, x, task))
    other, again = copy.deepcopy((trunk, opt))
    for depth in (1, 2):
        trunk.depth = other.depth = depth
        opt.step(lambda task: _conflict(trunk, x, task))
        again.step(lambda task: _conflict(other, x, task))
    for a, b in zip(trunk.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
