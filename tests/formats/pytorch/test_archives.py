# SPDX-License-Identifier: Apache-2.0
"""Broken and forged containers: each way to break a zip, legacy or tar file is an error with a name."""

from __future__ import annotations

import pickle
import struct
import zipfile

import pytest
import torch

from nvflare_lazy.errors import (
    ArchiveError,
    PyTorchCheckpointError,
)
from nvflare_lazy.formats.pytorch import _zip, open_pytorch, sniff_pytorch
from nvflare_lazy.tensors.tensor_file import TensorFile
from tests.formats.pytorch import files

CENTRAL = b"PK\x01\x02"
END = b"PK\x05\x06"


@pytest.fixture
def path(tmp_path):
    """A zip checkpoint with two storages."""
    torch.save({"a": torch.arange(100.0), "b": torch.arange(7.0)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def rewrite(path, change) -> None:
    data = bytearray(path.read_bytes())
    changed = change(data)
    path.write_bytes(data if changed is None else changed)


def entry_of(data: bytearray, name: bytes) -> int:
    """Where a record's entry in the directory begins."""
    return data.index(name, data.index(CENTRAL)) - 46


def rezipped(path, **options) -> None:
    """Write the same records again with Python's zipfile."""
    records = files.records_of(path)
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in records.items():
            archive.writestr(f"model/{name}", data)


# ---- zip: valid archives ------------------------------------------------------------------------------------------


def test_archive_of_another_writer(path):
    """An archive that was unpacked and packed again without compression is the same checkpoint."""
    expected = torch.load(path)
    rezipped(path)
    files.assert_same(open_pytorch(path), expected)


def test_directories_and_comments_are_allowed(path):
    """Packing tools add entries for directories, and some a comment at the end."""
    records = files.records_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = b"packed by hand PK\x05\x06 and so on"
        for name in ("model/", "model/data/"):
            archive.writestr(name, b"")
        for name, data in records.items():
            archive.writestr(f"model/{name}", data)
    assert open_pytorch(path)["b"].tolist() == list(range(7))


@pytest.mark.parametrize("name", ["archive.pt", "with space.pt", "日本.pt", "é.pt", "a.b.c.pt", "no ending"])
def test_the_root_may_have_any_name(tmp_path, name):
    """Everything is in a directory that has the name of the file."""
    torch.save({"a": torch.arange(3)}, tmp_path / name)
    (tmp_path / name).rename(tmp_path / "renamed")
    assert open_pytorch(tmp_path / "renamed")["a"].tolist() == [0, 1, 2]


def test_more_than_65535_records(tmp_path):
    """Beyond the numbers of the classic format the 64-bit ones count."""
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for index in range(66_000):
            archive.writestr(f"r/{index}", b"")
    assert len(_zip.read_directory(TensorFile(tmp_path / "many.zip"))) == 66_000


def test_records_beyond_4_gib(tmp_path):
    """Offsets and sizes that do not fit in 32 bits are read from the 64-bit fields; the file is a hole, almost."""
    numel = (1 << 30) + 10
    with torch._subclasses.FakeTensorMode():
        content = {"wide": torch.empty(numel), "behind": torch.empty(5)}
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content, tmp_path / "large.pt")
    lazy = open_pytorch(tmp_path / "large.pt")
    _, offset = lazy.entries["behind"].source.file_range()
    assert offset > 4 << 30
    with open(tmp_path / "large.pt", "r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<5f", 1, 2, 3, 4, 5))
    assert lazy["behind"].tolist() == [1, 2, 3, 4, 5]
    assert lazy["wide"].shape == (numel,)
    assert lazy["wide"][-1].item() == 0


def test_little_endian_is_what_nothing_means(path):
    """Files from before the byte order was written down are little-endian."""
    records = files.records_of(path)
    del records["byteorder"]
    files.write_records(path, records)
    assert open_pytorch(path)["b"].tolist() == list(range(7))


# ---- zip: invalid archives ----------------------------------------------------------------------------------------


def test_compressed_records(path):
    """A compressed record cannot be read in part, and a bomb is one: nothing is unpacked."""
    rezipped(path, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ArchiveError, match=r"model/data\.pkl' is compressed"):
        open_pytorch(path)


def test_bomb(tmp_path, rss_anon):
    """A few kilobytes that would be half a gigabyte are refused by their method alone."""
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(512 << 20))
    before = rss_anon()
    with pytest.raises(ArchiveError):
        open_pytorch(tmp_path / "bomb.pt")
    assert rss_anon() - before < 16 << 20


@pytest.mark.parametrize("bit", [0x0001, 0x0040, 0x2000])
def test_encrypted_records(path, bit):
    """Each of the flags that mean encryption."""

    def change(data):
        at = entry_of(data, b"/data/0") - 5
        at = data.rindex(CENTRAL, 0, at + 10)
        data[at + 8 : at + 10] = struct.pack("<H", struct.unpack_from("<H", data, at + 8)[0] | bit)

    rewrite(path, change)
    with pytest.raises(ArchiveError, match="encrypted"):
        open_pytorch(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_records(path):
    """Two records of one name: readers differ on which one counts."""
    records = files.records_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (*records.items(), ("data/0", bytes(400))):
            archive.writestr(f"model/{name}", data)
    with pytest.raises(ArchiveError, match="two records called 'model/data/0'"):
        open_pytorch(path)


def test_overlapping_records(path):
    """Two entries of the directory that share bytes, as in bombs made of one record."""

    def change(data):
        first = data.rindex(CENTRAL, 0, data.index(b"/data/0", data.index(CENTRAL)))
        second = data.rindex(CENTRAL, 0, data.index(b"/data/1", data.index(CENTRAL)))
        sizes = struct.pack("<2I", 500, 500)
        data[first + 20 : first + 28] = sizes
        assert second > first

    rewrite(path, change)
    with pytest.raises(ArchiveError, match="data/1' shares bytes"):
        open_pytorch(path)


def test_record_that_runs_into_the_directory(path):
    """The last record may end where the directory begins, and no later."""

    def change(data):
        last = data.rindex(CENTRAL)
        data[last + 20 : last + 28] = struct.pack("<2I", 300, 300)

    rewrite(path, change)
    with pytest.raises(ArchiveError, match="into its directory"):
        open_pytorch(path)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "model/../../x", "../x", "model//x", "model/./x", "model\\x", "a\\..\\b", "model/x\0y"]
)
def test_names_that_lead_out_of_the_archive(path, name):
    """No name ever becomes a path here, but such an archive is not one that torch wrote."""
    records = files.records_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        for record, data in records.items():
            archive.writestr(f"model/{record}", data)
        # Written under another name of that length, since zipfile would tidy some of these up.
        archive.writestr("~" * len(name), b"")
    rewrite(path, lambda data: data.replace(b"~" * len(name), name.encode()))
    with pytest.raises(ArchiveError, match="record with the invalid name"):
        open_pytorch(path)


def test_another_name_in_the_header(path):
    """A record states its name twice; readers that trust the header would see another archive."""

    def change(data):
        at = data.index(b"/data/0")
        data[at + 6 : at + 7] = b"9"

    rewrite(path, change)
    with pytest.raises(ArchiveError, match="another name in its header"):
        open_pytorch(path)


def test_several_checkpoints(path):
    """One archive with two roots has no answer to which one it is."""
    records = files.records_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        for root in ("one", "two"):
            for name, data in records.items():
                archive.writestr(f"{root}/{name}", data)
    with pytest.raises(ArchiveError, match="several checkpoints"):
        open_pytorch(path)


def patch_end(data: bytearray, at: int, value: bytes) -> None:
    end = data.rindex(END)
    data[end + at : end + at + len(value)] = value


def patch_end64(data: bytearray, at: int, value: bytes) -> None:
    end = data.rindex(b"PK\x06\x06")
    data[end + at : end + at + len(value)] = value


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data[:-30], "directory is missing"),
        (lambda data: data[: len(data) // 2], "directory is missing"),
        (lambda data: data[:4], "directory is missing"),
        (lambda data: data + b"x", "directory is missing"),
        (lambda data: data + bytes(70_000), "directory is missing"),
        (lambda data: patch_end64(data, 48, struct.pack("<Q", 7)), "not where it should be"),
        (lambda data: patch_end64(data, 48, b"\xff" * 8), "not where it should be"),
        (lambda data: patch_end64(data, 40, struct.pack("<Q", 7)), "not where it should be"),
        (lambda data: patch_end64(data, 24, b"\xff" * 16), "shorter than its entries"),
        (lambda data: patch_end64(data, 24, struct.pack("<2Q", 2, 2)), "more than its entries"),
        (lambda data: patch_end64(data, 24, struct.pack("<2Q", 10, 10)), "cut short"),
        (lambda data: patch_end64(data, 24, struct.pack("<2Q", 9, 8)), "one part of several"),
        (lambda data: patch_end64(data, 16, b"\1"), "one part of several"),
        (lambda data: patch_end64(data, 4, b"\xff" * 8), "64-bit directory record is broken"),
        (lambda data: patch_end64(data, 0, b"PK\x06\x05"), "64-bit directory record is broken"),
        (lambda data: patch_end(data, -12, b"\xff" * 8), "64-bit directory record is not where"),
        (lambda data: data.replace(CENTRAL, b"PK\x01\x03"), "directory is damaged"),
        (
            lambda data: data.replace(b"PK\x03\x04\0\0\x08\x08", b"PK\x03\x05\0\0\x08\x08"),
            "does not match the directory",
        ),
    ],
)
def test_broken_directories(path, change, what):
    """Each part of the directory that contradicts another part, and a truncated file."""
    rewrite(path, change)
    with pytest.raises(ArchiveError, match=what):
        open_pytorch_without_sniffing(path)


def open_pytorch_without_sniffing(path):
    from nvflare_lazy.formats.pytorch._zip import ZipSource

    return ZipSource(path)


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (20, b"\1", "another number of bytes"),
        (34, b"\1", "another number of bytes"),
        (24, b"\xff\xff\xff\xff", "size of 'model/data.pkl' is missing"),
        (42, b"\xfe\xff\xff\xff", "is outside"),
        (30, b"\xff\xff", "directory is damaged"),
        (38, b"\x10", "the directory 'model/data.pkl' has contents"),
    ],
)
def test_broken_entries(path, at, value, what):
    """An entry whose sizes, offset or lengths make no sense."""

    def change(data):
        first = data.index(CENTRAL)
        data[first + at : first + at + len(value)] = value

    rewrite(path, change)
    with pytest.raises(ArchiveError, match=what):
        open_pytorch(path)


def test_too_many_records(path, monkeypatch):
    """Entries take more memory than their bytes: there is a limit, far beyond any checkpoint."""
    monkeypatch.setattr(_zip, "_MAX_RECORDS", 7)
    with pytest.raises(ArchiveError, match="8 records, more than any checkpoint"):
        open_pytorch(path)


def test_names_in_messages_are_harmless(path):
    """Text of a file reaches a terminal only as quoted text."""
    records = files.records_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (*records.items(), ("\x1b[2J" * 500, b"")):
            archive.writestr(f"model/{name}\\" if "\x1b" in name else f"model/{name}", data)
    with pytest.raises(ArchiveError) as caught:
        open_pytorch(path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_torchscript(tmp_path):
    """A program is not a checkpoint, though it has the same container."""
    files.write_records(
        tmp_path / "model.pt", {"data.pkl": b"\x80\x02}.", "constants.pkl": b"\x80\x02).", "code/a": b""}
    )
    with pytest.raises(ArchiveError, match=r"torch\.jit\.load"):
        open_pytorch(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["weight.npy", "bias.npy"], r"NumPy arrays \(\.npz\)"),
        (["[Content_Types].xml", "word/document.xml"], "an Office document"),
        (["p/archive_format", "p/models/model.json"], r"torch\.export"),
        (["config.json", "model.weights.h5"], "Keras"),
        (["a.txt", "b.txt"], "no PyTorch checkpoint; it has 'a.txt', 'b.txt'"),
        ([], "no PyTorch checkpoint; it has nothing in it"),
    ],
)
def test_other_zip_files(tmp_path, names, what):
    """Many formats are zip files: the error names the format or the contents."""
    with zipfile.ZipFile(tmp_path / "other", "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    with pytest.raises(ArchiveError, match=what):
        open_pytorch_without_sniffing(tmp_path / "other")


@pytest.mark.parametrize(
    ("record", "value", "what"),
    [
        (".data/version", b"11\n", "version b'11"),
        (".data/version", b"0\n", "version b'0"),
        (".data/version", b"x\n", "version b'x"),
        ("byteorder", b"middle", "byte order b'middle'"),
        ("byteorder", b"little" * 100_000, "byte order b'little"),
    ],
)
def test_records_about_the_file(path, record, value, what):
    """An unknown version or byte order."""
    files.write_records(path, files.records_of(path) | {record: value})
    with pytest.raises(ArchiveError, match=what):
        open_pytorch(path)


def test_missing_version(path):
    """Torch requires the version, and so does this package."""
    records = files.records_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name in records.keys() - {"version"}:
            archive.writestr(f"model/{name}", records[name])
    with pytest.raises(ArchiveError, match="version"):
        open_pytorch(path)


@pytest.mark.parametrize(("data", "what"), [(None, "has no storage '1'"), (bytes(24), "should have 28 bytes")])
def test_missing_and_short_storages(path, data, what):
    """A tensor whose storage is not in the archive, or smaller than the pickle says."""
    records = files.records_of(path)
    del records["data/1"]
    files.write_records(path, records if data is None else records | {"data/1": data})
    with pytest.raises(PyTorchCheckpointError, match=what):
        open_pytorch(path)


# ---- legacy ------------------------------------------------------------------------------------------------------


@pytest.fixture
def legacy(tmp_path):
    """A legacy checkpoint with two storages, of 400 and 28 bytes."""
    content = {"a": torch.arange(100.0), "b": torch.arange(7.0)}
    torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    return tmp_path / "model.pt"


def test_legacy_cut_short_anywhere(legacy):
    """However much of the end is missing, it is an error at opening, not garbage at reading."""
    data = legacy.read_bytes()
    for length in range(len(data)):
        legacy.write_bytes(data[:length])
        with pytest.raises(PyTorchCheckpointError):
            open_pytorch(legacy)


def test_legacy_counts_that_lie(legacy):
    """A count that is not the one of the storage would move every storage behind it."""
    data = legacy.read_bytes()
    at = data.rindex(struct.pack("<q", 100))
    for count in (0, 99, 101, -1, 1 << 60, -(1 << 63)):
        legacy.write_bytes(data[:at] + struct.pack("<q", count) + data[at + 8 :])
        with pytest.raises(PyTorchCheckpointError, match="should have 400 bytes"):
            open_pytorch(legacy)


@pytest.mark.parametrize(
    ("keys", "error", "what"),
    [
        (["1", "1"], PyTorchCheckpointError, "or one twice"),
        (["1", "2"], PyTorchCheckpointError, "no tensor is in"),
        ([1], PyTorchCheckpointError, "no tensor is in"),
        ([[]], PyTorchCheckpointError, "no tensor is in"),
        (None, PyTorchCheckpointError, "no list of storages"),
        ({"1": 2}, PyTorchCheckpointError, "no list of storages"),
        ([], PyTorchCheckpointError, "has no storage '1'"),
    ],
)
def test_legacy_lists_of_storages_that_lie(tmp_path, keys, error, what):
    """The list after the contents must name each of its storages once."""
    tensor = files.Named("torch._utils", "_rebuild_tensor")(files.float_storage("1", 2), 0, (2,), (1,))
    storage = struct.pack("<q", 2) + bytes(8)
    files.write_legacy(tmp_path / "model.pt", files.hand_pickle([tensor]), keys=pickle.dumps(keys, 2) + storage * 2)
    with pytest.raises(error, match=what):
        open_pytorch(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("storage", "what"),
    [
        (("storage", files.Named("torch", "FloatStorage"), "0", "cpu", 2), "tuple of six"),
        (("module", files.Named("torch", "FloatStorage"), "0", "cpu", 2, None), "id of a storage"),
        ((5, files.Named("torch", "FloatStorage"), "0", "cpu", 2, None), "id of a storage"),
        (("storage", "FloatStorage", "0", "cpu", 2, None), "not a storage class"),
        (("storage", files.Named("torch", "float32"), "0", "cpu", 2, None), "not a storage class"),
        (("storage", files.Named("torch", "FloatStorage"), 0, "cpu", 2, None), "key is not text"),
        (("storage", files.Named("torch", "FloatStorage"), "0", "cpu", "2", None), "number of elements"),
        (("storage", files.Named("torch", "FloatStorage"), "0", "cpu", -2, None), "exceed its"),
        (("storage", files.Named("torch", "FloatStorage"), "0", "cpu", 1 << 80, None), "exceed its"),
        (("storage", files.Named("torch", "FloatStorage"), "0", "cpu", 2, ("v", 1, 2)), "exceed its"),
        (("storage", files.Named("torch", "FloatStorage"), "0", "cpu", 2, ("v", -1, 2)), "exceed its"),
        (("storage", files.Named("torch", "FloatStorage"), "0", "cpu", 2, ("v", 1, -1)), "exceed its"),
        (("storage", files.Named("torch", "FloatStorage"), "0", "cpu", 2, ("v", 1)), "not described"),
    ],
)
def test_storages_that_make_no_sense(tmp_path, storage, what):
    """Each field of a storage's id that is not what torch writes."""
    files.write_legacy(tmp_path / "model.pt", files.hand_pickle([files.StorageId(*storage)]), [])
    with pytest.raises(PyTorchCheckpointError, match=what):
        open_pytorch(tmp_path / "model.pt")


@pytest.mark.parametrize("field", ["magic", "machine"])
def test_legacy_preamble_is_read_with_the_same_care(tmp_path, field):
    """A call in the pickles before the contents is refused like one in them."""
    evil = b"cos\nsystem\n(S'true'\ntR."
    magic = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
    options = {"magic": magic[:-1] + evil} if field == "magic" else {"machine": evil}
    files.write_legacy(tmp_path / "model.pt", pickle.dumps({}, 2), **options)
    with pytest.raises(PyTorchCheckpointError, match=r"os\.system"):
        open_pytorch(tmp_path / "model.pt")


# ---- tar ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tar(tmp_path):
    files.save_tar({"a": torch.arange(100.0), "b": torch.arange(7.0).view(7, 1)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def tar_members(path) -> dict[str, bytes]:
    import tarfile

    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive.getmembers()}


def test_tar_cut_short_anywhere(tar):
    """However many required records are missing, opening raises an error."""
    data = tar.read_bytes()
    end = data.index(tar_members(tar)["storages"]) + len(tar_members(tar)["storages"])
    for length in range(0, end, 37):
        tar.write_bytes(data[:length])
        with pytest.raises(PyTorchCheckpointError):
            open_pytorch(tar)


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        (lambda info: setattr(info, "type", b"2"), ArchiveError, "links, directories or holes"),
        (lambda info: setattr(info, "type", b"S"), ArchiveError, "links, directories or holes"),
        (
            lambda info: setattr(info, "pax_headers", {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
            ArchiveError,
            "tar archive",
        ),
        (lambda info: setattr(info, "pax_headers", {"size": "99999999"}), ArchiveError, "cut short"),
        (lambda info: setattr(info, "pax_headers", {"size": "x"}), ArchiveError, "tar archive"),
        (lambda info: setattr(info, "pax_headers", {"path": "pickle"}), ArchiveError, "two members"),
        (lambda info: setattr(info, "pax_headers", {"comment": "x" * 200_000}), ArchiveError, "bytes of headers"),
        (
            lambda info: setattr(info, "name", "other-" + info.name),
            ArchiveError,
            "no PyTorch checkpoint; it has 'other",
        ),
    ],
)
def test_forged_tar_members(tar, change, error, what):
    """Links, holes and headers that contradict the archive."""
    files.write_tar(tar, tar_members(tar), change)
    with pytest.raises(error, match=what):
        open_pytorch(tar)


def test_endless_tar(tar):
    """Archives with very many members are not checkpoints; their headers are not read to the end."""
    files.write_tar(tar, {str(index): b"" for index in range(100)})
    with pytest.raises(ArchiveError, match="too many"):
        open_pytorch(tar)


@pytest.mark.parametrize(
    ("member", "old", "new", "error"),
    [
        ("storages", pickle.dumps(2, 2), pickle.dumps(3, 2), PyTorchCheckpointError),
        ("storages", pickle.dumps(2, 2), pickle.dumps(1, 2), PyTorchCheckpointError),
        ("storages", pickle.dumps(2, 2), pickle.dumps(-1, 2), PyTorchCheckpointError),
        ("storages", pickle.dumps(2, 2), pickle.dumps("2", 2), PyTorchCheckpointError),
        ("storages", pickle.dumps(2, 2), pickle.dumps(1 << 60, 2), PyTorchCheckpointError),
        ("storages", struct.pack("<q", 100), struct.pack("<q", 1 << 60), PyTorchCheckpointError),
        ("storages", struct.pack("<q", 100), struct.pack("<q", -1), PyTorchCheckpointError),
        ("storages", b"FloatStorage", b"FloatTensor\0", PyTorchCheckpointError),
        ("storages", pickle.dumps([], 2), pickle.dumps(None, 2), PyTorchCheckpointError),
        ("storages", pickle.dumps([], 2), pickle.dumps([(1, 2, 3)], 2), PyTorchCheckpointError),
        ("storages", pickle.dumps([], 2), pickle.dumps([(1, 2, 3, 4)], 2), PyTorchCheckpointError),
        ("tensors", struct.pack("<ii", 1, 0), struct.pack("<ii", 1 << 30, 0), PyTorchCheckpointError),
        ("tensors", struct.pack("<ii", 1, 0), struct.pack("<ii", -1, 0), PyTorchCheckpointError),
        ("tensors", struct.pack("<q", 100), struct.pack("<q", 1 << 62), PyTorchCheckpointError),
        ("tensors", struct.pack("<q", 100), struct.pack("<q", 101), PyTorchCheckpointError),
    ],
)
def test_tar_tables_that_lie(tar, member, old, new, error):
    """Each table of a tar checkpoint with a number that cannot be true."""
    members = tar_members(tar)
    assert old in members[member]
    members[member] = members[member].replace(old, new, 1)
    files.write_tar(tar, members)
    with pytest.raises(error):
        open_pytorch(tar)


@pytest.mark.parametrize("persistent", ["12", "x", "-1", "9" * 5000, 12, (), None])
def test_tar_references_to_nothing(tar, persistent):
    """A tensor that is not in the tables."""
    members = tar_members(tar)
    members["pickle"] = b"\x80\x02" + pickle.dumps(persistent, 2)[2:-1] + b"Q."
    files.write_tar(tar, members)
    with pytest.raises(PyTorchCheckpointError, match="invalid pickle"):
        open_pytorch(tar)


# ---- which kind it is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saver", "kind"),
    [(files.save_zip, "zip"), (files.save_legacy, "legacy"), (files.save_tar, "tar")],
    ids=["zip", "legacy", "tar"],
)
def test_sniffs_each_kind(tmp_path, saver, kind):
    """The first bytes say which kind it is."""
    saver({"a": torch.arange(3.0)}, tmp_path / "model")
    assert sniff_pytorch((tmp_path / "model").read_bytes()[:512]) == kind


@pytest.mark.parametrize("protocol", range(1, 6))
def test_sniffs_legacy_files_of_any_protocol(tmp_path, protocol):
    """The magic number is a pickle, and looks different in each protocol."""
    files.save_legacy({"a": torch.arange(3.0)}, tmp_path / "model", protocol)
    assert sniff_pytorch((tmp_path / "model").read_bytes()[:512]) == "legacy"


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"P",
        b"<!DOCTYPE html>",
        b"version https://git-lfs.github.com/spec/v1\n",
        pickle.dumps({"a": 1}),
        bytes(512),
    ],
)
def test_sniffs_nothing_else(tmp_path, head):
    """Opening a file that is not a checkpoint of torch raises an error with the reason."""
    assert sniff_pytorch(head) is None
    (tmp_path / "file").write_bytes(head)
    with pytest.raises(ArchiveError, match="does not start like"):
        open_pytorch(tmp_path / "file")
