"""The tests of functavg; ``oracle`` and ``tables`` serve all of them."""
