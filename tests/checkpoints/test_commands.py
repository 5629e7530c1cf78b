"""The command line: what it takes, prints and returns."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import functavg
from functavg import checkpoints
from functavg.__main__ import main
from functavg.checkpoints.safetensors_reader import SafetensorsReader
from tests.checkpoints.files import load, names_in, save

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Commands run in an empty folder; the handling of signals is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(capsys):
    """A function that runs a command and returns its code, output and errors."""

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = ended.value.code
        if isinstance(code, str):  # as Python ends on a message
            return 1, captured.out, captured.err + code
        return code or 0, captured.out, captured.err

    return call


BEST = ["average", "step-10.pt", "-o", "out.pt", "--best", "1", "--scores"]


def steps(*numbers, suffix=".pt"):
    """Write files of weights that are their steps."""
    for number in numbers:
        save(Path(f"step-{number}{suffix}"), {"w": torch.full((2,), float(number)), "n": torch.tensor(number)})


def result(path="out.pt"):
    tensors = load(Path(path))
    return tensors["w"][0].item(), tensors["n"].item()


def test_files_are_averaged_in_the_order_of_their_steps(run):
    steps(200, 1000)
    code, out, err = run("average", "step-1000.pt", "step-200.pt", "-o", "out.pt")
    assert (code, err) == (0, "")
    assert result() == (600.0, 1000)
    for text in ("step-1000.pt", "0.5", "written", "out.pt"):
        assert text in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--weights", "0.5", "0.3", "0.2"], (10 * 0.5 + 20 * 0.3 + 30 * 0.2, 30)),
        (["-w", "0.5,0.3,0.2"], (17.0, 30)),
        (["--weights", "0.5", "0.3", "--weights", "0.2"], (17.0, 30)),
        (["--weights", "2", "-1", "0"], (0.0, 20)),
        (["--weights", "1", "1", "1", "--sum"], (60.0, 30)),
        (["--profile", "swa"], (20.0, 30)),
        (["--profile", "power:gamma=1"], ((10 * 1 + 20 * 3 + 30 * 5) / 9, 30)),
        (["--last", "2"], (25.0, 30)),
        (["--last", "5"], (20.0, 30)),
    ],
)
def test_weights_may_be_given_or_follow_from_the_steps(run, options, expected):
    steps(10, 20, 30)
    code, _, err = run("average", "step-10.pt", "step-20.pt", "step-30.pt", *options, "-o", "out.pt")
    assert (code, err) == (0, "")
    assert result() == pytest.approx(expected)


def test_weights_belong_to_the_files_as_they_are_named(run):
    steps(10, 20)
    run("average", "-o", "out.pt", "step-20.pt", "step-10.pt", "--weights", "3", "1")
    assert result() == (17.5, 20)


def test_options_go_before_and_between_files(run):
    steps(10, 20)
    code, _, err = run("average", "--weights", "3", "1", "step-20.pt", "-o", "out.pt", "step-10.pt", "-q")
    assert (code, err) == (0, "")
    assert result() == (17.5, 20)


def test_the_last_files_of_a_pattern_are_the_newest_by_number(run):
    steps(5, 100, 1000, 20)
    code, out, _ = run("average", "--last", 2, "--glob", "step-*.pt", "-o", "out.pt", "--json")
    assert code == 0
    assert json.loads(out) == {
        "output": "out.pt",
        "files": ["step-100.pt", "step-1000.pt"],
        "weights": [0.5, 0.5],
        "tensors": 2,
        "bytes": 16,
    }


@pytest.mark.parametrize(("lower", "expected"), [(False, 25.0), (True, 15.0)])
def test_the_best_files_are_taken_by_their_scores(run, lower, expected):
    steps(10, 20, 30)
    scores = {"step-10.pt": 0.1, str(Path("step-20.pt").resolve()): 0.5, "step-30.pt": 0.9}
    Path("scores.json").write_text(json.dumps(scores))
    options = ["--lower-is-better"] if lower else []
    code, _, err = run("average", "--best", 2, "--scores", "scores.json", "-g", "step-*", *options, "-o", "out.pt")
    assert (code, err) == (0, "")
    assert result()[0] == expected


def test_dtype_key_and_quiet_are_passed_on(run):
    torch.save({"ema": {"w": torch.ones(2)}, "model": {"w": torch.zeros(2)}}, "in.pt")
    code, out, _ = run("average", "in.pt", "--key", "ema", "--dtype", "bfloat16", "--quiet", "-o", "out.safetensors")
    assert (code, out) == (0, "")
    assert load(Path("out.safetensors"))["w"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name files, or a pattern with --glob"),
        (["--glob", "nothing-*"], "no file matches 'nothing-*'"),
        (["step-10.pt", "--weights", "1", "2"], "expected one number for each of 1 files, got 2"),
        (["step-10.pt", "--weights", "much"], "expected numbers, got much"),
        (["step-10.pt", "--weights", "1", "--profile", "swa"], "gives the weights itself"),
        (["step-10.pt", "--last", "1", "--best", "1"], "--last"),
        (["step-10.pt", "--last", "0"], "--last"),
        (["step-10.pt", "--best", "1"], "needs --scores"),
        (["last.pt", "--last", "1"], "needs a step in the name of each file, last.pt has none"),
        (["last.pt", "--profile", "swa"], "needs a step in the name of each file"),
        (["--wrong"], "No such option"),
    ],
)
def test_a_call_that_is_none_ends_in_2(run, arguments, message):
    steps(10)
    save(Path("last.pt"), {"w": torch.ones(1)})
    code, _, err = run("average", *arguments, "-o", "out.pt")
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert not Path("out.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["average", "missing.pt", "-o", "out.pt"], "functavg: missing.pt: cannot be read: No such file"),
        (["average", "step-10.pt", "-o", "out"], "functavg: out: the output must end in one of"),
        (["average", "step-10.pt", "-o", "step-10.pt"], "the output is also an input"),
        (["average", "step-10.pt", "-w", "0", "-o", "out.pt"], "weights must have a sum other than 0"),
        (["average", "step-10.pt", "-p", "emma", "-o", "out.pt"], "'emma' is no rule"),
        ([*BEST, "none.json"], "none.json: expected JSON of"),
        ([*BEST, "empty.json"], "has no score of step-10.pt"),
        (["inspect", "missing.pt"], "missing.pt: cannot be read"),
        (["convert", "step-10.pt", "-o", "out.pt"], "expected an average of a known kind"),
        (["posthoc", "step-10.pt", "-t", "swa", "-o", "out.pt"], "does not say by what rule"),
        (["profile", "ema:2"], "decay must be in [0, 1], got 2"),
        (["profile", "swa", "--plot", "out.nothing"], "out.nothing: the picture cannot be written"),
        (["soup", "step-10.pt", "-e", "false {}", "-o", "out.pt"], "ended with code 1"),
        (["soup", "step-10.pt", "-e", "echo good {}.", "-o", "out.pt"], "must print a number last, got 'step-10.pt.'"),
        (["soup", "step-10.pt", "-e", "true {}", "-o", "out.pt"], "must print a number last, got 'nothing'"),
    ],
)
def test_files_and_values_that_cannot_be_used_end_in_1(run, folder, arguments, message):
    steps(10)
    Path("empty.json").write_text("{}")
    before = names_in(folder)
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert names_in(folder) == before


def test_a_soup_takes_what_a_command_scores_best(run):
    steps(10, 20, 90, suffix=".safetensors")
    # The last number in the file is one of `w`; to import torch would take seconds.
    script = "import struct, sys; print('loss', abs(struct.unpack('<f', open(sys.argv[1], 'rb').read()[-4:])[0] - 16))"
    Path("evaluate.py").write_text(script)
    command = f"{sys.executable} evaluate.py {{}}"
    options = ["--lower-is-better", "-o", "out.safetensors", "--json"]
    code, out, _ = run("soup", "--greedy", "-g", "step-*", "--evaluate", command, *options)
    assert code == 0
    assert json.loads(out)["files"] == ["step-10.safetensors", "step-20.safetensors"]
    assert result("out.safetensors") == (15.0, 20)
    code, _, err = run("soup", "step-10.safetensors", "--evaluate", "true", "-o", "out.pt")
    assert code == 2
    assert "expected a command with {} for the file" in " ".join(err.replace("│", " ").split())


def tracked():
    """Write snapshots of two averages, as states and as plain weights."""
    averages = {"a": functavg.PowerEMA(17), "b": functavg.PowerEMA(7)}
    rule = functavg.Several(averages)
    state = rule.init({"w": torch.zeros(1)})
    for step in range(1, 41):
        state = rule.update({"w": torch.full((1,), float(step))}, state)
        if step % 10 == 0:
            checkpoints.save_state(f"state-{step}.safetensors", state, rule)
            for name, average in state.average.items():
                checkpoints.save_weights(f"{name}-{step}.pt", average)


def test_posthoc_takes_rules_from_states_or_from_the_command_line(run):
    tracked()
    code, out, err = run("posthoc", "-g", "state-*", "--target", "power:gamma=10", "-o", "one.pt", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["residual"] < 0.1
    rules = ["-r", "a-*::power:gamma=17", "-r", "b-*::power:gamma=7"]
    code, out, _ = run("posthoc", "-g", "[ab]-*.pt", *rules, "-t", "power:gamma=10", "--at", 40, "-o", "two.pt")
    assert code == 0
    for text in ("residual", "amplification", "a-10.pt"):
        assert text in out
    torch.testing.assert_close(load(Path("one.pt"))["w"], load(Path("two.pt"))["w"], rtol=1e-5, atol=1e-5)


def test_converting_writes_weights_and_states(run):
    averaged = AveragedModel(torch.nn.Linear(2, 2))
    torch.save(averaged.state_dict(), "swa.pt")
    code, out, err = run("convert", "swa.pt", "-o", "out.safetensors")
    assert (code, err) == (0, "")
    assert "averaged_model" in out
    assert load(Path("out.safetensors")).keys() == {"weight", "bias"}
    code, out, _ = run("convert", "swa.pt", "--to", "state", "-r", "swa", "--count", 5, "-o", "out.pt", "--json")
    assert json.loads(out) == {"from": "averaged_model", "to": "state", "tensors": 2, "written": "out.pt"}
    assert checkpoints.load_state("out.pt", dict(averaged.module.state_dict())).count == 5
    torch.save({"decay": 0.9, "num_updates": 3, "shadow_params": [torch.ones(2)], "collected_params": None}, "ema.pt")
    Path("names.txt").write_text("w\n")
    run("convert", "ema.pt", "--names", "names.txt", "--to", "averaged_model", "-o", "out.pt", "-q")
    assert load(Path("out.pt")).keys() == {"n_averaged", "module.w"}
    code, _, err = run("convert", "swa.pt", "--to", "state", "-o", "out.pt")
    assert code == 2
    assert "goes with --to state, which needs it" in " ".join(err.replace("│", " ").split())


def test_inspecting_shows_averages_dtypes_and_ties(run):
    shared = torch.ones(2)
    torch.save({"model": {"emb": shared, "head": shared}, "ema": {"w": torch.ones(3, dtype=torch.int64)}}, "in.pt")
    code, out, _ = run("inspect", "in.pt")
    assert code == 0
    for text in ("model", "1 float32", "emb = head", "1 int64", "24 bytes"):
        assert text in out
    tracked()
    code, out, _ = run("inspect", "state-40.safetensors", "in.pt", "--json")
    first, second = json.loads(out)
    assert (first["kind"], first["count"], first["format"]) == ("functavg", 40, "safetensors")
    assert [held["key"] for held in second["holds"]] == ["model", "ema"]
    save(Path("named.safetensors"), {"w": torch.ones(2)}, {"format": "pt"})
    _, out, _ = run("inspect", "named.safetensors")
    assert re.search(r"^format +safetensors *$", out, re.MULTILINE)
    assert re.search(r"^metadata format +pt *$", out, re.MULTILINE)


def test_a_profile_is_a_table_and_a_picture(run):
    code, out, err = run("profile", "ema:0.99", "several({'a': swa(), 'b': lawa(5)})", "-n", 100, "--plot", "out.png")
    assert (code, err) == (0, "")
    for text in ("ema:0.99", "mean age", "49.5", "effective iterates", "after 100 steps"):
        assert text in out
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run("profile", "swa", "--steps", 11, "--json")
    (figures,) = json.loads(out)
    assert (figures["rule"], figures["steps"], figures["mean_age"]) == ("swa", 11, pytest.approx(5.0))


def test_a_picture_needs_matplotlib(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run("profile", "swa", "--plot", "out.png")
    assert code == 1
    assert "--plot needs matplotlib, which is not installed: pip install 'functavg[plot]'" in err


@pytest.mark.parametrize("command", ["average", "posthoc", "soup", "convert", "inspect", "profile"])
def test_each_command_helps_with_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Example" in out
    assert f"functavg {command}" in out.split("Example")[1]


def test_a_shell_can_complete_commands(run, monkeypatch):
    assert "--install-completion" in run("--help")[1]
    monkeypatch.setenv("_FUNCTAVG_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "functavg av")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run()[1].strip() == "average"


def started(*arguments, code="from functavg.__main__ import main; main()"):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_it_runs_as_a_module():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-m", "functavg", "profile", "swa", "--steps", "10"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "swa" in done.stdout


def test_without_its_libraries_it_says_what_to_install(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("functavg.commands")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    code, _, err = run("profile", "swa", "--steps", "10")
    assert code == 1
    assert "the command needs typer, which is not installed: pip install 'functavg[cli]'" in err


def test_a_missing_module_that_no_extra_installs_is_an_error_of_its_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "functavg.commands", None)
    with pytest.raises(ModuleNotFoundError, match=r"functavg\.commands"):
        main(["profile", "swa", "--steps", "10"])


def test_running_the_package_runs_the_command(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "functavg.__main__")
    monkeypatch.setattr(sys, "argv", ["functavg", "profile", "swa", "--steps", "10"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("functavg", run_name="__main__")
    assert not ended.value.code
    assert "swa" in capsys.readouterr().out


def test_a_command_that_is_told_to_end_removes_its_temporary_file_first(run, folder, monkeypatch):
    """Its code is that of a shell, 128 and the number of the signal."""

    def end(*args):
        assert list(folder.glob(".*.tmp"))
        signal.raise_signal(signal.SIGTERM)

    save(Path("in.safetensors"), {"w": torch.ones(2)})
    monkeypatch.setattr(SafetensorsReader, "read_piece", end)
    assert run("average", "in.safetensors", "-o", "out.safetensors")[0] == 143
    assert names_in(folder) == {"in.safetensors"}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of Unix")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_command_removes_its_temporary_file(folder, number, code):
    save(Path("in.safetensors"), {str(index): torch.ones(2) for index in range(100)})
    slow = """
import signal, time
from functavg.__main__ import main
from functavg.checkpoints import pieces
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have left it ignored
from functavg.checkpoints.safetensors_reader import SafetensorsReader
fast = SafetensorsReader.read_piece
pieces.PIECE = 8
SafetensorsReader.read_piece = lambda *args: time.sleep(0.1) or fast(*args)
main()
"""
    process = started("average", "in.safetensors", "-o", "out.safetensors", code=slow)
    while not list(folder.glob(".*.tmp")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == code
    assert names_in(folder) == {"in.safetensors"}
