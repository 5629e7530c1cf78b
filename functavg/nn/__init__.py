"""Averages of torch modules."""

from functavg.extras import check_torch as _check_torch

_check_torch("functavg.nn")

from functavg.nn.averaged_model import AveragedModel as AveragedModel
from functavg.nn.batch_norm import update_bn as update_bn
from functavg.nn.functions import get_ema_avg_fn as get_ema_avg_fn
from functavg.nn.functions import get_ema_multi_avg_fn as get_ema_multi_avg_fn
from functavg.nn.functions import get_swa_avg_fn as get_swa_avg_fn
from functavg.nn.functions import get_swa_multi_avg_fn as get_swa_multi_avg_fn
from functavg.nn.swap import swapped as swapped
