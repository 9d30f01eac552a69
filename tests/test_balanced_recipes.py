"""The recipes of GradientBalancer: each against a plain loop, to the tolerance that it states."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sketch_errors
import torch
from plain_training import in_float64, largest_difference
from ranks import Pools
from recipe_training import assert_equal_as_stated, recipe, stated
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import cs_kernels as cs

# The frameworks themselves cause these warnings.
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:'pin_memory'"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


toy = recipe("toy")


def loss_of_batch(network: nn.Module, task: str, images: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = toy.loss_of(task, network(images, task), target)
    return loss


class PlainBalance:
    """Scales the trunk's exact gradients by task weights from the previous step's gradients."""

    def __init__(
        self,
        network: nn.Module,
        trunk: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        loss: Callable[..., Tensor] = loss_of_batch,
        max_norm: float = float("inf"),
    ) -> None:
        self.network, self.loss, self.max_norm = network, loss, max_norm
        self.shared = {*trunk.parameters()}
        self.optimizer = optimizer(network.parameters(), lr=1e-2)
        self.weights: dict[str, Tensor | float] = {}
        self.grad_norms: list[float] = []
        """Norms of the updates before clipping."""
        self.conflicts = 0

    def step(self, micro_batches: Sequence[tuple[str, Any, Any]], parts: int = 1) -> None:
        """Makes a step, with each loss divided by the number of parts."""
        parameters = [*self.network.parameters()]
        grads: dict[str, list[Tensor]] = {}
        for task, *batch in micro_batches:
            loss = self.loss(self.network, task, *batch) / parts
            found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            before = grads.get(task, [torch.zeros(()) for _ in parameters])
            grads[task] = [a + b for a, b in zip(before, found, strict=True)]
        for n, p in enumerate(parameters):
            weights = self.weights if p in self.shared else {}
            p.grad = torch.zeros_like(p)
            for task, of_task in grads.items():
                p.grad = p.grad + weights.get(task, 1.0) * of_task[n]
        self.grad_norms.append(nn.utils.clip_grad_norm_(parameters, self.max_norm).item())
        self.optimizer.step()
        of_trunk = [n for n, p in enumerate(parameters) if p in self.shared]
        rows = [torch.cat([of_task[n].flatten() for n in of_trunk]) for of_task in grads.values()]
        gramian = torch.stack(rows) @ torch.stack(rows).T
        self.conflicts += bool(gramian[0, 1] < 0)
        self.weights = dict(zip(grads, cs.UPGrad().weights(gramian), strict=True))


def _toy_network() -> tuple[nn.Module, nn.Module]:
    network = toy.make_network(normalized=False)
    return network, network.trunk


def plain_toy(epochs: int = 4) -> PlainBalance:
    """Makes steps of four and of the last two micro-batches; each loss is divided by four."""
    plain = PlainBalance(*_toy_network())
    batches = toy.make_task_batches()
    for _ in range(epochs):
        plain.step(batches[:4], 4)
        plain.step(batches[4:], 4)
    assert plain.conflicts > 0
    return plain


SEQUENTIAL = {
    "dropout": 0.0,
    "use_cpu": True,
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "constant",
}


def plain_transformers(folder: Path) -> tuple[PlainBalance, list[tuple[str, Tensor, Tensor]]]:
    """A plain loop with the recipe's untrained network, and the recipe's batches."""
    at_rest = {"max_steps": 1, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}
    trainer = recipe("balanced_transformers").train(str(folder), **SEQUENTIAL | at_rest)

    def loss(network: nn.Module, task: str, words: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = network(words, labels, task)["loss"]
        return found

    network = trainer.model
    plain = PlainBalance(network, network.bert, torch.optim.AdamW, loss, max_norm=0.5)
    return plain, [(b["task"], b["input_ids"], b["labels"]) for b in trainer.train_dataset]


def test_transformers(float64: None, accelerate: Any, tmp_path: Path) -> None:
    """The Trainer divides losses by a step's number of batches, and clips weighted gradients."""
    module = recipe("balanced_transformers")
    plain, batches = plain_transformers(tmp_path)
    trainer = module.train(str(tmp_path), max_grad_norm=0.5, **SEQUENTIAL)
    for _ in range(3):
        for n in (0, 3, 6):
            plain.step(batches[n : n + 3], len(batches[n : n + 3]))
    assert 0 < plain.conflicts < 9
    assert_equal_as_stated(module, trainer.model, plain.network.state_dict())
    norms = [entry["grad_norm"] for entry in trainer.state.log_history[:9]]
    assert norms == pytest.approx(plain.grad_norms, rel=1e-4)
    assert min(norms) < 0.5 < max(norms)


def _trainer_on_a_rank(rank: int, folder: str) -> tuple[dict[str, Any], Tensor]:
    variables: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    with in_float64(), pytest.MonkeyPatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, str(value))
        trainer = recipe("balanced_transformers").train(folder, max_grad_norm=0.5, **SEQUENTIAL)
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    weights: Tensor = trainer.balancer.state_dict()["weights"]
    return trainer.model.state_dict(), weights


@pytest.mark.ranks
def test_transformers_on_many_ranks(
    float64: None, accelerate: Any, pools: Pools, tmp_path: Path
) -> None:
    """Each of the two ranks has the batches of one task."""
    plain, batches = plain_transformers(tmp_path)
    for _ in range(3):
        plain.step(batches[:6], 6)
        plain.step(batches[6:], 2)
    assert plain.conflicts > 0
    state, _ = pools(2).agreed(_trainer_on_a_rank, str(tmp_path / "two"))
    difference = largest_difference(state, plain.network.state_dict())
    assert difference <= stated(recipe("balanced_transformers"))


def test_transformers_resumed(accelerate: Any, tmp_path: Path) -> None:
    """Training stops in the middle or at the end of an epoch, with dropout and shuffled batches."""
    module = recipe("balanced_transformers")
    options = {"save_steps": 1, "use_cpu": True}
    straight = module.train(str(tmp_path), **options)
    for step in (4, 6):
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        resumed = module.train(str(tmp_path / "resumed"), checkpoint, **options)
        assert largest_difference(resumed.model.state_dict(), straight.model.state_dict()) == 0
        assert str(resumed.balancer.state_dict()) == str(straight.balancer.state_dict())


def test_accelerate(float64: None, accelerate: Any) -> None:
    module = recipe("balanced_accelerate")
    network, history = module.train(cpu=True)
    assert len(history) == 8
    assert_equal_as_stated(module, network, plain_toy().network.state_dict())


def test_lightning(float64: None, tmp_path: Path) -> None:
    module = recipe("balanced_lightning")
    options = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, "logger": False}
    parts = "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    options |= dict.fromkeys(parts, False)
    expected = plain_toy().network.state_dict()
    straight, trainer = module.train(**options)
    assert trainer.global_step == 8
    assert_equal_as_stated(module, straight.network, expected)
    assert {"cosine/depth,edges", "task_weight/depth"} <= trainer.logged_metrics.keys()
    _, trainer = module.train(2, **options)
    trainer.save_checkpoint(tmp_path / "2.ckpt")
    resumed, trainer = module.train(4, tmp_path / "2.ckpt", **options)
    assert trainer.global_step == 8
    assert_equal_as_stated(module, resumed.network, expected)
    assert largest_difference(resumed.network.state_dict(), straight.network.state_dict()) == 0
    weights = resumed.balancer.weights
    resumed.configure_optimizers()  # As a second `fit` does.
    assert resumed.balancer.weights == weights


def test_loop(float64: None, tmp_path: Path) -> None:
    module = recipe("balanced_loop")
    network, history = module.train()
    plain = PlainBalance(*_toy_network(), torch.optim.AdamW)
    batches = toy.make_task_batches()
    for step in range(12):
        plain.step(batches[step % 3 * 2 :][:2])
        weights = {task: history[step][f"task_weight/{task}"] for task in plain.weights}
        assert weights == pytest.approx({t: float(w) for t, w in plain.weights.items()}, rel=1e-4)
    assert_equal_as_stated(module, network, plain.network.state_dict())
    for epochs in range(1, 5):
        resumed, history = module.train(epochs, tmp_path / "checkpoint")
        assert len(history) == 3
    assert largest_difference(resumed.state_dict(), network.state_dict()) == 0


def _on_a_rank(rank: int, sharded: bool) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Trains; returns the state dict with whole parameters, and the numbers of every step."""
    network, history = recipe("balanced_ranks").train(sharded=sharded)
    return get_model_state_dict(network, options=StateDictOptions(full_state_dict=True)), history


@pytest.mark.ranks
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks(pools: Pools, sharded: bool) -> None:
    """Two ranks, with equal parameters and weights, against one process with whole batches."""
    plain = PlainBalance(*_toy_network())
    batches = toy.make_task_batches()
    state, history = pools(2).agreed(_on_a_rank, sharded)
    for step, numbers in enumerate(history):
        plain.step(batches[step % 3 * 2 :][:2])
        weights = {task: numbers[f"task_weight/{task}"] for task in plain.weights}
        assert weights == pytest.approx({t: float(w) for t, w in plain.weights.items()}, rel=1e-3)
    assert len(history) == 12
    difference = largest_difference(state, plain.network.state_dict())
    assert difference <= stated(recipe("balanced_ranks"))


def test_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO stages 0, 1 and 2, in one process."""
    module = recipe("balanced_deepspeed")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for variable, value in {**address, "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(variable, value)
    for stage in range(3):
        network, history = module.train(stage=stage)
        plain = PlainBalance(*_toy_network(), torch.optim.SGD)
        batches = toy.make_task_batches()
        for step, numbers in enumerate(history):
            plain.step(batches[step % 3 * 2 :][:2])
            weights = {task: numbers[f"task_weight/{task}"] for task in plain.weights}
            expected = {task: float(weight) for task, weight in plain.weights.items()}
            assert weights == pytest.approx(expected, rel=1e-3)
        difference = largest_difference(network.state_dict(), plain.network.state_dict())
        assert difference <= stated(module), stage
    module.deepspeed.comm.destroy_process_group()


def test_parameters_that_deepspeed_has_partitioned() -> None:
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape = torch.Size([3, 2])  # As ZeRO stage 3 sets it.
    with pytest.raises(ValueError, match=r"parameters must be whole, .* ZeRO stage 3"):
        cs.GradientBalancer([weight], ["a", "b"])


def test_sketches_of_all_elements_have_no_errors() -> None:
    """These functions also make the table of docs/balancer.md."""
    torch.manual_seed(0)
    trunk = nn.Linear(5, 6)
    z = trunk(torch.randn(8, 5))
    losses = {f"task {n}": (z - n).square().mean() * 2**n for n in range(3)}
    found = sketch_errors.errors(trunk, losses, 256)
    assert len(found) == sketch_errors.SEEDS * len(sketch_errors.METHODS) == 36
    assert max(found) < 1e-3
