"""The kernel of torch tensors: steps in foreach groups of one dtype and device."""

from functavg.kernels.torch.finiteness import finite as finite
from functavg.kernels.torch.functions import apply as apply
from functavg.kernels.torch.groups import identities as identities
from functavg.kernels.torch.groups import prepared as prepared
from functavg.kernels.torch.groups import refusal as refusal
from functavg.kernels.torch.steps import cast as cast
from functavg.kernels.torch.steps import copied as copied
from functavg.kernels.torch.steps import lerp as lerp
