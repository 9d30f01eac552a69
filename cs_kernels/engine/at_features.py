"""The joint update from the gradients with respect to a shared representation.

K backward passes of the heads end at the features; a method combines the K gradients that arrive
there, and one backward pass of the trunk takes the combination further (MGDA-UB, Sener and Koltun
2018, section 3.3; IMTL-G, Liu et al. 2021). Memory holds K gradients of the features in place of
K gradients of all shared parameters.

On many ranks, each has the features of its own samples. The products of gradients are sums over
samples, so over ranks; the tasks' weights are then the same everywhere, every rank takes its own
part of the combination through the trunk, and the trunk's gradients are reduced once.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from cs_kernels.engine import supports
from cs_kernels.engine.engine import Engine
from cs_kernels.engine.features import Features, tensors_of
from cs_kernels.engine.one_graph import OneGraph
from cs_kernels.schedules import Phase
from cs_kernels.step import Part, Step


class AtFeatures(OneGraph):
    """Backward passes of the heads that end at features, and one of the trunk.

    Args:
        engine: Makes the step.
        losses: As in `backward`.
        features: A tensor that the trunk has returned, or a sequence of them.
        update: As in `backward`; it must be True.

    """

    name = supports.FEATURES
    at_features = True

    def __init__(self, engine: Engine, losses: object, features: object, *, update: bool) -> None:
        super().__init__(engine, losses, update=update)
        self._given_features = features
        self._features: Features | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Leaves no gradient in the features."""
        with super().around():
            try:
                yield
            finally:
                if self._features is not None:
                    self._features.close()

    def check(self) -> None:
        """Begins an update, on many ranks of as many features on each."""
        super().check()
        assert self._features is not None
        self.kind = 4 + self._features.number

    def prepare(self) -> None:
        """Checks that the features separate the losses from the trunk."""
        if not self.update:
            raise ValueError(
                "update must be True for backward with features, which change from one micro-batch"
                f" to the next, got {self.update!r}"
            )
        engine, trunk = self.engine, self.engine.trunk
        features = tensors_of(self._given_features)
        if not self.losses:  # Other ranks have labels; of this one's features, the number counts.
            features = [torch.empty(0, device=trunk.device) for _ in features]
        shared: dict[Tensor, nn.Parameter] = {p: p for p in trunk.shared}
        shared |= {whole: p for whole, p in engine.graph.sharded().items() if p in shared}
        self._features = Features(
            features, self.losses, trunk.tasks, shared, trunk.watcher.names_of, engine.ranks
        )

    def separates(self, step: Step) -> bool:
        """Whether passes stop at the features; kept task weights would save none of them."""
        return self.engine.method.separate_gradients

    def parts(self, step: Step, tasks: Sequence[str], phase: Phase) -> Iterator[Part]:
        """The heads' passes, then the trunk's; a plain sum of gradients needs no stop between."""
        for part in super().parts(step, tasks, phase):
            if not part.separate:
                yield part
                continue
            # Ranks have to know the losses before the method, and whether one has failed.
            yield Part(step, part.tasks, joint=True, separate=False, adds_up=True, stops=True)
            yield Part(step, part.tasks, joint=True, separate=False, continues=True)

    def make(self, part: Part, held: Sequence[nn.Parameter]) -> None:
        """The backward passes of the heads, or that of the trunk."""
        if not part.continues:
            super().make(part, held)
        elif self.losses:
            assert self._features is not None
            ranks = self.engine.ranks
            ranks.last_backward([task for task in part.tasks if task in self.losses][-1])
            ranks.before_backward(retains=False)
            self._features.trunk_pass()

    def backward_passes(self, part: Part, losses: Mapping[str, Tensor]) -> None:
        """Backward passes that end at the features."""
        if not part.stops:
            super().backward_passes(part, losses)
            return
        assert self._features is not None
        engine = self.engine
        engine.ranks.before_backward(retains=True)
        scaled = {task: engine.graph.scaled(loss) for task, loss in losses.items()}
        self._features.head_passes(scaled, engine.pass_checks)
        part.reached = self._features.gradients.reached_here()

    def surgery(self, part: Part) -> None:
        """Combines the gradients of features, which are known after the passes of the heads."""
        assert self._features is not None
        if part.continues:
            self._features.check_reached()
            return
        if not part.stops:
            super().surgery(part)
            return
        engine, step = self.engine, part.step
        timer = engine.monitor.timer(engine.trunk.device, eager=True)
        with record_function("cs_kernels.surgery"), torch.no_grad(), timer:
            self._features.combine(engine.method, part)
        step.elapsed = timer

    def losses_of(self, step: Step) -> dict[str, Tensor]:
        """The losses; none are of an earlier call."""
        return step.losses
