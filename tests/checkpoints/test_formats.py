"""Files are laid out as the libraries of their formats lay them out, and take no memory of their size."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from functavg import checkpoints
from functavg.checkpoints import safetensors_format
from functavg.checkpoints.opening import open_weights
from functavg.checkpoints.tensors import info_of
from functavg.checkpoints.writers import SafetensorsWriter
from tests.checkpoints.files import FORMATS, load, save

DTYPES = [getattr(torch, name) for name in safetensors_format.NAMES if hasattr(torch, name)]
# Of those that the library of the format knows in torch.
KNOWN = [dtype for dtype in DTYPES if dtype not in (getattr(torch, "float8_e8m0fnu", None),)]


def tensor_of(dtype, shape):
    size = torch.empty(shape, dtype=dtype).nbytes
    return (
        (torch.arange(size) % 2).to(torch.uint8).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    )


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(KNOWN), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=1),
)
def test_safetensors_are_written_to_the_byte_as_their_library_does(tmp_path_factory, forms, metadata):
    tensors = {name: tensor_of(dtype, shape) for name, (dtype, shape) in forms.items()}
    path = tmp_path_factory.mktemp("golden") / "out.safetensors"
    infos = {name: info_of(tensor) for name, tensor in tensors.items()}
    writer = SafetensorsWriter(path, infos, {}, metadata)
    with open(path, "wb", buffering=0) as file:
        writer.begin(file)
        for name in writer.names:
            writer.write(file, None, tensors[name].reshape(-1))
    assert path.read_bytes() == safetensors.torch.save(tensors, metadata or None)
    reader = open_weights(path)
    for name, tensor in tensors.items():
        assert reader.infos[name] == infos[name]
        assert torch.equal(reader.read(name).view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else True


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_dtype_of_the_format_goes_through(tmp_path, suffix):
    tensors = {str(dtype): tensor_of(dtype, (4,)) for dtype in KNOWN}
    path = save(tmp_path / f"in{suffix}", tensors)
    checkpoints.average([path], tmp_path / f"out{suffix}")
    result = load(tmp_path / f"out{suffix}")
    for name, tensor in tensors.items():
        assert result[name].dtype == tensor.dtype
        assert result[name].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_a_torch_file_has_the_entries_that_torch_gives_it(tmp_path):
    path = save(tmp_path / "in.pt", {"a": torch.ones(3), "b": torch.zeros(0), "c": torch.ones(2, 2).bfloat16()})
    checkpoints.average([path], tmp_path / "out.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "out.pt") as new:
        sizes = [
            {
                entry.filename.split("/", 1)[1]: entry.file_size
                for entry in archive.infolist()
                if "/data/" in entry.filename
            }
            for archive in (old, new)
        ]
    assert sizes[0] == sizes[1] == {"data/0": 12, "data/1": 0, "data/2": 8}
    assert torch.load(tmp_path / "out.pt", mmap=True)["c"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_layout_of_torch_that_is_not_as_expected_is_refused(tmp_path, monkeypatch):
    path = save(tmp_path / "in.pt", {"a": torch.ones(3)})
    monkeypatch.setattr(torch, "save", lambda nest, file: zipfile.ZipFile(file, "w").writestr("x/data/0", "abc"))
    with pytest.raises(checkpoints.CheckpointError, match=r"torch 2\..* does not lay out files as expected"):
        checkpoints.average([path], tmp_path / "out.pt")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory used")
@pytest.mark.parametrize("suffix", FORMATS)
def test_memory_does_not_grow_with_the_files(tmp_path, suffix):
    """Four files of 64 MiB in one tensor each take less than two of them, with what their threads work on."""
    paths = [str(save(tmp_path / f"{n}{suffix}", {"w": torch.full((2**24,), float(n))})) for n in range(4)]
    small = [str(save(tmp_path / f"small{n}{suffix}", {"w": torch.full((2,), float(n))})) for n in range(4)]
    code = f"""
from functavg import checkpoints
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
checkpoints.average({small!r}, {str(tmp_path / f"out{suffix}")!r})
before = peak()
checkpoints.average({paths!r}, {str(tmp_path / f"out{suffix}")!r})
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**27
    assert load(tmp_path / f"out{suffix}")["w"][::1000].unique().tolist() == [1.5]


def test_other_threads_keep_the_number_that_torch_computes_in(tmp_path):
    """Also while files are averaged, by a thread that computes alone."""
    path = save(tmp_path / "in.pt", {"w": torch.ones(3)})
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = []
        checkpoints.average([path], tmp_path / "out.pt", progress=lambda done, total: seen.append(numbers_of_threads()))
        assert seen == [(3, 3)]
        assert numbers_of_threads() == (3, 3)
        assert "functavg" not in {thread.name.partition("_")[0] for thread in threading.enumerate()}
    finally:
        torch.set_num_threads(before)


def numbers_of_threads():
    """The number in this thread, and in one that is new."""
    with ThreadPoolExecutor(1) as pool:
        return torch.get_num_threads(), pool.submit(torch.get_num_threads).result()
