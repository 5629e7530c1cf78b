"""Learn handwritten digits from four labels of each, and from a teacher that is the average of its student.

The student learns to answer as the labels say, and on all images as the teacher does, which has seen another noisy copy
of each. The teacher is an EMA of the student. It needs no gradients, and its momentum rises to 1 along a cosine, so
that it comes to rest when training ends. What the same net learns from the labels alone is printed beside it.

    python examples/mean_teacher.py [--steps 800] [--seed 0]

Source: Tarvainen & Valpola, Mean teachers are better role models, 2017; the sharper answers and the cosine are those of
DINO, Caron et al., 2021.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functavg

PER_CLASS, BATCH, TEMPERATURE = 4, 128, 0.5


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return 900 images to train on, 40 of them once more with their labels, and 897 to test on with theirs."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        torch.tensor(images / 16, dtype=torch.float32),
        torch.tensor(labels),
        train_size=900,
        stratify=labels,
        random_state=0,
    )
    known = torch.cat([(train_y == label).nonzero()[:PER_CLASS, 0] for label in range(10)])
    return train_x, train_x[known], train_y[known], test_x, test_y


def net() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]

    return nn.Sequential(*block(64, 256), *block(256, 128), nn.Linear(128, 10))


def noisy(images: Tensor) -> Tensor:
    return images + 0.3 * torch.randn_like(images)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy in percent."""
    model.eval()
    return 100 * (model(images).argmax(1) == labels).double().mean().item()


def train(steps: int, use_teacher: bool) -> tuple[float, float]:
    """Train a student; return the test accuracy of the student and of the teacher."""
    images, known_x, known_y, test_x, test_y = digits()
    student = net()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

    momentum = functavg.schedules.Cosine(0.95, 1.0, duration=steps)
    # The statistics of its BatchNorms are averaged, too, as it answers by them.
    teacher = functavg.AveragedModel(student, rule=functavg.EMA(momentum), use_buffers=True).requires_grad_(False)
    teacher.attach(optimizer, student)  # follows every step of the optimizer
    teacher.eval()

    for step in range(steps):
        batch = images[torch.randint(len(images), (BATCH,))]
        answers = student(torch.cat([noisy(known_x), noisy(batch)]))
        loss = cross_entropy(answers[: len(known_x)], known_y)
        if use_teacher:
            wanted = (teacher(noisy(batch)) / TEMPERATURE).softmax(1)  # has no graph: no detach, no no_grad
            heard = min(2.0, 10 * step / steps)  # at first the teacher knows nothing yet
            loss = loss + heard * cross_entropy(answers[len(known_x) :], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return accuracy(student, test_x, test_y), accuracy(teacher, test_x, test_y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    torch.set_num_threads(1)  # the net is so small that more threads would mostly wait for each other

    table = Table(title=f"Test accuracy, {10 * PER_CLASS} labels")
    table.add_column("learnt from")
    for column in ("student", "teacher"):
        table.add_column(column, justify="right")
    for name, use_teacher in (("labels", False), ("labels and teacher", True)):
        torch.manual_seed(options.seed)
        student, teacher = train(options.steps, use_teacher)
        table.add_row(name, f"{student:.2f} %", f"{teacher:.2f} %")
    Console().print(table)


if __name__ == "__main__":
    main()
