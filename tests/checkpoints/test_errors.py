"""Files that cannot be averaged: the error names file and tensor, the output is as it was, nothing else is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import sys

import pytest
import torch

from functavg import checkpoints
from functavg.checkpoints import CheckpointError, atomic, pieces, tensors, torch_reader
from tests.checkpoints.files import FORMATS, load, names_in, run_code, save

GOOD = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int64)}


@pytest.fixture(params=FORMATS)
def suffix(request):
    return request.param


@pytest.fixture
def refused(tmp_path):
    """A function that averages a good file and another, and expects to be refused without a trace."""

    def check(other, match, error=CheckpointError, **options):
        output = tmp_path / f"out{other.suffix}"
        output.write_bytes(b"the old output")
        good = save(tmp_path / f"good{other.suffix}", GOOD)
        before = names_in(tmp_path)
        with pytest.raises(error, match=match):
            checkpoints.average([good, other], output, **options)
        assert output.read_bytes() == b"the old output"
        assert names_in(tmp_path) == before

    return check


@pytest.mark.parametrize(
    ("held", "match"),
    [
        ({"a": GOOD["a"]}, r"bad\.\w+: does not hold the tensors of .*good\.\w+: missing 'b'; unexpected none"),
        (GOOD | {"c": torch.ones(1)}, r"bad\.\w+: .*missing none; unexpected 'c'"),
        (GOOD | {"a": torch.ones(3, 2)}, r"bad\.\w+: 'a' has shape \(3, 2\), expected \(2, 3\) as in .*good"),
        (GOOD | {"a": torch.ones(2, 3).double()}, r"bad\.\w+: 'a' is float64, expected float32 as in .*good.*dtype="),
        (GOOD | {"b": torch.zeros(4)}, r"bad\.\w+: 'b' is float32, expected int64 as in .*good\.\w+$"),
    ],
)
def test_a_file_that_does_not_match_the_first(tmp_path, suffix, refused, held, match):
    refused(save(tmp_path / f"bad{suffix}", held), match)


def test_a_float_where_others_hold_integers_is_refused_whatever_the_dtype(tmp_path, suffix, refused):
    refused(save(tmp_path / f"bad{suffix}", GOOD | {"b": torch.zeros(4)}), "'b' is float32, exp", dtype="float32")


@pytest.mark.parametrize("left", [0, 4, 20, -1, -30])
def test_a_truncated_file(tmp_path, suffix, refused, left):
    bad = save(tmp_path / f"bad{suffix}", GOOD)
    data = bad.read_bytes()
    bad.write_bytes(data[:left])
    refused(bad, rf"bad\{suffix}: (truncated|expected a file of safetensors or of torch.save, it begins with)")


def test_a_missing_file_and_a_folder_without_weights(tmp_path, suffix, refused):
    refused(tmp_path / f"missing{suffix}", r"missing\.\w+: cannot be read: No such file")
    folder = tmp_path / f"folder{suffix}"
    folder.mkdir()
    refused(folder, r"folder\.\w+: the folder holds none of model\.safetensors, .*; name a file")


def test_a_file_that_is_none_of_weights(tmp_path, refused):
    bad = tmp_path / "bad.pt"
    bad.write_text("some text that is long enough")
    refused(bad, r"bad\.pt: expected a file of safetensors or of torch\.save, it begins with b'some text'")
    bad.write_bytes(b"\x80\x02garbage")
    refused(bad, r"bad\.pt: truncated or corrupt, or no file of torch\.save: it does not unpickle")


def header_of(text, data=b""):
    return struct.pack("<Q", len(text)) + text.encode() + data


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (header_of("{no json}"), "corrupt: its header is not that of safetensors"),
        (header_of("[1]"), "corrupt: its header is not that of safetensors"),
        (header_of('{"a":1}'), "corrupt: its header is not that of safetensors"),
        (header_of('{"a":%s,"a":%s}' % (ENTRY, ENTRY), bytes(4)), "corrupt: .*twice"),  # noqa: UP031
        (header_of('{"__metadata__":{"a":1}}'), "corrupt: .*metadata must be strings"),
        (header_of('{"a":%s}' % ENTRY, bytes(5)), "corrupt: its header tells of .* bytes, the file has"),  # noqa: UP031
        (header_of('{"a":%s}' % ENTRY.replace("[0,4]", "[4,8]"), bytes(8)), "corrupt: 'a' begins at byte 4"),  # noqa: UP031
        (header_of('{"a":%s}' % ENTRY.replace("[1]", "[2]"), bytes(4)), r"corrupt: 'a' of float32 and shape \(2,\)"),  # noqa: UP031
        (header_of('{"a":%s}' % ENTRY.replace("[1]", "[-1]"), bytes(4)), r"corrupt: 'a' has the shape \[-1\]"),  # noqa: UP031
        (header_of('{"a":%s}' % ENTRY.replace("F32", "F4"), bytes(4)), "'a' is of dtype F4, which this torch does"),  # noqa: UP031
        (struct.pack("<Q", 10**9) + b"{}", "corrupt: its header would have 1000000000 bytes"),
    ],
)
def test_a_corrupt_header_of_safetensors(tmp_path, refused, content, match):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(content)
    refused(bad, rf"bad\.safetensors: {match}")


def test_code_in_a_pickle_is_not_run(tmp_path, refused):
    for number, old in enumerate((False, True)):
        trace = tmp_path / "trace"
        bad = tmp_path / f"bad{number}.pt"
        torch.save({"a": run_code(f"open({str(trace)!r}, 'w')")}, bad, _use_new_zipfile_serialization=not old)
        refused(bad, r"bad\d\.pt: holds exec, and to load it could run code, so it is not loaded")
        assert not trace.exists()


def test_a_class_in_a_pickle_is_named_and_may_be_allowed(tmp_path, refused):
    bad = tmp_path / "bad.pt"
    torch.save(GOOD | {"layer": torch.nn.Identity()}, bad)
    refused(bad, r"holds torch\.nn\.modules\.linear\.Identity, .*torch\.serialization\.add_safe_globals")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([torch.ones(1)], "expected a dict of tensors, got list"),
        ({"epoch": 3}, "expected one dict of tensors, got the keys 'epoch'$"),
        ({1: torch.ones(1)}, r"expected tensors with names, got the keys 1"),
        ({"a": torch.ones(2, 2).to_sparse()}, r"'a' is torch\.sparse_coo; expected a dense tensor"),
        ({"a": torch.empty(2, device="meta")}, "'a' is on the meta device; expected a dense tensor"),
    ],
)
def test_a_torch_file_without_dense_named_tensors(tmp_path, refused, content, match):
    bad = tmp_path / "bad.pt"
    torch.save(content, bad)
    refused(bad, rf"bad\.pt: {match}")


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{", "corrupt: no index of shards"),
        ('{"weight_map": {}}', "corrupt: no index of shards"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "expected the names of files beside the index, got '../x.safet"),
        (
            '{"weight_map": {"a": "s.safetensors", "c": "s.safetensors"}}',
            "'c' is missing, the index .* says it is",
        ),
        ('{"weight_map": {"a": "s.safetensors"}}', "unexpected 'b', which the index .* does not name"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors: cannot be read: No such file"),
    ],
)
def test_an_index_that_does_not_match_its_shards(tmp_path, index, match):
    save(tmp_path / "s.safetensors", GOOD)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(CheckpointError, match=match):
        checkpoints.average([path], tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_an_index_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: cannot be read: No such file"):
        checkpoints.average([tmp_path / "model.safetensors.index.json"], tmp_path / "out.safetensors")


def test_a_piece_that_ends_too_early_is_named(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(6))
    with open(path, "rb") as file:
        stamp = tensors.Stamp.of(file.fileno())
    with pytest.raises(CheckpointError, match="short: truncated: 6 bytes of 'w' are missing"):
        tensors.read_piece(path, stamp, 0, tensors.Piece("w", 0, 3), torch.empty(3))


def test_the_output_may_not_be_an_input_also_under_another_name(tmp_path, suffix):
    paths = [save(tmp_path / f"{index}{suffix}", GOOD) for index in range(2)]
    before = paths[1].read_bytes()
    link = tmp_path / f"link{suffix}"
    link.symlink_to(paths[1])
    for output in (paths[1], link):
        with pytest.raises(CheckpointError, match=r"the output is also an input, .*1\.\w+; name another output"):
            checkpoints.average(paths, output)
    assert paths[1].read_bytes() == before


def test_the_output_may_not_be_a_shard_of_an_input(tmp_path):
    save(tmp_path / "s.safetensors", {"a": torch.ones(1)})
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "s.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"the output is also an input, .*s\.safetensors"):
        checkpoints.average([path], tmp_path / "s.safetensors")


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ("out.npz", "the output must end in one of .safetensors, .pt, .pth, .bin, .ckpt, got '.npz'"),
        ("out", "got 'no suffix'"),
        ("nowhere/out.pt", "cannot be written: No such file or directory; it is as it was before"),
        ("folder.pt", "the output is a folder; name a file"),
    ],
)
def test_an_output_that_cannot_be_written(tmp_path, output, match):
    (tmp_path / "folder.pt").mkdir()
    path = save(tmp_path / "in.pt", GOOD)
    with pytest.raises(CheckpointError, match=match):
        checkpoints.average([path], tmp_path / output)


def test_a_full_disk_is_told_before_the_work(tmp_path, suffix, refused, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage._replace(free=10))
    bad = save(tmp_path / f"bad{suffix}", GOOD)
    refused(bad, r"out\.\w+: cannot be written: 56 bytes are to be written, 10 are free")


def test_a_disk_that_fills_up_leaves_the_old_output(tmp_path, suffix, refused, monkeypatch):
    calls = iter(range(100))

    def write_all(file, data, write=tensors.write_all):
        if next(calls):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, data)

    monkeypatch.setattr(tensors, "write_all", write_all)
    bad = save(tmp_path / f"bad{suffix}", GOOD)
    refused(bad, r"out\.\w+: cannot be written: No space left on device; it is as it was before")


def test_what_interrupts_the_work_leaves_nothing_behind(tmp_path, suffix, refused):
    def interrupt(done, total):
        raise KeyboardInterrupt

    bad = save(tmp_path / f"bad{suffix}", GOOD)
    refused(bad, None, KeyboardInterrupt, progress=interrupt)


def test_a_file_that_changes_while_it_is_read(tmp_path, suffix, refused, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 16)
    bad = save(tmp_path / f"bad{suffix}", GOOD)

    def change(done, total):
        bad.write_bytes(bad.read_bytes() + b" ")

    refused(bad, r"bad\.\w+: the file was changed while it was being read", progress=change)


@pytest.mark.parametrize(
    ("weights", "normalize", "error", "match"),
    [
        ([1], True, ValueError, "weights must hold one number for each file, got 1 for 2 files"),
        ([1, "x"], True, TypeError, r"weights\[1\] must be a number, got 'x'"),
        ([1, float("nan")], True, ValueError, r"weights\[1\] must be finite, got nan"),
        ([1, -1], True, ValueError, "weights must have a sum other than 0"),
        ([0, 0], False, ValueError, "weights must have a sum other than 0"),
    ],
)
def test_weights_that_cannot_be_used(tmp_path, suffix, refused, weights, normalize, error, match):
    refused(save(tmp_path / f"bad{suffix}", GOOD), match, error, weights=weights, normalize=normalize)


def test_arguments_that_are_none(tmp_path, suffix):
    path = save(tmp_path / f"in{suffix}", GOOD)
    with pytest.raises(TypeError, match="paths must be a list of paths, got the one path"):
        checkpoints.average(path, tmp_path / "out.pt")
    with pytest.raises(ValueError, match="paths must hold at least one path, got none"):
        checkpoints.average([], tmp_path / "out.pt")
    for dtype in ("number", "int64", torch.int32, 3):
        with pytest.raises(ValueError, match="dtype must be a floating dtype of torch or its name, got"):
            checkpoints.average([path], tmp_path / "out.pt", dtype=dtype)
    assert names_in(tmp_path) == {f"in{suffix}"}


def test_a_bar_needs_rich(tmp_path, suffix, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    path = save(tmp_path / f"in{suffix}", GOOD)
    with pytest.raises(ImportError, match=r"progress=True needs rich, .*pip install 'functavg\[progress\]'"):
        checkpoints.average([path], tmp_path / "out.pt", progress=True)


@pytest.mark.skipif(sys.platform != "linux", reason="permissions of Unix")
def test_an_output_keeps_its_permissions_and_its_link(tmp_path, suffix):
    path = save(tmp_path / f"in{suffix}", GOOD)
    (tmp_path / f"real{suffix}").write_bytes(b"old")
    (tmp_path / f"real{suffix}").chmod(0o640)
    (tmp_path / f"out{suffix}").symlink_to(f"real{suffix}")
    checkpoints.average([path], tmp_path / f"out{suffix}")
    assert (tmp_path / f"out{suffix}").is_symlink()
    assert (tmp_path / f"real{suffix}").stat().st_mode & 0o777 == 0o640
    assert load(tmp_path / f"real{suffix}").keys() == GOOD.keys()


class Shard(torch.Tensor):
    """What tells a DTensor from a tensor."""

    def to_local(self):
        raise AssertionError


def test_shards_of_tensors_are_refused(tmp_path):
    shard = torch.ones(2).as_subclass(Shard)
    with pytest.raises(TypeError, match="it is a DTensor: save it with"):
        checkpoints.save_weights(tmp_path / "out.pt", {"w": shard})
    with pytest.raises(CheckpointError, match="'w' is a DTensor; save the full tensors, or average while training"):
        torch_reader.check_dense(tmp_path / "in.pt", "w", shard)
