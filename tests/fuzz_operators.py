"""Compares every operator with the reference, for random valid and invalid arguments.

A call must raise on both backends, or succeed on both and agree. No call may crash, or raise an
exception that only a bug raises. `make fuzz` runs this under the sanitizers; tests/test_fuzz.py
runs a few cases.
"""

import argparse
import contextlib
import math
import mmap
import os
import random
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from layers import SMALL, SOLVER_OPTIONS, emulate
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import cs_kernels as cs
from cs_kernels.ops.backends import OPERATORS
from cs_kernels.ops.checks import DTYPES, out_channels
from cs_kernels.ops.solvers import ALIGNED_SCALES, SOLVERS

INSTRUCTION_SETS = "avx512", "avx2", "baseline"
SIZES = [0, *[1] * 3, *[2] * 3, 3, 3, 4, 5, 7, 8, 16, 17, 33, 64, 65, 129, 513]
TASKS = [*[1, 2, 3, 4] * 6, 5, 7, 8, 9, 10, 16, *([] if SMALL else [33, 64, 65])]
INTEGERS = [-1, 0, 1, 2, 3, 7, 65, 2**32 - 3, 2**40, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e300]
OTHER_DTYPES = [torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]
IN_PLACE = "combine_", "drop_signs_"
"""Operators whose updates may alias gradients of the same tensors."""
ERRORS = ValueError, TypeError, RuntimeError, NotImplementedError


class Draw(random.Random):
    """Draws random arguments; `defined` turns false if they leave the result undefined."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.defined = True
        self.scale = 10.0 ** self.choice([*[0] * 8, -12, 12])
        self.special = self.choice([None] * 12 + [math.nan, math.inf, 1e-44, 1e-23, 1e30, 1e300])
        self.dtype = self.choice(DTYPES)

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def shape(self, least: int = 0) -> list[int]:
        sizes = [self.choice(SIZES) for _ in range(self.choice([0, 1, 1, 2, 2, 3, 4, 5]))]
        sizes += [2] * (least - len(sizes))
        if self.chance(0.02):
            sizes = [16385, 3]
        while math.prod(sizes) > 50000:
            sizes[sizes.index(max(sizes))] = 2
        return sizes

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, dtype=torch.float64, generator=self.noise) * self.scale
        if self.chance(0.1):
            x = torch.zeros_like(x)
        if self.special is not None and x.numel() and self.chance(0.3):
            x.view(-1)[:: self.choice([1, x.numel()])] = self.special
        return self.laid_out(x.to(dtype or self.dtype))

    def laid_out(self, x: Tensor) -> Tensor:
        """Returns `x`, often in another memory layout; layouts with overlaps change values."""
        kind = self.choice([*["same"] * 12, *"TSOMVNLE"])
        if kind == "T" and x.ndim > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == "S":
            return torch.stack([x, x], -1)[..., 0]
        if kind in "OM" and x.numel():  # M: elements at odd addresses
            offset = x.element_size() if kind == "O" else 1
            memory = bytearray(x.numel() * x.element_size() + offset)
            return torch.frombuffer(memory, dtype=x.dtype, offset=offset).view(x.shape).copy_(x)
        if kind == "V" and x.ndim:
            return x[:1].expand(x.shape) if len(x) else x
        if kind == "N" and x.dtype.is_floating_point:
            return torch._neg_view(-x)
        if kind == "L" and x.dtype.is_floating_point:
            return x.clone().requires_grad_()
        if kind == "E" and x.ndim == 2 and min(x.shape) > 1:
            return x.reshape(-1).as_strided(x.shape, (1, 1))
        return x

    def wrong(self, x: Tensor) -> Any:
        """Returns a tensor that kernels cannot read, or one of another dtype or shape."""
        if not is_plain(x):
            return x
        x = x.detach().resolve_neg()
        choices: list[Callable[[], Any]] = [
            lambda: x.to("meta"),
            lambda: x.to(self.choice([d for d in (*DTYPES, *OTHER_DTYPES) if d != x.dtype])),
            lambda: x.to(torch.complex64).conj(),
            lambda: x.to_sparse(),
            lambda: torch.quantize_per_tensor(torch.zeros(x.shape), 0.1, 0, torch.qint8),
            lambda: x[..., None],
            lambda: x.flatten()[:-1],
            lambda: torch.ones((), dtype=x.dtype),
            lambda: torch._efficientzerotensor(x.shape, dtype=x.dtype),
        ]
        with contextlib.suppress(NotImplementedError):  # float8 has few operators
            return self.choice(choices)()
        return x

    def trunk(self) -> dict[str, Any]:
        """Arguments of the operators on a trunk, by name; two names differ from the schemas'."""
        tasks, count = self.choice(TASKS), self.choice([0, 1, 1, 2, 3, 5])
        tasks = self.choice([0, 100, 1000]) if self.chance(0.01) else tasks
        layers, weights, dims, groups, channels = self.randint(0, count), [], [], [], []
        for t in range(count):
            dim = self.choice([0, 0, 1])
            shape = self.shape(dim + 1 if t < layers else 0)
            weight = self.values(*shape, dtype=self.choice([self.dtype] * 4 + [*DTYPES]))
            weights.append(weight)
            if t < layers:
                divisors = [n for n in range(1, shape[0] + 1) if shape[0] % n == 0 and n < 9]
                dims.append(dim)
                groups.append(self.choice(divisors or [1]) if dim else 1)
                channels.append(out_channels(weight, dim, groups[-1]))
        like = [w for w in weights for _ in range(tasks)]
        of_groups, wide = self.choice([1, 1, 2, 3]), torch.float64
        statistic = [tasks * sum(channels)]
        return {
            "updates": [self.laid_out(torch.full_like(w.detach(), 3.0)) for w in weights],
            "grads": [
                None if self.chance(0.15) else self.values(*w.shape, dtype=w.dtype) for w in like
            ],
            "weights": weights[:layers],
            "priorities": [
                self.laid_out(torch.randint(-1, max(tasks, 1), (rows,), generator=self.noise))
                for rows in channels
            ],
            "gamma": self.values(*statistic, dtype=self.choice(DTYPES)),
            "running_var": self.values(*statistic, dtype=self.choice(DTYPES)).detach().abs(),
            "eps": [1e-5] * (tasks * layers),
            "out_channel_dims": dims,
            "groups": groups,
            "channels": channels,
            "tasks": tasks,
            "products": self.laid_out(torch.randn(layers, tasks, tasks, dtype=wide)),
            "energies": self.values(sum(channels), dtype=wide).detach().abs(),
            "group_of": [self.randrange(of_groups) for _ in weights],
            "of_groups": of_groups,
            "task_weights": self.values(of_groups, tasks, dtype=self.choice(DTYPES)),
            "protected": self.randrange(max(tasks, 1)),
            "leaks": [self.choice([0.0, 0.0, 0.5, 1.0]) for _ in range(tasks)],
            "seed": self.choice(INTEGERS),
            "step": self.choice(INTEGERS),
            "counter": self.laid_out(torch.tensor([self.choice(INTEGERS)])),
            "sketch": self.laid_out(torch.zeros(self.choice([256, 512, 2048]))),
            "tensors": weights,
            "offsets": [self.choice([0, 5, 2**32 - 7, 2**62]) for _ in weights],
            "weight": torch.tensor(self.choice([0.0, 0.7, -3.0]), dtype=wide),
            "add": self.chance(0.5),
        }

    def solver(self, name: str) -> tuple[Any, ...]:
        tasks, batch = self.choice(TASKS), self.choice([[], [], [1], [3], [0], [2, 2]])
        rows = torch.randn(*batch, tasks, 2 * tasks, dtype=torch.float64, generator=self.noise)
        gramian = rows @ rows.mT * self.scale
        if self.chance(0.3):  # singular, indefinite or non-finite
            self.defined = False
            gramian = self.choice([gramian - gramian.mean(), self.values(*gramian.shape)])
        options: dict[str, tuple[Any, ...]] = {
            "pcgrad": (self.choice(INTEGERS), self.choice(INTEGERS)),
            "cagrad": (self.choice([0.4, 0.0, 1.5]),),
            "aligned_mtl": (self.choice([*ALIGNED_SCALES, "max"]),),
            "fair_grad": (self.choice([0.5, 1.0, 2.0]),),
            "gradvac": (torch.full_like(gramian, 0.3, dtype=torch.float64), 0.1, 1, 2),
        }
        assert options.keys() == {*SOLVER_OPTIONS, "gradvac"}
        gramian = gramian.to(self.choice([torch.float64] * 4 + [torch.float32]))
        given = self.laid_out(gramian)
        self.defined &= torch.equal(given, gramian)
        counter = [torch.tensor([3])] if name in ("pcgrad", "gradvac") and self.chance(0.3) else []
        return (given, *options.get(name, ()), *counter)

    def arguments(self, name: str) -> list[Any]:
        """Returns arguments of an operator; in about a quarter of all calls, some are spoiled."""
        if name.removesuffix("_weights") in SOLVERS:
            arguments = self.solver(name.removesuffix("_weights"))
        elif name == "task_priority":
            arguments = (self.values(self.choice(TASKS), self.choice(SIZES)),)
        elif name == "connection_strength":
            dim = self.choice([0, 1])
            weight, tasks = self.values(*self.shape(dim + 1)), self.choice(TASKS)
            groups = 2 if dim and weight.shape[0] % 2 == 0 < weight.shape[0] else 1
            size = tasks, out_channels(weight, dim, groups)
            statistics = self.values(*size), self.values(*size).detach().abs()
            normalize = self.chance(0.5)
            arguments = weight, *statistics, [1e-5] * tasks, normalize, dim, groups
        else:
            trunk = self.trunk()
            renamed = {"gramian": {"groups": "of_groups"}, "combine_": {"weights": "task_weights"}}
            schema = getattr(torch.ops.cs_kernels, name).default._schema
            names = {a.name: a.name for a in schema.arguments} | renamed.get(name, {})
            arguments = tuple(
                None if a.has_default_value() and self.chance(0.5) else trunk[names[a.name]]
                for a in schema.arguments
            )
        result = [*arguments]
        if name in IN_PLACE and self.chance(0.3):
            grads, tasks = trunk["grads"], trunk["tasks"]
            of_tensors = (grads[t * tasks : (t + 1) * tasks] for t in range(len(result[0])))
            found = (next((g for g in of if g is not None), None) for of in of_tensors)
            result[0] = [u if g is None else g for u, g in zip(result[0], found, strict=True)]
        if name == "sketch_and_weight_" and self.chance(0.3):
            result[1] = [*result[2]]
        while self.chance(0.25):
            self.spoil(result)
        return result

    def spoil(self, values: list[Any]) -> None:
        """Changes a value or the length of a list, or lets two tensors overlap."""
        if not values:
            return
        i = self.randrange(len(values))
        value = values[i]
        if isinstance(value, list) and value and self.chance(0.7):
            self.spoil(value)
        elif isinstance(value, list):
            values[i] = self.choice([value[:-1], value[:1] * (len(value) + 1), []])
        elif isinstance(value, Tensor):
            tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
            values[i] = self.choice(tensors) if self.chance(0.2) else self.wrong(value)
        elif isinstance(value, bool | str) or value is None:
            pass
        elif isinstance(value, int):
            values[i] = self.choice(INTEGERS)
        else:
            values[i] = self.choice(FLOATS)
            self.defined = False


def copied(arguments: Any) -> Any:
    """Copies tensors to new memory, with the same values, strides and overlaps."""
    memory: dict[int, Any] = {}

    def copy(x: Any) -> Any:
        if not is_plain(x):
            return x
        storage = x.untyped_storage()
        new = memory.setdefault(storage.data_ptr(), storage.clone())
        if storage.data_ptr() % 2 and not new.data_ptr() % 2:
            buffer = bytearray(1 + storage.nbytes())
            odd = torch.frombuffer(buffer, dtype=torch.uint8, offset=1).untyped_storage()
            new = memory[storage.data_ptr()] = odd.copy_(new)
        view = torch.empty(0, dtype=x.dtype).set_(new, x.storage_offset(), x.shape, x.stride())
        view = torch._neg_view(view) if x.is_neg() else view.conj() if x.is_conj() else view
        return view.requires_grad_(x.requires_grad)

    return tree_map(copy, arguments)


def written(name: str, arguments: Any) -> list[Tensor]:
    """The tensors that an operator changes."""
    schema = getattr(torch.ops.cs_kernels, name).default._schema
    pairs = zip(schema.arguments, arguments, strict=False)
    return [x for a, of in pairs if a.is_write for x in tree_leaves(of) if isinstance(x, Tensor)]


def overlapping(name: str, arguments: Any) -> bool:
    """Whether a written tensor overlaps itself, or an argument that it must not overlap."""
    if name in IN_PLACE:
        updates, grads = arguments[:2]
        tasks = len(grads) // max(len(updates), 1)
        owners = [update for update in updates for _ in range(tasks)]
        others = [g for g, update in zip_longest(grads, owners) if g is not update]
        arguments = [updates, others, *arguments[2:]]
    if name == "sketch_and_weight_":
        own = [t for t, update in zip_longest(arguments[2], arguments[1]) if t is not update]
        arguments = [*arguments[:2], own, *arguments[3:]]
    places = [x.untyped_storage().data_ptr() for x in tree_leaves(arguments) if is_plain(x)]
    counts = Counter(places)
    return any(
        is_plain(x) and x.numel() and (counts[x.untyped_storage().data_ptr()] > 1 or is_folded(x))
        for x in written(name, arguments)
    )


def is_plain(x: object) -> bool:
    """Whether `x` is a strided tensor with memory on the CPU."""
    strided = isinstance(x, Tensor) and x.layout is torch.strided and x.device.type == "cpu"
    return strided and not (x.is_quantized or x._is_zerotensor())


def is_folded(x: Tensor) -> bool:
    """Whether elements of `x` share memory, as after `expand`."""
    steps = sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    extents = [1, *(step * (size - 1) + 1 for step, size in steps)]
    return any(step < extent for (step, _), extent in zip(steps, extents, strict=False))


def in_range(x: Tensor) -> bool:
    """Whether nonzero elements are within the limits of docs/limits.md; NaN is allowed."""
    wide = x.detach().double().abs()
    low, high = (1e-130, 1e130) if x.dtype is torch.float64 else (1e-18, 1e18)
    return not ((wide > high) | ((wide < low) & (wide > 0))).any()


def norm(x: Tensor) -> float:
    return float(x.detach().double().nan_to_num(0).norm()) if is_plain(x) else 0.0


def difference(
    name: str, arguments: list[Any], found: list[Tensor], expected: list[Tensor], loose: bool
) -> str | None:
    """How two backends disagree, or None; errors are relative to the norms of the summands."""
    schema = getattr(torch.ops.cs_kernels, name).default._schema
    named = dict(zip([a.name for a in schema.arguments], arguments, strict=False))
    floating = [x for x in tree_leaves(arguments) if is_plain(x) and x.is_floating_point()]
    if not all(map(in_range, floating)):
        return None
    low = any(x.dtype.itemsize < 4 or (loose and x.dtype.itemsize < 8) for x in floating)
    precision = 2.0**-16 if low else 2.0**-38
    grads, tasks, updates = named.get("grads", []), named.get("tasks"), named.get("updates", [])
    first_update = 0
    if name == "sketch_and_weight_":
        grads, tasks, first_update = named["tensors"], 1, 1
    factor = max([1.0, *map(norm, [named.get("weights")] if name == "combine_" else [])])
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not is_plain(a):
            continue
        if (a.shape, a.dtype, a.requires_grad) != (b.shape, b.dtype, b.requires_grad):
            return f"{a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
        wide, exact = a.detach().double(), b.detach().double()
        size, few = exact.nan_to_num(0, 0, 0).abs(), 0
        t = n - first_update
        if 0 <= t < len(updates) and b.is_floating_point():
            of_tensor = [g for g in grads[t * tasks : (t + 1) * tasks] if g is not None]
            size = size.max() if size.numel() else size
            size = size + factor * sum(map(norm, [*of_tensor, updates[t]]))
            epsilon = 16 * torch.finfo(b.dtype).eps
            bound = size * (64 * epsilon if loose or b.dtype is torch.float64 else epsilon)
            chooses = name == "drop_signs_" or named.get("protected") is not None
            few = 2 + b.numel() // 100 if chooses else 0
            if (size > torch.finfo(b.dtype).max / 8).any():
                continue
        elif not b.is_floating_point():
            bound, few = 0 * size, 1  # one priority may differ where strengths almost tie
        elif grads:
            if b.isnan().any() and None in grads:  # a missing gradient times NaN may be zero or NaN
                continue
            bound = precision * (size + sum(norm(g) for g in grads if g is not None) ** 2)
        else:
            bound = precision * size
            if name.endswith("_weights") and size.numel():
                bound = 1e-5 * size.max()
        wrong = ~((wide - exact).abs() <= bound) & (wide != exact) & ~(wide.isnan() & exact.isnan())
        if int(wrong.sum()) > few:
            return f"{wide[wrong].tolist()[:3]}, expected {exact[wrong].tolist()[:3]}"
        if wrong.any() and not b.is_floating_point():
            return None
    return None


def outcome(name: str, arguments: list[Any], backend: str) -> Exception | list[Tensor]:
    """The error, or the written tensors and the result."""
    with contextlib.nullcontext() if backend == "cpu" else cs.use_backend(backend):
        try:
            result = getattr(torch.ops.cs_kernels, name)(*arguments)
        except ERRORS as error:
            return error
    return [*written(name, arguments), *([] if result is None else [result])]


def under_a_mode(draw: Draw, name: str, arguments: list[Any]) -> None:
    """Calls an operator with fake or batched tensors; the call may raise."""
    operator = getattr(torch.ops.cs_kernels, name)
    leaves, structure = tree_flatten(arguments)
    batched = [i for i, x in enumerate(leaves) if is_plain(x)]
    with contextlib.suppress(*ERRORS):
        if draw.chance(0.5) or not batched:
            with FakeTensorMode(allow_non_fake_inputs=True):
                operator(*arguments)
        else:
            i = draw.choice(batched)

            def call(x: Tensor) -> Any:
                return operator(*tree_unflatten([*leaves[:i], x, *leaves[i + 1 :]], structure))

            torch.func.vmap(call)(torch.stack([leaves[i]] * 2))


def run_case(seed: int, backend: str) -> tuple[str, str]:
    """Makes the call that a seed determines; returns the operator and the outcome.

    Raises:
        AssertionError: The backend and the reference disagree.

    """
    draw = Draw(seed)
    name = draw.choice(OPERATORS)
    arguments = draw.arguments(name)
    if draw.chance(0.03):
        under_a_mode(draw, name, arguments)
        return name, "under a mode"
    ours, theirs = copied(arguments), copied(arguments)
    found = outcome(name, ours, backend)
    if any(x in (100, 1000) for x in tree_leaves(ours) if isinstance(x, int)):  # many tasks
        return name, "without the reference"
    expected = outcome(name, theirs, "reference")
    failed = isinstance(found, Exception)
    both = f"{found!s:.200}, expected {expected!s:.200}".replace("\n", "")
    if failed and backend != "cpu" and re.search(r"computes on|in \[1, 64\]", str(found)):
        return name, "not for this backend"
    if isinstance(expected, torch.linalg.LinAlgError) and not draw.defined:
        return name, "singular"
    if str(found) == "sketch must be torch.float32, got torch.float64":
        return name, "raised"  # As an oracle, the reference also takes a float64 sketch.
    assert failed == isinstance(expected, Exception), f"{name}: {both}"
    if isinstance(found, Exception) or isinstance(expected, Exception):
        return name, "raised"
    if not draw.defined or overlapping(name, arguments):
        return name, "undefined"
    disagreement = difference(name, arguments, found, expected, loose=backend != "cpu")
    assert disagreement is None, f"{name}: {disagreement}"
    return name, "compared"


def run(first: int, seconds: float, cases: int, backend: str, current: mmap.mmap) -> int:
    """Makes up to `cases` calls until time is up; returns the number of failures."""
    warnings.simplefilter("ignore")
    if backend == "cuda":
        emulate()
    end, seed, failures, ended = time.monotonic() + seconds, first, 0, Counter[str]()
    while time.monotonic() < end and seed < first + cases:
        current[:8] = seed.to_bytes(8, "little")
        torch.set_num_threads(1 + seed % 3)
        try:
            ended[run_case(seed, backend)[1]] += 1
        except Exception:
            failures += 1
            print(f"--seed {seed} --cases 1:", traceback.format_exc(limit=-4), flush=True)
        seed += 1
    print(f"{seed - first} calls: {dict(ended)}, {failures} failures", flush=True)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**40)
    parser.add_argument("--cases", type=int, default=sys.maxsize)
    parser.add_argument("--backend", default="cpu")
    given = parser.parse_args()
    if given.backend == "cpu" and given.cases > 1 and "CS_KERNELS_CPU_ISA" not in os.environ:
        # The import selects the instruction set, so each has a process of its own.
        failed = False
        for n, name in enumerate(INSTRUCTION_SETS):
            options = {"seconds": given.seconds / len(INSTRUCTION_SETS), "cases": given.cases}
            options["seed"] = given.seed + n * 2**32
            command = [f"--{option}={value}" for option, value in options.items()]
            env = {**os.environ, "CS_KERNELS_CPU_ISA": name}
            failed |= subprocess.run([sys.executable, __file__, *command], env=env).returncode != 0
        sys.exit(failed)
    set_name = os.environ.get("CS_KERNELS_CPU_ISA", "")
    print(f"{given.backend} {set_name}: --seed {given.seed}", flush=True)
    current = mmap.mmap(-1, 8)
    process = os.fork()
    if process == 0:
        os._exit(bool(run(given.seed, given.seconds, given.cases, given.backend, current)))
    status = os.waitstatus_to_exitcode(os.wait()[1])
    if status not in (0, 1):
        seed = int.from_bytes(current[:8], "little")
        print(f"--seed {seed} --cases 1 ended the process with exit status {status}")
    sys.exit(status != 0)


if __name__ == "__main__":
    main()
