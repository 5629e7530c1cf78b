"""Average the weights of a numpy model: logistic regression by stochastic gradients. Torch is never imported.

python examples/numpy_only.py [--epochs 30]
"""

import argparse
import sys

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import functavg


def probabilities(params: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    logits = images @ params["weight"] + params["bias"]
    scaled = np.exp(logits - logits.max(axis=1, keepdims=True))
    return scaled / scaled.sum(axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=30)
    epochs = parser.parse_args().epochs
    rng = np.random.default_rng(0)

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, train_size=600, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = split

    params = {"weight": np.zeros((64, 10)), "bias": np.zeros(10)}
    rule = functavg.SWA()
    state = rule.init(params)
    for epoch in range(epochs):
        for batch in rng.permutation(len(train_x)).reshape(-1, 4):
            noisy = train_x[batch] + rng.normal(scale=0.3, size=(len(batch), 64))
            error = probabilities(params, noisy) - np.eye(10)[train_y[batch]]
            params["weight"] -= 0.5 * noisy.T @ error / len(batch)
            params["bias"] -= 0.5 * error.mean(axis=0)
            if epoch >= epochs // 3:
                state = rule.update(params, state, inplace=True)  # the average shares no memory with the params

    print(f"logistic regression on {len(train_x)} digits, noise added to each batch, {state.count} iterates averaged")
    for name, weights in (("last iterate", params), (str(rule), state.average)):
        predicted = probabilities(weights, test_x)
        accuracy = 100 * (predicted.argmax(axis=1) == test_y).mean()
        loss = -np.log(predicted[np.arange(len(test_y)), test_y]).mean()
        print(f"{name + ':':14}test accuracy {accuracy:.2f} %, test loss {loss:.4f}")
    assert "torch" not in sys.modules
    print("torch was not imported")


if __name__ == "__main__":
    main()
