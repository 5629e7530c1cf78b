#!/usr/bin/env bash
# Averages the checkpoints of a small run in several ways: bash examples/average_checkpoints.sh
#
# Needs `pip install 'functavg[cli]'`. Where that is installed, `functavg` is the same as `python -m functavg`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
cd "$folder"

echo "== A run that saves its weights, and the state of two averages, every 100 steps"
python - <<'PYTHON'
import torch

import functavg
from functavg import checkpoints

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
rule = functavg.Several({"narrow": functavg.PowerEMA(17), "wide": functavg.PowerEMA(7)})
state = rule.init(dict(model.state_dict()))
for step in range(1, 501):
    x = torch.randn(32, 64)
    optimizer.zero_grad()
    (model(x) - x.flip(1)).square().mean().backward()
    optimizer.step()
    state = rule.update(dict(model.state_dict()), state, inplace=True)
    if step % 100 == 0:
        checkpoints.save_weights(f"step-{step}.safetensors", model.state_dict())
        checkpoints.save_state(f"state-{step}.safetensors", state, rule)
PYTHON
ls

echo "== The mean of the last three"
python -m functavg average --last 3 --glob 'step-*.safetensors' -o mean.safetensors

echo "== As a power-function EMA weighs them"
python -m functavg average --profile power:sigma_rel=0.1 --glob 'step-*.safetensors' -o weighed.safetensors

echo "== An average that was not tracked, from the two that were"
python -m functavg posthoc --glob 'state-*.safetensors' --target power:gamma=10 -o ema.safetensors

echo "== What these averages remember"
python -m functavg profile power:gamma=17 power:gamma=10 power:gamma=7 --steps 500

echo "== What the last file holds"
python -m functavg inspect state-500.safetensors
