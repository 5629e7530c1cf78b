"""A torch.func training loop: the params are a dict, their average is a state, and no object hides anything.

python examples/functional.py [--epochs 20]
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

import functavg

Params = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, train_size=600, stratify=labels, random_state=0)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    train_y, test_y = map(torch.tensor, split[2:])

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss(params: Params, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, params, (images,)), labels)

    params = {name: param.detach() for name, param in model.named_parameters()}
    rule = functavg.EMA(0.99)
    state = rule.init(params)

    print("epoch  test loss: raw  EMA")
    for epoch in range(1, epochs + 1):
        for batch in torch.randperm(len(train_x)).split(8):
            noisy = train_x[batch] + 0.3 * torch.randn(len(batch), 64)
            gradients = grad(loss)(params, noisy, train_y[batch])
            params = {name: param - 0.5 * gradients[name] for name, param in params.items()}
            state = rule.update(params, state)  # pure; with inplace=True it reuses the memory of the average
        if epoch % max(1, epochs // 5) == 0:
            print(f"{epoch:5}  {loss(params, test_x, test_y):14.4f}  {loss(state.average, test_x, test_y):.4f}")

    for name, weights in (("raw", params), ("EMA", state.average)):
        predicted = functional_call(model, weights, (test_x,)).argmax(1)
        print(f"test accuracy, {name}: {100 * (predicted == test_y).double().mean():.2f} %")
    print(f"{state.count} steps averaged by {rule}")


if __name__ == "__main__":
    main()
