"""Every public name of torch.optim.swa_utils, to switch by the import line alone."""

from functavg.extras import check_torch

check_torch("functavg.swa_utils")

from torch.optim.swa_utils import SWALR

from functavg.nn.averaged_model import AveragedModel
from functavg.nn.batch_norm import update_bn
from functavg.nn.functions import get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_avg_fn, get_swa_multi_avg_fn

__all__ = [
    "SWALR",
    "AveragedModel",
    "get_ema_avg_fn",
    "get_ema_multi_avg_fn",
    "get_swa_avg_fn",
    "get_swa_multi_avg_fn",
    "update_bn",
]
