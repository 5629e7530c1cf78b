"""Rules made of rules: how often, which leaves, how many averages."""

from functavg.combinators.every import Every as Every
from functavg.combinators.partition import Partition as Partition
from functavg.combinators.several import Several as Several
from functavg.combinators.skip_non_finite import SkipNonFinite as SkipNonFinite
