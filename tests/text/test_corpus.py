import importlib.util
import sys
from pathlib import Path

import pytest

from keyhole.core.config import Data, Spec
from keyhole.core.errors import InputError
from keyhole.text import Corpus, read_corpus

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the datasets library (extra `data`) is not installed"
)


def read(source, folder: Path = Path()) -> Corpus:
    return read_corpus(Data.model_validate({"source": source}).source, folder)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_builtin_text_is_all_of_pythons_help_in_the_order_of_its_topics():
    from pydoc_data.topics import topics

    corpus = read("builtin:python")
    assert len(corpus.text) > 400_000
    assert corpus.documents == tuple(topics[name] for name in sorted(topics))


def test_relative_paths_are_found_in_the_given_folder_before_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path / "recipes" / "a.txt", "beside the recipe")
    write(tmp_path / "here" / "a.txt", "in the working directory")
    write(tmp_path / "here" / "b.txt", "only here")
    monkeypatch.chdir(tmp_path / "here")
    assert read("a.txt", tmp_path / "recipes").text == "beside the recipe"
    assert read("b.txt", tmp_path / "recipes").text == "only here"
    assert read(str(tmp_path / "here" / "a.txt"), tmp_path / "recipes").text == "in the working directory"


def test_line_ends_become_newlines_and_a_byte_order_mark_goes(tmp_path):
    write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read("a.txt", tmp_path).text == "one\ntwo\nthree\n"


def test_the_option_encoding_is_used(tmp_path):
    write(tmp_path / "a.txt", "Größe".encode("latin-1"))
    write(tmp_path / "b.txt", "Größe".encode("utf-16"))
    assert read({"name": "a.txt", "encoding": "latin-1"}, tmp_path).text == "Größe"
    assert read({"name": "b.txt", "encoding": "utf-16"}, tmp_path).text == "Größe"


def test_a_folder_gives_its_visible_text_files_in_the_order_of_their_paths(tmp_path):
    for name in ("b.md", "a.txt", "sub/c.py", "skipped.rst", ".hidden/d.txt", "empty.txt"):
        write(tmp_path / "docs" / name, "" if name == "empty.txt" else f"this is {name}")
    assert read("docs", tmp_path).documents == ("this is a.txt", "this is b.md", "this is sub/c.py")
    assert read({"name": "docs", "pattern": "*.rst"}, tmp_path).documents == ("this is skipped.rst",)


def test_equal_text_has_an_equal_hash_wherever_it_lies_and_other_text_another():
    one = Corpus("one", ("ab", "c"))
    assert one.hash == Corpus("two", ("ab", "c")).hash
    assert len({one.hash, Corpus("one", ("a", "bc")).hash, Corpus("one", ("abc",)).hash}) == 3


BAD_FILES = {
    "latin.txt": "Gr\xf6\xdfe".encode("latin-1"),
    "image.txt": b"\x89PNG\r\n\0\0\0",
    "zero.txt": b"text\0text",
    "empty.txt": b"",
    "blank.txt": b" \n\n ",
    "fine.txt": b"fine",
    "data/table.csv": b"1,2",
}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("builtin:pyton", r"there is no built-in text 'pyton'; did you mean 'python'"),
        ("nowhere.txt", r"there is no file or folder nowhere.txt in .*; give \"builtin:python\", a file, a folder"),
        ("x" * 5000, r"there is no file or folder xxx"),
        ("latin.txt", r"latin.txt is not utf-8 text: byte 2 is 0xf6; .*encoding = \"latin-1\""),
        ("image.txt", r"image.txt is not a text file: byte 6 is zero"),
        ("zero.txt", r"zero.txt is not a text file: byte 4 is zero"),
        ("empty.txt", r"empty.txt holds no text"),
        ("blank.txt", r"blank.txt holds no text"),
        ("data", r"has no file \*.txt, \*.md, \*.py; choose others with the option pattern"),
        ({"name": "data", "pattern": "/x"}, r"pattern '/x' is no file pattern"),
        ({"name": "fine.txt", "encoding": "utf-9"}, r"there is no encoding 'utf-9'"),
        ({"name": "fine.txt", "encoding": "hex"}, r"there is no encoding 'hex'"),
        (
            {"name": "fine.txt", "encodin": "utf-8"},
            r"source 'fine.txt' has no option 'encodin'; did you mean 'encoding'",
        ),
        ({"name": "fine.txt", "encoding": 8}, r"option encoding of source 'fine.txt' is 8; give a string"),
        ({"name": "builtin:python", "part": "x"}, r"source 'builtin:python' has no option 'part'; it takes no options"),
        ("task:copy", r"'task:copy' is a generated task"),
        ("hf:", r"source 'hf:' names no dataset"),
    ],
)
def test_a_bad_source_is_refused_in_one_sentence(source, words, tmp_path):
    for name, content in BAD_FILES.items():
        write(tmp_path / name, content)
    with pytest.raises(InputError, match=words) as refusal:
        read(source, tmp_path)
    assert "\n" not in str(refusal.value)


def test_without_the_datasets_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs the datasets library; install it with: pip install 'keyhole\[data\]'"):
        read("hf:some/name")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with datasets in both forms that the library saves: one part, and several."""
    datasets = pytest.importorskip("datasets", reason="the datasets library (extra `data`) is not installed")
    folder = tmp_path_factory.mktemp("saved")
    rows = {"text": ["first row", "second row"], "label": [0, 1]}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows).save_to_disk(folder / "plain")
    parts = {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict({"text": ["third row"]})}
    datasets.DatasetDict(parts).save_to_disk(folder / "parts")
    return folder


@needs_datasets
def test_a_saved_dataset_gives_its_rows_as_documents(saved):
    assert read("hf:plain", saved).documents == ("first row", "second row")
    assert read("hf:parts", saved).documents == ("first row", "second row")
    assert read({"name": "hf:parts", "part": "test"}, saved).documents == ("third row",)


@needs_datasets
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Spec(name="hf:plain", options={"column": "txt"}), r"has no column 'txt'; .*\(it has: text, label\)"),
        (Spec(name="hf:plain", options={"column": "label"}), r"column 'label' of hf:plain holds int in row 0"),
        (Spec(name="hf:parts", options={"part": "tets"}), r"hf:parts has no part 'tets'; did you mean 'test'"),
        (Spec(name="hf:.."), r"hf:\.\. cannot be opened: .*; give a dataset of the hub or a folder written by"),
    ],
)
def test_a_bad_dataset_is_refused_in_one_sentence(source, words, saved):
    with pytest.raises(InputError, match=words):
        read_corpus(source, saved)
