"""How fast InvGrad attacks: its iterations beside the bare double backward that each of them needs.

A victim with LeNet-5 and random images of 28 x 28; its gradient, or its update after five local steps, is attacked.
"Bare" is the forward pass, the gradient with its graph, and the derivative of the cosine cost with respect to the
images, written by hand for one gradient. Contestants take turns.

    python benchmarks/attacks.py          or, with the number of turns:          python benchmarks/attacks.py 40
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from turns import timed

from fedblend.analysis.attacks.inversion import InvGrad
from fedblend.analysis.attacks.victim import Steps, Victim
from fedblend.core.context import Context, Task
from fedblend.core.random import lent_generator, stream
from fedblend.data.scale import Scaler
from fedblend.models.cnn import LeNet5

SHAPE, CLASSES, ITERATIONS = (1, 28, 28), 10, 10


def model() -> nn.Module:
    """LeNet-5 with first weights that are always the same."""
    with lent_generator(0, "benchmark"):
        return LeNet5().build(SHAPE, CLASSES)


def batch(images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pictures on the unit scale, and labels."""
    rng = stream(0, "benchmark")
    return torch.from_numpy(rng.random((images, *SHAPE))).float(), torch.from_numpy(rng.integers(0, CLASSES, images))


def attacked(images: int, steps: int) -> Callable[[], None]:
    """Iterations of the attack."""
    numbers = (torch.tensor(v).view(1, 1, 1) for v in (1 / 255, 0.0, 1 / 255, 0.0))
    context = Context(Task("classification", CLASSES), Scaler("unit", False, *numbers))
    victim = Victim(model(), context, steps=Steps(0.01, steps) if steps else None)
    x, y = batch(images)
    observed, attack = victim.observe(x, y), InvGrad(iterations=ITERATIONS)
    box = (torch.zeros(1, *SHAPE), torch.ones(1, *SHAPE))

    def run() -> None:
        for _ in attack.search(victim, observed, 1 - x, y, box):
            pass

    return run


def bare(images: int) -> Callable[[], None]:
    """As many double backward passes."""
    net, (x, y) = model(), batch(images)
    params = list(net.parameters())
    observed = torch.autograd.grad(F.cross_entropy(net(x), y), params)
    length = torch.stack([g.square().sum() for g in observed]).sum()

    def run() -> None:
        for _ in range(ITERATIONS):
            made = (1 - x).requires_grad_()
            gradients = torch.autograd.grad(F.cross_entropy(net(made), y), params, create_graph=True)
            inner = torch.stack([(g * o).sum() for g, o in zip(gradients, observed, strict=True)]).sum()
            own = torch.stack([g.square().sum() for g in gradients]).sum()
            torch.autograd.grad(1 - inner / (own * length).sqrt(), made)

    return run


def main(turns: int) -> None:
    """Time the attack and the bare passes in turn, and print how they compare."""
    torch.set_num_threads(1)
    table = Table("images", "steps", "iterations a second", "bare", "x bare")
    for images in (1, 4):
        runs = {"bare": bare(images), **{str(steps): attacked(images, steps) for steps in (0, 1, 5)}}
        times = timed(runs, turns)
        rate = {name: ITERATIONS / statistics.median(values) for name, values in times.items()}
        for name in ("0", "1", "5"):
            ratio = statistics.median(a / b for a, b in zip(times[name], times["bare"], strict=True))
            told = "gradient" if name == "0" else name
            table.add_row(str(images), told, f"{rate[name]:.0f}", f"{rate['bare']:.0f}", f"{ratio:.2f}")
    Console().print(table)
    print(f"{platform.machine()}, torch {torch.__version__}, 1 thread, medians of {turns} turns.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
