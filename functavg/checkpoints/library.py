"""The names of the library that files build on, in one place."""

from functavg.rules.constant import Copy as Latest
from functavg.saving import load_state_dict as from_state_dict
from functavg.saving import state_dict as to_state_dict

__all__ = ["Latest", "from_state_dict", "to_state_dict"]
