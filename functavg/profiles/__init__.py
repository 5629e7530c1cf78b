"""Profiles: the weight that each past iterate has in an average."""

from functavg.profiles.reading import profile as profile
from functavg.profiles.weights import Profile as Profile
