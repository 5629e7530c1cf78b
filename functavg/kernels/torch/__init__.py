"""The kernel of torch tensors: steps in foreach groups of one dtype and device."""

from functavg.kernels.torch.finiteness import is_finite as is_finite
from functavg.kernels.torch.functions import apply as apply
from functavg.kernels.torch.groups import refusal as refusal
from functavg.kernels.torch.memory import identities as identities
from functavg.kernels.torch.preparing import prepare as prepare
from functavg.kernels.torch.steps import cast as cast
from functavg.kernels.torch.steps import copy as copy
from functavg.kernels.torch.steps import lerp as lerp
