"""The names of the library that files build on, in one place."""

from functavg.rules.constant import Latest
from functavg.saving import from_state_dict, to_state_dict

__all__ = ["Latest", "from_state_dict", "to_state_dict"]
