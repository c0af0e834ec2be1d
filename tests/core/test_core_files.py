import errno
import os

import pytest

from keyhole.core import files
from keyhole.core.errors import InputError, StorageError
from keyhole.core.files import read_json, sha256, write_atomically, write_json


def test_a_file_is_written_whole_with_its_folder_and_readable_by_others(tmp_path):
    path = tmp_path / "new" / "folder" / "file.txt"
    write_atomically(path, "Größe\n")
    assert path.read_text(encoding="utf-8") == "Größe\n"
    assert path.stat().st_mode & 0o777 == 0o644
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(step, tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, step, refuse)
    with pytest.raises(StorageError, match=r"writing .*file.txt failed: No space left on device; what was saved before"):
        write_atomically(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file.txt"]


def test_an_interrupt_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    monkeypatch.undo()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file.txt", "old")]


def test_content_reaches_the_disk_before_the_name_does(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(files.os, name, lambda *args, real=real, name=name: (order.append(name), real(*args))[1])
    write_atomically(tmp_path / "file.txt", "new")
    assert order == ["fsync", "replace", "fsync"]


def test_json_comes_back_equal_and_readable(tmp_path):
    value = {"name": "Größe", "list": [1, 2.5, None, True]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "Größe" in (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00"], ids=["cut", "empty", "no text"])
def test_damaged_json_is_named(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(StorageError, match=r"a.json is damaged \(.*\); restore it or remove its folder"):
        read_json(tmp_path / "a.json")


def test_missing_json_is_named(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*a.json"):
        read_json(tmp_path / "a.json")


def test_the_digest_is_sha256_also_of_a_file_in_several_pieces(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "million").write_bytes(b"a" * 1_000_000)
    assert sha256(tmp_path / "million") == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
    (tmp_path / "larger").write_bytes(b"a" * (3 << 20))
    import hashlib

    assert sha256(tmp_path / "larger") == hashlib.sha256(b"a" * (3 << 20)).hexdigest()
